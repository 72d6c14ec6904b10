"""Traces: what a server was asked, and when, without any text.

A trace consists of JSON lines. The first has the format and the size of the server's state; each other is one turn:

    {"parkd_trace": 1, "block_tokens": 256, "row_bytes": [98304], "fixed_bytes": [0]}
    {"at": 12.5, "key": "a", "prompt": 1100, "live": 1180, "chain": "5e0c...", "end": "stop"}

    chain   |h0|h1|h2|h3|          a hash of 16 hexadecimal digits for each full block that is live after the turn
    prompt  |..........|.          tokens; the prompt's full blocks are the first of the chain
    live    |............|         tokens after the turn, including the answer

A hash identifies its block and all blocks before it, so two turns share as many blocks as their chains have leading
hashes in common. What they share after the last full block is unknown. The public block-hash format (`timestamp` in
ms, `input_length`, `output_length`, `hash_ids`, 512 tokens each) can be read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE_VERSION = 1
HASH_DIGITS = 16
HASH_BYTES = HASH_DIGITS // 2
PUBLIC_BLOCK_TOKENS = 512
DEFAULT_ROW_BYTES = 98_304
"""Bytes per token of a model of about ten billion parameters with grouped-query attention, in 16 bits."""


class TraceError(ValueError):
    """A trace that cannot be read. The message names the line and the problem."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    block_tokens: int
    row_bytes: tuple[int, ...] = (DEFAULT_ROW_BYTES,)
    """Bytes per token, one for each stage."""
    fixed_bytes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn. `chain` may be longer than the prompt's full blocks, never shorter unless the turn was cut."""

    at_s: float
    key: str
    """Turns with different keys share nothing."""
    prompt_tokens: int
    live_tokens: int
    chain: tuple[bytes, ...]
    """`[live_tokens // block_tokens]`"""
    end: str = "stop"
    reused_tokens: int = 0
    """Of the prompt, in the server that recorded it: read were the others."""
    read_s: float | None = None
    """Seconds that it read for; None: not recorded."""


@dataclass(frozen=True)
class Trace:
    name: str
    header: TraceHeader
    turns: tuple[TurnRecord, ...]
    """Ordered by time."""


def header_line(header: TraceHeader) -> str:
    return json.dumps(
        {
            "parkd_trace": TRACE_VERSION,
            "block_tokens": header.block_tokens,
            "row_bytes": list(header.row_bytes),
            "fixed_bytes": list(header.fixed_bytes),
        }
    )


def turn_line(turn: TurnRecord, extra: Mapping[str, Any] | None = None) -> str:
    """The JSON line of a turn. `extra` are additional fields of a recording, which a replay ignores."""
    values = {
        "at": round(turn.at_s, 3),
        "key": turn.key,
        "prompt": turn.prompt_tokens,
        "live": turn.live_tokens,
        "chain": b"".join(turn.chain).hex(),
        "end": turn.end,
    }
    if turn.read_s is not None:
        values |= {"reused": turn.reused_tokens, "prefill_s": turn.read_s}
    return json.dumps(values | dict(extra or {}), separators=(",", ":"))


def write_trace(path: Path, trace: Trace) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(header_line(trace.header) + "\n")
        file.writelines(turn_line(turn) + "\n" for turn in trace.turns)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Reads either format, at most `limit` turns. Raises TraceError, or OSError if the file cannot be read."""
    with path.open(encoding="utf-8") as file:
        lines = _objects(file)
        number, first = next(lines, (0, None))
        if first is None:
            raise TraceError(f"{path}: the trace is empty")
        if "hash_ids" in first:
            header = TraceHeader(PUBLIC_BLOCK_TOKENS)
            turns = [_public_turn(number, first)]
            turns += [_public_turn(number, values) for number, values in _first(lines, limit, taken=1)]
        else:
            header = _header(number, first)
            turns = [_turn(number, values, header.block_tokens) for number, values in _first(lines, limit)]
    turns.sort(key=lambda turn: turn.at_s)
    return Trace(path.stem, header, tuple(turns))


def _objects(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise TraceError(f"line {number}: not a JSON object")
        yield number, values


def _first(
    lines: Iterator[tuple[int, dict[str, Any]]], limit: int | None, taken: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    for count, item in enumerate(lines, taken):
        if limit is not None and count >= limit:
            return
        yield item


def _header(number: int, values: dict[str, Any]) -> TraceHeader:
    if values.get("parkd_trace") != TRACE_VERSION:
        raise TraceError(
            f"line {number}: neither a parkd trace of version {TRACE_VERSION} nor one with hash_ids in every line"
        )
    try:
        header = TraceHeader(
            int(values["block_tokens"]),
            tuple(int(size) for size in values["row_bytes"]),
            tuple(int(size) for size in values["fixed_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"line {number}: {error!r}") from None
    sizes = (*header.row_bytes, *header.fixed_bytes)
    if header.block_tokens < 1 or not header.row_bytes or len(sizes) != 2 * len(header.row_bytes) or min(sizes) < 0:
        raise TraceError(f"line {number}: sizes that no state can have")
    return header


def _turn(number: int, values: dict[str, Any], block_tokens: int) -> TurnRecord:
    try:
        raw = bytes.fromhex(values["chain"])
        chain = tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
        prompt, live, at_s = int(values["prompt"]), int(values["live"]), float(values["at"])
        reused, read_s = int(values.get("reused", 0)), values.get("prefill_s")
        read_s = None if read_s is None else float(read_s)
        turn = TurnRecord(at_s, str(values["key"]), prompt, live, chain, str(values.get("end", "")), reused, read_s)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"line {number}: {error!r}") from None
    if prompt < 1 or live < 0 or len(raw) % HASH_BYTES or len(chain) != live // block_tokens:
        raise TraceError(f"line {number}: {len(chain)} hashes do not cover {live} live tokens of a prompt of {prompt}")
    return turn


def _public_turn(number: int, values: dict[str, Any]) -> TurnRecord:
    """This format has no hashes for an answer's blocks. So the live state ends with the prompt's last full block, and
    the answer is read again with the next prompt."""
    try:
        prompt = int(values["input_length"])
        ids = [int(value) for value in values["hash_ids"]]
        at_s = float(values["timestamp"]) / 1000
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"line {number}: {error!r}") from None
    blocks = prompt // PUBLIC_BLOCK_TOKENS
    if prompt < 1 or len(ids) < blocks:
        raise TraceError(f"line {number}: {len(ids)} block hashes do not cover {prompt} tokens")
    chain = tuple(value.to_bytes(HASH_BYTES, "big") for value in ids[:blocks])
    return TurnRecord(at_s, "", prompt, blocks * PUBLIC_BLOCK_TOKENS, chain)
