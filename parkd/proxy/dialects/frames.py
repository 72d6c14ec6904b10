"""Server-sent events as bytes. No frame has an `id:` line: clients would conclude that the stream can be resumed, and
some SDKs fail on it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

from parkd.identity.surrogates import mended


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` must not contain a newline; serialised JSON does not."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def encoded(document: Any) -> bytes:
    """The document as JSON in UTF-8, whatever a client or a model put in it: a whole number of more than 64 bits keeps
    its digits, a number that is none becomes null, and half of a character U+FFFD."""
    try:
        return orjson.dumps(document)
    except TypeError:  # orjson refuses large numbers, halves of characters and nesting deeper than 254 levels
        return mended(json.dumps(_finite(document), ensure_ascii=False, separators=(",", ":"))).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_frame(document: Mapping[str, Any], event: str | None = None) -> bytes:
    return frame(encoded(document), event)


def comment() -> bytes:
    """A comment, which every parser skips. It keeps the connection alive."""
    return b": keep-alive\n\n"


DONE = frame(b"[DONE]")
"""Ends a stream of the chat and completions dialects."""
