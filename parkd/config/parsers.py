"""Parsers of settings: text to values. Each raises ValueError, whose message says what is expected."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

from parkd.types import TurnClass

MIB = 1024 * 1024
EVICTION_POLICIES = ("value", "gdsf", "lru")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


SMALLEST_SHARE = 0.1


def count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in a range."""

    def parse(text: str) -> int:
        expected = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else " up")
        if not re.fullmatch(r"\d{1,15}", text):
            raise ValueError(f"expected {expected}")
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"expected {expected}")
        return number

    return parse


def amount(text: str) -> float:
    """A number that is not negative."""
    value = float(text) if text.replace(".", "", 1).isdecimal() and text.isascii() else -1.0
    if value < 0:
        raise ValueError("expected a number that is not negative, such as 350 or 0.3")
    return value


def some_text(text: str) -> str:
    if not text.strip():
        raise ValueError("expected some text; leave it out instead")
    return text


def keys(text: str) -> tuple[str, ...]:
    found = tuple(key.strip() for key in text.split(","))
    if not all(found):
        raise ValueError("expected one key, or several with a comma between them; leave it out for none")
    return found


def origins(text: str) -> tuple[str, ...]:
    found = tuple(origin.strip().rstrip("/") for origin in text.split(","))
    # Apps and browser extensions have their own schemes: app://..., chrome-extension://...
    if not all(re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in found):
        raise ValueError(
            "expected an origin such as https://chat.example or chrome-extension://ID, or several with commas between"
        )
    return found


def url(text: str) -> str:
    """A server's base URL. A `/v1` at its end, as in the base URL for clients, is removed."""
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", text):
        raise ValueError("expected an address such as http://127.0.0.1:8081")
    return text.rstrip("/").removesuffix("/v1")


def file(text: str) -> Path:
    path = Path(text).expanduser()
    mode = _mode_of(path)
    if mode is None:
        raise ValueError("there is no such file")
    if stat.S_ISDIR(mode):
        raise ValueError("expected a file, and it is a directory")
    return path


def directory(text: str) -> Path:
    path = Path(text).expanduser()
    mode = _mode_of(path)
    if mode is None:
        raise ValueError("there is no such directory")
    if not stat.S_ISDIR(mode):
        raise ValueError("expected a directory, and it is a file")
    return path


def _mode_of(path: Path) -> int | None:
    """None if nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"it cannot be looked at: {error.strerror}") from error


def devices(text: str) -> tuple[str, ...]:
    if text == "auto":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name) for name in names):
        raise ValueError("expected cpu, mps or cuda:N, one for each stage with commas between, e.g. cuda:0,cuda:1")
    return names


def layer_split(text: str) -> tuple[int, ...]:
    if text == "auto":
        return ()
    expected = "expected auto, or the first layer of each later stage in ascending order, e.g. 24 or 24,36"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
        raise ValueError(expected)
    firsts = tuple(int(part) for part in parts)
    if firsts[0] < 1 or any(left >= right for left, right in pairwise(firsts)):
        raise ValueError(expected)
    return firsts


def mib_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return count(0)(text) * MIB
    except ValueError:
        raise ValueError("expected a whole number of MiB, 0 for no parking, or auto") from None


def context(text: str) -> int | None:
    """Context length in tokens; None for 0, llama-server's value for the default."""
    try:
        return count(16)(text) if text != "0" else None
    except ValueError as error:
        raise ValueError(f"{error}, or 0 for the largest that fits") from None


def batch(text: str) -> int | None:
    """Tokens per prefill chunk; None for `auto`, the default for the devices."""
    if text == "auto":
        return None
    try:
        return count(1, 65536)(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def replay(text: str) -> str:
    if text not in ("remember", "strict"):
        raise ValueError("expected remember or strict")
    return text


def eviction_policy(text: str) -> str:
    if text not in EVICTION_POLICIES:
        raise ValueError(f"expected {', '.join(EVICTION_POLICIES)}")
    return text


def schedule(text: str) -> str:
    if text not in ("fair", "fifo"):
        raise ValueError("expected fair or fifo")
    return text


def share(text: str) -> float:
    """Of a whole, of which others are to have some too."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SMALLEST_SHARE <= value <= 1 - SMALLEST_SHARE:
        raise ValueError(f"expected a number from {SMALLEST_SHARE} to {1 - SMALLEST_SHARE}")
    return value


def key_class(text: str) -> tuple[tuple[str, TurnClass], ...]:
    """`NAME=CLASS`, several divided by commas."""
    return tuple(map(_key_class, text.split(",")))


def _key_class(text: str) -> tuple[str, TurnClass]:
    name, _, kind = text.rpartition("=")
    if not name or kind not in {known.value for known in TurnClass}:
        raise ValueError("expected KEY=CLASS, where CLASS is interactive, side or batch")
    return name, TurnClass(kind)


def mib(text: str) -> int:
    return count(0)(text) * MIB


def switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("expected true or false")
    return text.lower() in _TRUE
