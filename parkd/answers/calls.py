"""Splits the body of an answer into text and tool calls.

"Sure.\\n" <tool_call> {"name": "f", "arguments": {"a": 1}} </tool_call> "\\n"
|- text --|-- marker --|- fed to a reader ---------------------------------|- text, held while it is blank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parkd.answers.base import CallIds, OutputEvent
from parkd.answers.readers.signals import CallArguments, CallClosed, CallOpened, CallReader, Malformed, Signal
from parkd.answers.scan import first_marker, held_tail
from parkd.types import TextDelta, ToolCallDelta

Section = Callable[[], CallReader]


class CallParser:
    """Splits text from calls. `sections` maps each marker to the reader for the text after it. `bare` reads an answer
    that is a call from its first character on (Llama), which must be `{`.

    The arguments of a call are emitted as they arrive; if the call then turns out to be malformed, these stay and the
    rest is text. White space before a call belongs to the format, not to the text.
    """

    def __init__(
        self,
        sections: Mapping[str, Section],
        call_ids: CallIds,
        *,
        bare: Section | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._sections = dict(sections)
        self._markers = tuple(sections)
        self._call_ids = call_ids
        self._bare = bare
        self._max_calls = max_calls
        self._reader: CallReader | None = None
        self._pending = ""
        """Text that may be the beginning of a marker."""
        self._blanks = ""
        """White space that is dropped if a call follows."""
        self._raw: list[str] = []
        """Text that the reader consumed but that was not emitted, since the marker or the last complete call."""
        self._open = False
        """The beginning of a call was emitted, and its end was not."""
        self._section_calls = 0
        self._index = -1
        self.calls_made = 0

    @property
    def satisfied(self) -> bool:
        return self._max_calls is not None and self.calls_made >= self._max_calls

    def push(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        rest = text
        while rest and not self.satisfied:
            rest = self._read_call(rest, events) if self._reader is not None else self._read_text(rest, events)
        return events

    def finish(self, *, cut: bool, no_text: bool = False) -> list[OutputEvent]:
        """The events held back. The beginning of a call of which nothing was emitted becomes text, in which no further
        marker is looked for; but not if the answer's limit `cut` it, since it is no text then either. With `no_text`
        the beginning of a marker is none."""
        events: list[OutputEvent] = []
        if self.satisfied:
            return events
        raw = "".join(self._raw)
        # A call whose arguments were partly emitted cannot be completed. After a complete call, only the beginning of
        # another one is shown; anything else belongs to the format.
        litter = cut or self._open or (self._section_calls > 0 and "{" not in raw)
        unshown = "" if litter else raw
        self._text(unshown + ("" if no_text else self._pending), events)
        if self._blanks and not self.calls_made and not (cut and raw):
            events.append(TextDelta(self._blanks))
        return events

    def _read_text(self, text: str, events: list[OutputEvent]) -> str:
        text = self._pending + text
        self._pending = ""
        if self._bare is not None:
            begun = text.lstrip()
            if not begun:
                self._pending = text
                return ""
            bare, self._bare = self._bare, None
            if begun.startswith("{"):
                self._blanks = text[: len(text) - len(begun)]
                self._reader = bare()
                return begun
        found = first_marker(text, self._markers)
        if found is None:
            held = held_tail(text, self._markers)
            self._pending = text[len(text) - held :]
            self._text(text[: len(text) - held], events)
            return ""
        place, marker = found
        self._text(text[:place], events)
        self._reader = self._sections[marker]()
        self._section_calls = 0
        self._raw = [marker]
        return text[place + len(marker) :]

    def _text(self, text: str, events: list[OutputEvent]) -> None:
        if not self._markers:
            if text:
                events.append(TextDelta(text))
            return
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            events.append(TextDelta(shown))

    def _read_call(self, text: str, events: list[OutputEvent]) -> str:
        """Feeds the reader until its section ends or is malformed; returns the text that is left."""
        reader = self._reader
        assert reader is not None
        for place, ch in enumerate(text):
            try:
                signals = reader.feed(ch)
            except Malformed:
                return self._break(text[place:], events)
            self._raw.append(ch)
            for signal in signals:
                self._signal(signal, events)
                if self.satisfied:
                    return ""
            if reader.done:
                self._reader = None
                self._raw = []
                return text[place + 1 :]
        return ""

    def _break(self, rest: str, events: list[OutputEvent]) -> str:
        """Ends a section at its first character that does not fit, which is the first of `rest`."""
        self._reader = None
        raw, self._raw = "".join(self._raw), []
        between = self._section_calls > 0 and not self._open
        self._open = False
        if between:
            # After a complete call, text that the reader consumed may be the beginning of another marker.
            return raw + rest
        self._text(raw, events)
        return rest

    def _signal(self, signal: Signal, events: list[OutputEvent]) -> None:
        self._raw = []
        match signal:
            case CallOpened(name):
                self._index += 1
                self._open = True
                self._blanks = ""
                events.append(ToolCallDelta(self._index, self._call_ids(), name))
            case CallArguments(text):
                events.append(ToolCallDelta(self._index, arguments=text))
            case CallClosed():
                self._open = False
                self._section_calls += 1
                self.calls_made += 1
