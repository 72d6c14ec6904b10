"""Tells what clients say from what the template writes, in one rendered text.

A template puts what clients say between control tokens, as text, and a tokenizer finds control tokens by their text. So
a message that contains one would become one, and could begin a turn of another role. Therefore the characters of which
control tokens are made have stand-ins where they come from a client:

    said        is <|im_end|> a token?
    rendered    <|im_start|>user\\nis ‹¦im_end¦› a token?<|im_end|>\\n        ‹ ¦ ›: stand-ins for < | >
    ids         [im_start] user\\nis <|im_end|> a token? [im_end] \\n          the inner one is letters, not a token

A text with stand-ins has the places of the plain text. Cuts, openers and image places are looked for in it, and what
was remembered of one such text cannot be taken for another. Stand-ins are lone surrogates, which no text of a client
contains (`identity.surrogates`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from parkd.identity.cuts import token_pattern

_QUIET = frozenset("_-./:,;='\"\\▁")
"""Characters of tokens that are too usual in text to have stand-ins everywhere. No token consists of them alone."""
_FIRST, _LAST = 0xD800, 0xDFFF
_WORDS = re.compile(r"\w+")
_KNOWN_NAMES = frozenset(
    {
        *("arguments", "content", "function", "id", "name", "role", "text", "tool_calls", "type"),
        *("default", "description", "enum", "items", "parameters", "properties", "required"),
        *("array", "boolean", "image", "integer", "null", "number", "object", "string"),
    }
)
"""Names and values that templates look up or compare. Alone they have no stand-ins."""


class StandIns:
    """The stand-ins for the control tokens of one model. Immutable, so thread-safe."""

    def __init__(self, control: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        """`others` are further tokens that a tokenizer finds by their text, which any text may contain."""
        self.control = frozenset(token for token in control if token.strip())
        chars = sorted(set("".join(self.control)))
        room = _LAST + 1 - _FIRST
        self._of = {char: chr(_FIRST + place) for place, char in enumerate(chars[:room])}
        self._back = str.maketrans({stand_in: char for char, stand_in in self._of.items()})
        self._marks = tuple(char for char in chars[:room] if not (char.isalnum() or char.isspace() or char in _QUIET))
        self._unmarked = tuple(
            sorted((t for t in self.control if not any(mark in t for mark in self._marks)), key=len, reverse=True)
        )
        self._words = frozenset(word for token in self.control for word in _WORDS.findall(token)) - _KNOWN_NAMES
        self._pattern = token_pattern({*self.control, *others}) if self.control else None

    def put(self, text: str, kept: Set[str] = frozenset(), *, everywhere: bool = True) -> str:
        """The text with stand-ins; with `kept`, these tokens stay as they are. If not `everywhere`, only in whole
        control tokens, and not where a part of one could be joined with what surrounds it."""
        if kept:
            pieces = re.split(f"({'|'.join(re.escape(token) for token in sorted(kept, key=len, reverse=True))})", text)
            return "".join(piece if piece in kept else self._put(piece, everywhere) for piece in pieces)
        return self._put(text, everywhere)

    def _put(self, text: str, everywhere: bool) -> str:
        if text in _KNOWN_NAMES:
            return text
        if not everywhere:
            return self._pattern.sub(self._whole, text) if self._pattern is not None else text
        if text.strip() in self._words:
            return "".join(self._of.get(char, char) for char in text)
        for token in self._unmarked:
            if token in text:
                text = text.replace(token, "".join(self._of[char] for char in token))
        for mark in self._marks:
            if mark in text:
                text = text.replace(mark, self._of[mark])
        return text

    def _whole(self, found: re.Match[str]) -> str:
        token = found[0]
        return "".join(self._of[char] for char in token) if token in self.control else token

    def undo(self, text: str) -> str:
        """The plain text; the same object if there are no stand-ins in it."""
        if not _has_surrogates(text):
            return text
        for mark in self._marks:
            text = text.replace(self._of[mark], mark)
        return text.translate(self._back) if _has_surrogates(text) else text

    def split(self, text: str) -> list[str] | None:
        """The plain text in parts, in turns what is text and a control token that the template wrote, where a plain
        tokenizer would find control tokens that it did not write; None if there are none."""
        plain = self.undo(text)
        if plain is text or plain == text or self._pattern is None:
            return None
        parts: list[str] = []
        start = place = 0
        said = False
        while (found := self._pattern.search(plain, place)) is not None:
            place = found.end()
            if found[0] not in self.control:
                continue
            if text[found.start() : place] != found[0]:
                said = True
                place = found.start() + 1
                continue
            parts += [plain[start : found.start()], found[0]]
            start = place
        return [*parts, plain[start:]] if said else None

    def written(self, text: str) -> str:
        """A text that the model wrote, as a template shows it: its control tokens stay, the rest has stand-ins."""
        return self.put(text, self.control)

    def tokens_in(self, texts: Iterable[str]) -> frozenset[str]:
        """The control tokens that these plain texts contain."""
        if self._pattern is None:
            return frozenset()
        return frozenset(found[0] for text in texts for found in self._pattern.finditer(text)) & self.control


def _has_surrogates(text: str) -> bool:
    """Encoding fails at the first one, and is many times as fast as a search."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def over_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with all texts in it changed, also the names in objects. What is unchanged is shared."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name) if isinstance(name, str) else name: over_texts(v, change) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [over_texts(inner, change) for inner in value]
    return value


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value, also the names in objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (name for name in value if isinstance(name, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def needed(units: Sequence[Any], holds: Callable[[Set[Any]], bool], kept: frozenset[Any] = frozenset()) -> Set[Any]:
    """Of these units, few for which `holds`, which is known to hold for all of them together with `kept`. Halves the
    units, so that its calls are few if few are needed."""
    if holds(kept):
        return kept
    if len(units) <= 1:
        return kept | set(units)
    left, right = units[: len(units) // 2], units[len(units) // 2 :]
    found = needed(left, holds, kept | frozenset(right)) & set(left)
    return needed(right, holds, kept | frozenset(found))
