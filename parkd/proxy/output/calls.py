"""The answer's body: text, and the tool calls inside it.

"Sure.\\n" <tool_call> {"name": "f", "arguments": {"a": 1}} </tool_call> "\\n"
|- text --|-- marker --|- fed to a reader ---------------------------------|- text, held while it is blank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parkd.proxy.output.base import CallIds, OutputEvent
from parkd.proxy.output.scan import first_marker, held_tail
from parkd.proxy.output.signals import CallArguments, CallClosed, CallOpened, CallReader, Malformed, Signal
from parkd.types import TextDelta, ToolCallDelta

Section = Callable[[], CallReader]


class CallParser:
    """Splits text from calls. `sections` maps each marker to the reader of what follows it; `bare` reads an answer
    that is a call from its first character (Llama), which must be `{`.

    With `whole_calls` a call is given out when it is complete, and a call that breaks off is text. Without, its
    arguments are given out as they come; when it then breaks, what was given out stays and the rest is text.
    Blanks before a call belong to the format, not to the text.
    """

    def __init__(
        self,
        sections: Mapping[str, Section],
        call_ids: CallIds,
        *,
        bare: Section | None = None,
        whole_calls: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._sections = dict(sections)
        self._markers = tuple(sections)
        self._call_ids = call_ids
        self._bare = bare
        self._whole_calls = whole_calls
        self._max_calls = max_calls
        self._reader: CallReader | None = None
        self._pending = ""
        """Text that may be the head of a marker."""
        self._blanks = ""
        """Blank text that is dropped if a call follows."""
        self._raw: list[str] = []
        """What the reader took and nobody has been shown yet, from the marker or the last complete call on."""
        self._signals: list[Signal] = []
        self._open = False
        """A call's head has been given out and its end has not."""
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

    def finish(self) -> list[OutputEvent]:
        """What was held. An unfinished call that was not given out is text, without a marker at a later place being
        looked for in it."""
        events: list[OutputEvent] = []
        if self.satisfied:
            return events
        raw = "".join(self._raw)
        # Of a call whose arguments have begun to go out nothing more can be said; behind a complete call only the
        # head of a further one is worth showing, the rest is the format's own.
        litter = self._open or (self._section_calls > 0 and "{" not in raw)
        unshown = "" if litter else raw
        self._text(unshown + self._pending, events)
        if self._blanks and not self.calls_made:
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
        """Feeds the reader until its section ends or breaks, and returns what is left to read."""
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
        """Ends a section whose next character, the first of `rest`, does not fit."""
        self._reader = None
        raw, self._raw = "".join(self._raw), []
        between = self._section_calls > 0 and not self._open and not self._signals
        self._signals = []
        self._open = False
        if between:
            # Behind a complete call: what the reader took as its own may be the head of another marker.
            return raw + rest
        self._text(raw, events)
        return rest

    def _signal(self, signal: Signal, events: list[OutputEvent]) -> None:
        self._signals.append(signal)
        if self._whole_calls and not isinstance(signal, CallClosed):
            return
        signals, self._signals = self._signals, []
        for ready in signals:
            self._show(ready, events)
        self._raw = []

    def _show(self, signal: Signal, events: list[OutputEvent]) -> None:
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
