"""The engine's template and image reader, with the types of `parkd.engine_adapter.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parkd_engine.vision.images import ImageProcessor
from parkd_engine.words.chat import ChatTemplate as EngineTemplate

from parkd.engine_adapter.base import ImageFacts, ImageSize, ImageTokens, Rendered


class RenderedTemplate:
    """A template whose texts need no proof."""

    def __init__(self, template: EngineTemplate) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        return Rendered(self._template.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt))


class KnownImages:
    """The engine's image reader."""

    def __init__(self, processor: ImageProcessor) -> None:
        tokens = processor.tokens
        self._processor = processor
        self.tokens = ImageTokens(tokens.placeholder, tokens.wrapped, tokens.token_id)
        self.sees_itself = processor.family.sees_itself

    def size(self, data: bytes) -> ImageSize:
        pixels, tokens = self._processor.size(data)
        return ImageSize(pixels, tokens)

    def facts(self, data: bytes) -> ImageFacts:
        facts = self._processor.facts(data)
        return ImageFacts(facts.digest, facts.tokens)
