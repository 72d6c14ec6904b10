"""Server-sent events as bytes. No frame has an `id:` line: clients would conclude that the stream can be resumed, and
some SDKs fail on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` must not contain a newline; serialised JSON does not."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def json_frame(document: Mapping[str, Any], event: str | None = None) -> bytes:
    return frame(orjson.dumps(document), event)


def comment() -> bytes:
    """A comment, which every parser skips. It keeps the connection alive."""
    return b": keep-alive\n\n"


DONE = frame(b"[DONE]")
"""Ends a stream of the chat and completions dialects."""
