"""Response templates: how a model's own files say that its answers are to be read (`response_template` of
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
    """One model's. Thread-safe."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Raises ValueError for what the library cannot read."""
        self._texts = tuple(_texts(spec))
        self._template: LibraryTemplate = load_response_template(dict(spec))

    @classmethod
    def of(cls, tokenizer: Any) -> ResponseTemplate | None:
        """The tokenizer's; None if it has none that can be used."""
        spec = getattr(tokenizer, "response_template", None)
        if spec is None:
            return None
        try:
            return cls(spec)
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("the model's response template is not used: %s", error)
            return None

    def marks(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """Those of the special tokens that it reads answers by."""
        return frozenset(
            token for token in special_tokens if any(token in text or re.escape(token) in text for text in self._texts)
        )

    def reader(self, prompt_tail: str, tools: Sequence[Mapping[str, Any]]) -> ResponseReader:
        return ResponseReader(self._template, prompt_tail, tools)


class ResponseReader:
    """Reads one answer. Its events are the library's: `type` is `region_open`, `region_chunk` (with `text`, and `dirty`
    where only the whole has a meaning) or `region_close` (with `value`); `field` is a key of the message."""

    def __init__(self, template: LibraryTemplate, prompt_tail: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """`prompt_tail` is the end of the rendered prompt; one that does not hold the beginning of the answer's turn
        says nothing."""
        known = template.start_anchor_re.search(prompt_tail) is not None
        self._parser = ResponseParser(template, prompt_tail if known else "", tools=[dict(tool) for tool in tools])
        self._closes = {name: field.close_re for name, field in template.fields.items()}
        self.initial: Sequence[Mapping[str, Any]] = self._parser.initial_events
        """What the prompt has opened already."""

    def closing(self, field: str, text: str) -> int:
        """Length of the mark at the start of `text` that closes the field's region; 0 if there is none."""
        found = close.match(text) if (close := self._closes.get(field)) is not None else None
        return 0 if found is None else len(found[0])

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """Raises what the library's parsers raise for an answer that does not fit, ValueError mostly; then the reader
        is not used again."""
        events: list[Mapping[str, Any]] = self._parser.feed(text)
        return events

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """No text follows. Raises as `feed` does."""
        events: list[Mapping[str, Any]] = self._parser.finalize()[1]
        return events


def _texts(spec: Any) -> Iterator[str]:
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping):
        for value in spec.values():
            yield from _texts(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _texts(value)
