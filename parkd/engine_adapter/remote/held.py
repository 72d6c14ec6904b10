"""What a server holds of prompts, as its KV events tell, and what it has given up.

    prompt   |== held ==|== held ==|-- gone --|-- gone --|  never stored
    blocks   |  GPU     |  CPU     |  was GPU |          |

A block is known by the tokens of it and of all before it, compared one by one; the server's hashes only name blocks in
later events. What it says is believed until events were lost: then nothing is known any more (`forget`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from parkd.engine_adapter.remote.kv_events import BlockHash, Cleared, KvEvent, Removed, Stored
from parkd.types import TokenIds

MOST_BLOCKS = 131_072
"""Blocks that are remembered, held or gone: about 300 bytes each, and two million tokens in blocks of 16. What is gone
longest ago is forgotten first, then what was stored longest ago."""
_ID_BYTES = 4

Extra = tuple[str, ...]
"""What else the hash of a block stands for."""
_Place = tuple[int, bytes, Extra]
"""The number of the block before (0: none), the tokens, and what else."""


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """What of one prompt the server holds."""

    held_tokens: int = 0
    """From its beginning on."""
    known_tokens: int = 0
    """From its beginning on, with what it held once."""
    medium: str = ""
    """Where the first block is gone from."""
    gone_s: float = 0.0
    """Since when, in seconds."""


@dataclass(frozen=True, slots=True)
class HeldStats:
    """For `/metrics`."""

    blocks: int
    """That are held."""
    gone_blocks: int
    """That were held, and are remembered."""
    stored: int
    removed: int
    lost_track: int
    """How often events were lost, and all was forgotten."""


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    place: _Place
    parent: _Block | None
    hash: BlockHash
    media: set[str] = field(default_factory=set)
    medium: str = ""
    """Which it left last."""
    gone_at_s: float = 0.0


class HeldBlocks:
    """Thread-safe: one thread takes events, others ask."""

    def __init__(self, monotonic: Callable[[], float], most_blocks: int = MOST_BLOCKS) -> None:
        self._monotonic = monotonic
        self._most_blocks = most_blocks
        self._lock = threading.Lock()
        self._by_place: dict[_Place, _Block] = {}
        self._by_hash: dict[BlockHash, _Block] = {}
        self._held: OrderedDict[int, _Block] = OrderedDict()
        self._gone: OrderedDict[int, _Block] = OrderedDict()
        """Those that no medium has; the longest gone first."""
        self._number = 0
        self._block_tokens = 0
        """0: none was seen."""
        self._groups: set[int] = set()
        self._counts = {"stored": 0, "removed": 0, "lost_track": 0}

    def take(self, event: KvEvent) -> None:
        """Notes an event, in the order in which the server tells them."""
        with self._lock:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    for block in list(self._held.values()):
                        self._leave(block, *block.media)

    def forget(self) -> None:
        """Events were lost, or the server is another one: nothing is known of what it holds."""
        with self._lock:
            self._counts["lost_track"] += 1
            self._clear()
            self._groups.clear()
            self._block_tokens = 0

    def _clear(self) -> None:
        self._by_place.clear()
        self._by_hash.clear()
        self._held.clear()
        self._gone.clear()

    def of(self, token_ids: TokenIds, salt: str = "") -> HeldPrefix | None:
        """What is held of a prompt, `[n]` ids, under a salt. None if that cannot be told: no block was seen yet, or the
        model has several groups of layers, of which each holds other positions."""
        with self._lock:
            size = self._block_tokens
            if not size or len(self._groups) != 1:
                return None
            data, step = np.asarray(token_ids, dtype="<i4").tobytes(), size * _ID_BYTES
            held = known = number = 0
            first_gone: _Block | None = None
            for start in range(0, len(data) - step + 1, step):
                extra = (salt,) if salt and not start else ()
                block = self._by_place.get((number, data[start : start + step], extra))
                if block is None:
                    break
                known += size
                if first_gone is None and block.media:
                    held += size
                elif first_gone is None:
                    first_gone = block
                number = block.number
        if first_gone is None:
            return HeldPrefix(held, known)
        return HeldPrefix(held, known, first_gone.medium, max(0.0, self._monotonic() - first_gone.gone_at_s))

    def stats(self) -> HeldStats:
        with self._lock:
            return HeldStats(len(self._held), len(self._gone), **self._counts)

    def _store(self, event: Stored) -> None:
        self._counts["stored"] += len(event.hashes)
        if not event.token_ids:  # a tier below the device tells no tokens: its blocks were told before
            for name in event.hashes:
                self._also_in(event.medium, name, event.block_tokens)
            return
        self._groups.add(event.group)
        if len(self._groups) > 1:
            self._clear()
            return
        if not self._block_tokens:
            self._block_tokens = event.block_tokens
        if event.block_tokens != self._block_tokens:
            return  # part of a block, which no other prompt begins with at a block's end
        parent = None if event.parent is None else self._by_hash.get(event.parent)
        if event.parent is not None and parent is None:
            return  # it was stored before anybody listened, so nobody can say what it follows
        data, step = np.array(event.token_ids, dtype="<i4").tobytes(), event.block_tokens * _ID_BYTES
        for index, (name, extra) in enumerate(zip(event.hashes, event.extra, strict=True)):
            tokens = data[index * step : (index + 1) * step]
            place = (0 if parent is None else parent.number, tokens, extra)
            block = self._by_place.get(place)
            if block is None:
                self._number += 1
                block = self._by_place[place] = _Block(self._number, place, parent, name)
            self._enter(block, event.medium)
            if block.hash != name:
                self._by_hash.pop(block.hash, None)
                block.hash = name
            self._by_hash[name] = block
            parent = block
        self._make_room()

    def _also_in(self, medium: str, name: BlockHash, tokens: int) -> None:
        """A tier below has a chunk that ends with a block: of one or more blocks."""
        block = self._by_hash.get(name)
        for _ in range(max(1, tokens // (self._block_tokens or tokens))):
            if block is None:
                return
            self._enter(block, medium)
            block = block.parent

    def _enter(self, block: _Block, medium: str) -> None:
        block.media.add(medium)
        self._gone.pop(block.number, None)
        self._held[block.number] = block

    def _remove(self, event: Removed) -> None:
        self._counts["removed"] += len(event.hashes)
        for name in event.hashes:
            block = self._by_hash.get(name)
            if block is not None:
                self._leave(block, event.medium)

    def _leave(self, block: _Block, *media: str) -> None:
        for medium in media:
            if medium in block.media:
                block.media.discard(medium)
                block.medium, block.gone_at_s = medium, self._monotonic()
        if not block.media:
            self._held.pop(block.number, None)
            self._gone[block.number] = block
            self._gone.move_to_end(block.number)

    def _make_room(self) -> None:
        over = len(self._by_place) - self._most_blocks
        if over <= 0:
            return
        leaving: Sequence[_Block] = list(islice(self._gone.values(), over))
        if len(leaving) < over:
            leaving = [*leaving, *islice(self._held.values(), over - len(leaving))]
        for block in leaving:
            self._gone.pop(block.number, None)
            self._held.pop(block.number, None)
            del self._by_place[block.place]
            if self._by_hash.get(block.hash) is block:
                del self._by_hash[block.hash]
