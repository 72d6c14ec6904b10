"""Readers for formats that write calls as JSON: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

from collections.abc import Callable

from parkd.answers.readers.json_machine import WHITESPACE, JsonArguments, JsonCall
from parkd.answers.readers.signals import CallOpened, CallReader, Malformed, Names, Signal

TOOLCALL, TOOLCALL_END = "<TOOLCALL>", "</TOOLCALL>"
HEAD_ROOM = 64
"""Characters of marks and of the model's call id beside a name."""


class Closing:
    """Reads white space, then a closing tag."""

    def __init__(self, tag: str) -> None:
        self.done = False
        self._rest = tag
        self._begun = False

    def feed(self, ch: str) -> list[Signal]:
        if not self._begun and ch in WHITESPACE:
            return []
        if ch != self._rest[0]:
            raise Malformed
        self._begun = True
        self._rest = self._rest[1:]
        self.done = not self._rest
        return []


class Sequence:
    """Reads with one reader after the other."""

    def __init__(self, *readers: CallReader) -> None:
        self.done = False
        self._readers = list(readers)

    def feed(self, ch: str) -> list[Signal]:
        signals = self._readers[0].feed(ch)
        if self._readers[0].done:
            del self._readers[0]
            self.done = not self._readers
        return signals


class Padded:
    """Reads white space, then with the reader that the first other character selects."""

    def __init__(self, choose: Callable[[str], CallReader]) -> None:
        self.done = False
        self._choose = choose
        self._reader: CallReader | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._reader is None:
            if ch in WHITESPACE:
                return []
            self._reader = self._choose(ch)
        signals = self._reader.feed(ch)
        self.done = self._reader.done
        return signals


def padded_call(accepts: Callable[[str], bool], *, strict: bool = False) -> Padded:
    """Reads white space, then one call as a JSON object."""
    return Padded(lambda _: JsonCall(accepts, strict=strict))


class JsonCalls:
    """Reads calls as JSON objects with `separator` between them, up to `end`, or (None) up to any other character."""

    def __init__(self, separator: str, end: str | None, accepts: Callable[[str], bool], *, strict: bool) -> None:
        self.done = False
        self._separator = separator
        self._end = end
        self._accepts = accepts
        self._strict = strict
        self._call: Padded | None = padded_call(accepts, strict=strict)

    def feed(self, ch: str) -> list[Signal]:
        if self._call is None:
            if ch == self._separator:
                self._call = padded_call(self._accepts, strict=self._strict)
            elif ch == self._end:
                self.done = True
            elif ch not in WHITESPACE:
                raise Malformed
            return []
        signals = self._call.feed(ch)
        if self._call.done:
            self._call = None
        return signals


class LlamaBare:
    """Reads an answer that is one call, or several with `;` between them. The opening brace must be fed too."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._calls = JsonCalls(";", None, tool_names.__contains__, strict=True)
        self.done = False

    def feed(self, ch: str) -> list[Signal]:
        return self._calls.feed(ch)


class MistralNamed:
    """Reads `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`; the model's call id is ignored."""

    ARGS = "[ARGS]"
    CALL_ID = "[CALL_ID]"

    def __init__(self, names: Names) -> None:
        self.done = False
        self._names = names
        self._head = ""
        self._arguments: JsonArguments | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._arguments is not None:
            signals = self._arguments.feed(ch)
            self.done = self._arguments.done
            return signals
        if ch == "{" and not self._names.goes_on(self._head + ch):
            name = self._name()
            self._arguments = JsonArguments()
            return [CallOpened(name), *self._arguments.feed(ch)]
        if len(self._head) >= self._names.limit + HEAD_ROOM:
            raise Malformed
        self._head += ch
        return []

    def _name(self) -> str:
        head = self._head.rstrip().removesuffix(self.ARGS)
        return self._names.read(head.split(self.CALL_ID)[0])


class MistralArray:
    """Reads `[{...}, {...}]`."""

    def __init__(self, names: Names) -> None:
        self.done = False
        self._opened = False
        self._calls = JsonCalls(",", "]", names.accepts, strict=False)

    def feed(self, ch: str) -> list[Signal]:
        if not self._opened:
            self._opened = True
            return []
        signals = self._calls.feed(ch)
        self.done = self._calls.done
        return signals


def mistral_section(names: Names) -> Padded:
    """Reads what follows `[TOOL_CALLS]`."""
    return Padded(lambda ch: MistralArray(names) if ch == "[" else MistralNamed(names))


def nemotron_section(names: Names) -> Sequence:
    """Reads what follows `TOOLCALL`, to `TOOLCALL_END`."""

    def choose(ch: str) -> CallReader:
        if ch != "[":
            raise Malformed
        return MistralArray(names)

    return Sequence(Padded(choose), Closing(TOOLCALL_END))
