"""The engine's template, with the types of `parkd.engine_adapter.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parkd.engine_adapter.base import Rendered
from parkd.words.templates import ChatTemplate as EngineTemplate


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
