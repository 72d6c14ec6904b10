"""Response templates: a model's own description of how to parse its answers (`response_template` in
`tokenizer_config.json`; transformers, `parse_response`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate as LibraryTemplate
from transformers.utils.chat_parsing.response_templates import load_response_template

log = logging.getLogger(__name__)


class ResponseTemplate:
    """The response template of one model. Thread-safe."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Raises ValueError if transformers rejects `spec`."""
        self._texts = tuple(_texts(spec))
        self._template: LibraryTemplate = load_response_template(dict(spec))

    @classmethod
    def of(cls, tokenizer: Any) -> ResponseTemplate | None:
        """The tokenizer's response template; None if it has none, or an invalid one, which is logged."""
        spec = getattr(tokenizer, "response_template", None)
        if spec is None:
            return None
        try:
            return cls(spec)
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("the model's response template is invalid and not used: %s", error)
            return None

    def marks(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """The special tokens that occur in the template, so that answers cannot be parsed without them."""
        return frozenset(
            token for token in special_tokens if any(token in text or re.escape(token) in text for text in self._texts)
        )

    def reader(self, prompt_tail: str, tools: Sequence[Mapping[str, Any]]) -> ResponseReader:
        return ResponseReader(self._template, prompt_tail, tools)


class ResponseReader:
    """Parses one answer incrementally. Events are those of transformers: `type` is `region_open`, `region_chunk` (with
    `text`, and `dirty` if only the whole region can be interpreted) or `region_close` (with `value`); `field` is a key
    of the message."""

    def __init__(self, template: LibraryTemplate, prompt_tail: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """`prompt_tail` is the end of the rendered prompt. It is ignored if it does not contain the beginning of the
        assistant's turn."""
        known = template.start_anchor_re.search(prompt_tail) is not None
        self._parser = ResponseParser(template, prompt_tail if known else "", tools=[dict(tool) for tool in tools])
        self._closes = {name: field.close_re for name, field in template.fields.items()}
        self.initial: Sequence[Mapping[str, Any]] = self._parser.initial_events
        """Events of regions that the prompt has already opened."""

    def closing(self, field: str, text: str) -> int:
        """Length of the delimiter at the start of `text` that closes the field's region; 0 if there is none."""
        found = close.match(text) if (close := self._closes.get(field)) is not None else None
        return 0 if found is None else len(found[0])

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """The events of the next piece of text. Raises what the library raises for an answer that does not fit the
        template, usually ValueError; the reader must not be used afterwards."""
        events: list[Mapping[str, Any]] = self._parser.feed(text)
        return events

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """The last events: no text follows. Raises as `feed` does."""
        events: list[Mapping[str, Any]] = self._parser.finalize()[1]
        return events


def _texts(spec: Any) -> Iterator[str]:
    """All strings in nested mappings and sequences, except keys."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping):
        for value in spec.values():
            yield from _texts(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _texts(value)
