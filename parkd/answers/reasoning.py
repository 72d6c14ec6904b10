"""Splits the thinking at the start of an answer from the rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from parkd.answers.base import ReasoningMarks
from parkd.answers.scan import held_tail


class _Place(Enum):
    START = auto()
    THINKING = auto()
    AFTER = auto()
    """After the closing marker, before the first visible character of the answer."""
    BODY = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    reasoning: str
    body: str


class Splitter(Protocol):
    """Separates the thinking of one answer from the rest, for the parser."""

    @property
    def thinking(self) -> bool:
        """True while pushed text counts as thinking."""

    def push(self, text: str) -> Piece: ...

    def finish(self) -> Piece:
        """What was held back."""


class ReasoningSplitter:
    """Recognises thinking only at the start, where the model opens it, or where the prompt did (`opened`). A marker
    elsewhere is text. White space next to the markers belongs to the format."""

    def __init__(self, marks: ReasoningMarks | None, *, opened: bool) -> None:
        self._marks = marks
        self._held = ""
        self._begun = False
        """A visible character of the thinking was emitted."""
        if marks is None:
            self._place = _Place.BODY
        else:
            self._place = _Place.THINKING if opened else _Place.START

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THINKING

    def push(self, text: str) -> Piece:
        text = self._held + text
        self._held = ""
        reasoning = ""
        if self._place is _Place.START:
            text = self._start(text)
        if self._place is _Place.THINKING:
            reasoning, text = self._think(text)
        if self._place is _Place.AFTER:
            text = text.lstrip()
            if text:
                self._place = _Place.BODY
        return Piece(reasoning, text)

    def finish(self) -> Piece:
        held, self._held = self._held, ""
        if self._place is _Place.THINKING:
            return Piece(held.rstrip(), "")
        return Piece("", held)

    def _start(self, text: str) -> str:
        """Decides whether thinking begins; holds the text back while that is undecided."""
        assert self._marks is not None
        begun = text.lstrip()
        if begun.startswith(self._marks.open):
            self._place = _Place.THINKING
            return begun.removeprefix(self._marks.open)
        if self._marks.open.startswith(begun):
            self._held = text
            return ""
        self._place = _Place.BODY
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """(thinking, the text after its closing marker)."""
        assert self._marks is not None
        thought, closing, rest = text.partition(self._marks.close)
        if closing:
            self._place = _Place.AFTER
        else:
            shown = thought[: len(thought) - held_tail(thought, (self._marks.close,))].rstrip()
            self._held = thought[len(shown) :]
            thought = shown
        thought = thought.rstrip()
        if not self._begun:
            thought = thought.lstrip()
            self._begun = bool(thought)
        return thought, rest
