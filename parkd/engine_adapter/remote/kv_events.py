"""Reads vLLM's KV events: which blocks of prompts the server holds, and which it has given up.

A message is three frames: a topic, a number (8 bytes, big-endian, ascending from 0), and a batch in MessagePack:

    [time, [event, ...], rank]                        or the same as a map: {"ts": ..., "events": [...]}
    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 16, ...}
    ["BlockStored", hashes, parent, token_ids, size, ...]      older servers write events as arrays, too

What cannot be read is passed over: another version's events are no reason to stop. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

BlockHash: TypeAlias = int | bytes
DEVICE = "GPU"
"""Where blocks are of which an event does not say it."""
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
"""The fields of events that are arrays, in their order."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other, and are held from now on."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    """The block before the first; None: they begin the prompt."""
    token_ids: tuple[int, ...]
    """Of all blocks; empty: the event does not say them."""
    block_tokens: int
    extra: tuple[tuple[str, ...], ...]
    """What else each block's hash stands for, such as a salt."""
    medium: str = DEVICE
    group: int = 0
    """Of layers; models with several kinds of layers have several."""


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[BlockHash, ...]
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is held any more."""


KvEvent: TypeAlias = Stored | Removed | Cleared


def events_of(batch: Any) -> Iterator[KvEvent]:
    """The events of a decoded batch."""
    events: Any = None
    if isinstance(batch, Mapping):
        events = batch.get("events")
    elif isinstance(batch, Sequence) and len(batch) > 1:
        events = batch[1]
    for event in events if isinstance(events, list) else ():
        read = _event(event)
        if read is not None:
            yield read


def time_of(batch: Any) -> float:
    """When a decoded batch was made, by the server's clock; 0 if it does not say."""
    said = batch.get("ts") if isinstance(batch, Mapping) else batch[0] if isinstance(batch, list) and batch else 0
    return float(said) if isinstance(said, int | float) else 0.0


def _event(event: Any) -> KvEvent | None:
    if isinstance(event, Mapping):
        name, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        name, order = event[0], _STORED if event[0] == "BlockStored" else _REMOVED
        fields = dict(zip(order, event[1:], strict=False))
    else:
        return None
    if name == "AllBlocksCleared":
        return Cleared()
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, int | bytes) for each in hashes):
        return None
    medium, group = fields.get("medium") or DEVICE, fields.get("group_idx") or 0
    if not isinstance(medium, str) or not isinstance(group, int):
        return None
    if name == "BlockRemoved":
        return Removed(tuple(hashes), medium, group)
    return _stored(fields, tuple(hashes), medium, group) if name == "BlockStored" else None


def _stored(fields: Mapping[str, Any], hashes: tuple[BlockHash, ...], medium: str, group: int) -> Stored | None:
    parent, size, ids = fields.get("parent_block_hash"), fields.get("block_size"), fields.get("token_ids") or ()
    if not isinstance(parent, int | bytes | None) or not isinstance(size, int) or size <= 0:
        return None
    if ids and not (isinstance(ids, list) and len(ids) == len(hashes) * size):
        return None
    if not all(isinstance(each, int) and 0 <= each < 1 << 31 for each in ids):
        return None
    extra = fields.get("extra_keys") or [None] * len(hashes)
    if not isinstance(extra, list) or len(extra) != len(hashes):
        return None
    said = tuple(tuple(map(str, each)) if isinstance(each, list) else () for each in extra)
    return Stored(hashes, parent, tuple(ids), size, said, medium, group)
