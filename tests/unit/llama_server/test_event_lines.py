"""Lines of a streamed answer: they are cut from parts of any size, in a time that follows from their length alone."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from parkd.engine_adapter.http.lines import MOST_ERROR_CHARS, EventLines, error_text
from parkd.errors import UpstreamFailed

PART_BYTES = 2048
LONG_BYTES = 24 * 1024 * 1024
MOST_CPU_S = 5.0
"""Searching the whole line again at each part takes many times that."""


def lines(parts: list[bytes]) -> EventLines:
    return EventLines(iter(parts), lambda: None, nullcontext, 60.0, lambda: 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_cut_wherever_parts_end(size: int) -> None:
    text = b"data: 1\n\ndata: 22\r\n: ping\ndata: 333\n"
    cut = lines([text[start : start + size] for start in range(0, len(text), size)])
    read = [cut.next(lambda line: line if line.startswith(b"data") else None) for _ in range(3)]
    assert read == [b"data: 1", b"data: 22", b"data: 333"]
    with pytest.raises(UpstreamFailed, match="before the end"):
        cut.next(bytes)


def test_a_long_line_is_searched_once() -> None:
    parts = [b"x" * PART_BYTES] * (LONG_BYTES // PART_BYTES)
    began_s = time.thread_time()
    assert len(lines([*parts, b"\n"]).next(bytes)) == LONG_BYTES
    assert time.thread_time() - began_s < MOST_CPU_S


def test_a_long_error_message_is_cut() -> None:
    assert error_text({"message": "no room"}) == "no room."
    assert error_text({"message": "x" * 5_000_000}) == "x" * MOST_ERROR_CHARS + "..."
