"""Server-sent events as bytes. No frame carries an `id:` line: clients take it for a promise that a stream can be
resumed, and some SDKs fail on one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` has no newline, as JSON has none."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def json_frame(document: Mapping[str, Any], event: str | None = None) -> bytes:
    return frame(orjson.dumps(document), event)


def comment() -> bytes:
    """Keeps a connection alive; every parser skips it."""
    return b": keep-alive\n\n"


DONE = frame(b"[DONE]")
"""Ends a stream of the chat and completions dialects."""
