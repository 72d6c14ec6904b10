"""The tests' own record of what is parked: by whom it was computed, and what descends from what.

It is told what happens to the live state and which conversations are stored, and says what a capture must share, copy
and inherit. Of the store it takes only names: the id that a block was given when it was first stored.

    live     |piece|piece|pie·      what the live rows were restored from or captured into; the rest is of nobody yet
    parked   |piece|piece|pi|       a conversation: units, bytes, pieces, and its checkpoints with their bytes

A piece is what a store calls a block: rows of one computation. Rows that are computed again are other rows, whatever
their tokens. An opaque state is one piece, which nobody shares unless nothing was added to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from parkd.state import Grain, StateLayout
from tests.unit.store.store_kit import CopyEngine


@dataclass(eq=False)
class Piece:
    """Rows `[index * block_tokens, index * block_tokens + rows)` of one computation."""

    index: int
    rows: int
    block: int | None = None
    """The id that the store gave it; None until it is stored."""


@dataclass(eq=False)
class FixedState:
    """The fixed state of all stages at a position."""

    parts: tuple[np.ndarray, ...]
    """`[stages]`; empty at the end of an opaque state, whose bytes have it."""
    checkpoint: int | None = None
    """The id that the store gave it."""


@dataclass(eq=False)
class Known:
    """A conversation as it was put in."""

    units: np.ndarray
    rows: list[np.ndarray]
    """`[position, row_bytes]` of each stage."""
    pieces: tuple[Piece, ...]
    checkpoints: dict[int, FixedState]
    is_pinned: bool = False

    @property
    def position(self) -> int:
        return len(self.units)

    def is_prefix_of(self, other: Known) -> bool:
        return self.position <= other.position and bool(np.array_equal(self.units, other.units[: self.position]))


@dataclass(frozen=True)
class Expected:
    """What a capture up to some position must come to."""

    known: Known
    shared: tuple[Piece, ...]
    """The pieces that are stored already."""
    start: int
    """The first row that is copied."""
    copied: tuple[int, ...]
    """Positions of the checkpoints that are copied."""
    dropped: tuple[int, ...]
    """Positions of checkpoints that it could have inherited, and gives up because it would have too many."""


@dataclass
class LineageModel:
    layout: StateLayout
    block_tokens: int = 4
    checkpoint_limit: int = 16
    live: tuple[Piece, ...] = ()
    covered: int = 0
    """Of an opaque state: the tokens up to which the live state is that of its piece."""
    names: dict[int, Piece] = field(default_factory=dict)
    """Every piece that was ever stored, by the id of its block."""

    @property
    def is_opaque(self) -> bool:
        return self.layout.is_opaque

    @property
    def lineage(self) -> tuple[int | None, ...]:
        """The ids of the blocks that the live state descends from."""
        return tuple(piece.block for piece in self.live)

    def pieces_of(self, blocks: Sequence[int]) -> tuple[Piece | None, ...]:
        """The pieces by the ids of their blocks; None for an id that was never given."""
        return tuple(map(self.names.get, blocks))

    # What happens to the live state

    def extended(self, start: int) -> None:
        """Tokens were added behind `start`. A partial last block has other rows from now on."""
        if not self.is_opaque:
            self.live = self.live[: start // self.block_tokens]

    def cut(self, position: int) -> None:
        """The live state went back to `position`."""
        if self.is_opaque:
            self.covered = min(self.covered, position)
            self.live = self.live if self.covered else ()
        else:
            self.live = self.live[: position // self.block_tokens]

    def restored(self, known: Known, stop: int) -> None:
        self.live, self.covered = known.pieces, stop
        if not self.is_opaque:
            whole, rest = divmod(stop, self.block_tokens)
            ends_there = whole < len(known.pieces) and known.pieces[whole].rows == rest > 0
            self.live = known.pieces[: whole + ends_there]

    def captured(self, known: Known) -> None:
        """The live state was parked, at least up to the end of `known`, and descends from this from now on."""
        self.live, self.covered = known.pieces, known.position

    # What a capture must come to

    def shared(self, stored: Collection[Piece], tokens: int) -> tuple[Piece, ...]:
        """The pieces of a live state of `tokens` tokens that need not be copied, as they are stored."""
        if self.is_opaque:
            is_same = self.layout.grain is not Grain.FILE and self.covered == tokens
            return self.live if is_same and set(self.live) <= set(stored) and self._rows() == tokens else ()
        shared: list[Piece] = []
        for piece in self.live:
            end = piece.index * self.block_tokens + piece.rows
            if piece not in stored or (piece.rows < self.block_tokens and end != tokens):
                break
            shared.append(piece)
        return tuple(shared)

    def inheritable(self, shared: Sequence[Piece], kin: Iterable[Known], tokens: int) -> dict[int, list[FixedState]]:
        """The checkpoints of `kin` that are states of the live rows, by position: those whose blocks are all shared."""
        found: dict[int, list[FixedState]] = {}
        for known in kin:
            for position, state in known.checkpoints.items():
                if self.is_opaque:
                    reaches = known.pieces == self.live != () and position <= self.covered and position < known.position
                    reaches = reaches and self.layout.grain is not Grain.FILE
                else:
                    blocks = -(-position // self.block_tokens)
                    reaches = known.pieces[:blocks] == tuple(shared[:blocks]) and position <= tokens
                if reaches:
                    found.setdefault(position, []).append(state)
        return dict(sorted(found.items()))

    def expected(self, engine: CopyEngine, position: int, stored: Collection[Piece], kin: Iterable[Known]) -> Expected:
        """What parking the live state up to `position` must come to, if `stored` is in memory and `kin` are the
        conversations that have checkpoints there."""
        tokens = engine.position
        shared = self.shared(stored, tokens)
        fresh = self._live_states(engine) if self.layout.fixed_bytes else {}
        found = self.inheritable(shared, kin, tokens) if self.layout.fixed_bytes else {}
        excess = max(0, len({*found, *fresh}) - self.checkpoint_limit)
        dropped = [place for place in list(found)[1:] if place not in fresh][:excess]
        inherited = {place: states[0] for place, states in found.items() if place not in dropped}
        checkpoints = {place: state for place, state in {**fresh, **inherited}.items() if place <= position}
        copied = tuple(place for place in sorted(checkpoints) if place not in inherited)
        pieces, start = self._pieces(shared, position)
        known = Known(engine.units[:position].copy(), engine.rows(position), pieces, dict(sorted(checkpoints.items())))
        return Expected(known, shared, start, copied, tuple(dropped))

    def _live_states(self, engine: CopyEngine) -> dict[int, FixedState]:
        states = {}
        for place, parts in sorted(engine.fixed.items()):
            has_bytes = not (self.is_opaque and place == engine.position)
            states[place] = FixedState(tuple(part.copy() for part in parts) if has_bytes else ())
        if self.is_opaque:
            states.setdefault(engine.position, FixedState(()))
        return states

    def _pieces(self, shared: tuple[Piece, ...], position: int) -> tuple[tuple[Piece, ...], int]:
        if self.is_opaque:
            return (shared, position) if shared else ((Piece(0, position),), 0)
        size = self.block_tokens
        kept = shared[: -(-position // size)]
        start = min(len(kept) * size, position)
        fresh = [Piece(at // size, min(size, position - at)) for at in range(len(kept) * size, position, size)]
        return (*kept, *fresh), start

    def _rows(self) -> int:
        return sum(piece.rows for piece in self.live)

    # What the store says

    def name(self, known: Known, blocks: Sequence[int], *, keeps_names: bool = False) -> None:
        """Notes the ids that the store gave to the pieces. Raises AssertionError if one is that of another piece.

        `keeps_names`: a piece that is copied once more, from live rows that still descend from it, may keep its id.
        """
        assert len(blocks) == len(known.pieces), f"{len(blocks)} blocks for {known.position} tokens"
        named = []
        for piece, block in zip(known.pieces, blocks, strict=True):
            before = self.names.get(block)
            if before is not piece and before is not None:
                is_own = (
                    keeps_names and before in self.live and (before.index, before.rows) == (piece.index, piece.rows)
                )
                assert piece.block is None, f"block {block} was taken for block {piece.block}"
                assert is_own, f"block {block} is that of other rows"
                piece = before
            assert piece.block is None or self.names.get(block) is piece, f"block {piece.block} became {block}"
            piece.block = block if piece.block is None else piece.block
            self.names[block] = piece
            named.append(piece)
        known.pieces = tuple(named)


def superseded(expected: Expected, others: Iterable[Known]) -> list[Known]:
    """Which of the conversations in memory a capture replaces: it can be resumed wherever they can be."""
    places = {*expected.known.checkpoints, *expected.dropped}
    return [other for other in others if other.is_prefix_of(expected.known) and places >= set(other.checkpoints)]
