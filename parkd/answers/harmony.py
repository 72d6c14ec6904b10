"""Reads harmony, the format of gpt-oss: an answer is several messages, each with a channel, and a call has a recipient.

`<|start|>assistant` ends the prompt. Then, for example,

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

or `<|start|>assistant<|channel|>final<|message|>text<|return|>` in place of the second line. A recipient may also stand
before the channel, as the model's own template writes it.

    header ------<|message|>--> message --<|end|>--> between --<|start|>--> header
"""

from __future__ import annotations

import re
from enum import Enum, auto

from parkd.answers.base import ReasoningMarks
from parkd.answers.readers.json_machine import WHITESPACE, JsonArguments
from parkd.answers.readers.signals import NAME_LIMIT, CallOpened, Malformed, Names, Signal
from parkd.answers.reasoning import Piece
from parkd.answers.scan import first_marker, held_tail

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ROLE, ANALYSIS, COMMENTARY, FINAL = "assistant", "analysis", "commentary", "final"
FUNCTIONS = "functions."
RECIPIENT = " to="
ANALYSIS_MARKS = ReasoningMarks(f"{CHANNEL}{ANALYSIS}{MESSAGE}", END)
"""Around thinking. What follows the second is another message of the same answer."""
HEAD_ROOM = 128
"""Characters of a header beside the recipient's name."""
BETWEEN_MESSAGES = "\n\n"
"""What separates two thoughts, or two texts, of one answer."""

_ENDS = (END, CALL, RETURN)
_BEGINNINGS = (CHANNEL, START, RECIPIENT, RECIPIENT.lstrip())
_HEADER = re.compile(
    rf"\s*(?:{re.escape(START)})?(?:{ROLE})?(?P<before>{RECIPIENT}.+?)?"
    rf"{re.escape(CHANNEL)}(?P<channel>\w+)(?P<behind>.*){re.escape(MESSAGE)}",
    re.DOTALL,
)


class _Place(Enum):
    HEADER = auto()
    MESSAGE = auto()
    BETWEEN = auto()


class HarmonySplitter:
    """Separates the thinking of an answer from its texts and calls, as `ReasoningSplitter` does for other formats.

    A call is passed on with its header, from the channel on, for `HarmonyCall`. What has no header, or one that cannot
    be read, is text.
    """

    def __init__(self, name_limit: int = NAME_LIMIT) -> None:
        """`name_limit` is the most characters in a tool's name."""
        self._place = _Place.HEADER
        self._header_limit = HEAD_ROOM + name_limit
        self._held = ""
        self._channel = FINAL
        self._begun = {True: False, False: False}
        """Whether a character was given out, of thinking and of texts."""
        self._separates = False
        """What the message says is to be separated from what an earlier one said."""

    @property
    def thinking(self) -> bool:
        return self._place is _Place.MESSAGE and self._channel == ANALYSIS

    def push(self, text: str) -> Piece:
        text, self._held = self._held + text, ""
        thought, body = "", ""
        while text:
            if self._place is _Place.MESSAGE:
                said, text = self._message(text)
                if self._channel == ANALYSIS:
                    thought += said
                else:
                    body += said
            elif self._place is _Place.BETWEEN:
                text = self._between(text)
            else:
                opened, text = self._header(text)
                body += opened
        return Piece(thought, body)

    def finish(self) -> Piece:
        """What was held back, but for a header that broke off, which is no text."""
        held, self._held = self._held, ""
        if self._place is not _Place.MESSAGE and held.lstrip().startswith((CHANNEL, START)):
            held = ""
        return Piece(held, "") if self.thinking else Piece("", held)

    def _header(self, text: str) -> tuple[str, str]:
        """(what a call begins with, the text behind the header); holds back a header that is not whole."""
        begun = text.lstrip()
        if not any(begun.startswith(mark) or mark.startswith(begun) for mark in (*_BEGINNINGS, RECIPIENT.lstrip())):
            return self._open(FINAL), text
        head, message, rest = text.partition(MESSAGE)
        if not message:
            if len(text) < self._header_limit:
                self._held = text
                return "", ""
            return self._open(FINAL), text
        read = _HEADER.fullmatch(head + message)
        if read is None:
            return self._open(FINAL), text
        before, behind = read["before"] or "", read["behind"]
        if not before and RECIPIENT not in behind:
            return self._open(read["channel"]), rest
        self._open(COMMENTARY, separates=False)
        return f"{CHANNEL}{read['channel']}{before}{behind}{MESSAGE}", rest

    def _open(self, channel: str, *, separates: bool = True) -> str:
        self._place, self._channel = _Place.MESSAGE, channel
        self._separates = separates and self._begun[channel == ANALYSIS]
        return ""

    def _message(self, text: str) -> tuple[str, str]:
        """(what the message says of it, the text behind the message)."""
        found = first_marker(text, _ENDS)
        if found is None:
            shown = len(text) - held_tail(text, _ENDS)
            said, self._held, rest = text[:shown], text[shown:], ""
        else:
            place, mark = found
            said, rest = text[:place], text[place + len(mark) :]
        is_thought = self._channel == ANALYSIS
        if said:
            if self._separates:
                said, self._separates = BETWEEN_MESSAGES + said, False
            self._begun[is_thought] = True
        if found is not None:
            self._place = _Place.BETWEEN
        return said, rest

    def _between(self, text: str) -> str:
        """The text from the next message's header on; holds back what may be the beginning of one."""
        begun = text.lstrip()
        if begun.startswith(START):
            self._place = _Place.HEADER
            return begun
        if START.startswith(begun):
            self._held = text
            return ""
        self._open(FINAL)
        return text


class HarmonyCall:
    """Reads a call from behind `CHANNEL` to the end of its arguments."""

    def __init__(self, names: Names) -> None:
        self.done = False
        self._names = names
        self._head = ""
        self._name = ""
        self._arguments: JsonArguments | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._arguments is not None:
            signals = self._arguments.feed(ch)
            self.done = self._arguments.done
            return signals
        if self._name:
            if ch in WHITESPACE:
                return []
            self._arguments = JsonArguments()
            signals = self._arguments.feed(ch)
            return [CallOpened(self._name), *signals]
        if len(self._head) >= HEAD_ROOM + self._names.limit:
            raise Malformed
        self._head += ch
        if self._head.endswith(MESSAGE):
            self._name = self._read_name()
        return []

    def _read_name(self) -> str:
        """The recipient in the header: behind the channel, and before the type of what the message says."""
        told, typed, _ = self._head.removesuffix(MESSAGE).partition(CONSTRAIN)
        _, has_recipient, recipient = told.partition(RECIPIENT)
        if not has_recipient:
            raise Malformed
        name = recipient.strip().removeprefix(FUNCTIONS)
        return self._names.read(name if typed or self._names.accepts(name) else name.rpartition(" ")[0])
