"""Where the rows of each seat lie in the arenas: one range a seat, at the same place in all stages.

    rows    |-- seat 1 ------| free |-- seat 0 --| free ........ |-- seat 2 --| free |
            base             end    base                         base

A range is contiguous, so that the state of n tokens stays one run of bytes. It grows at its end. If another one is in
the way, ranges slide apart: their rows are copied inside the arena, which changes no bit, since a row does not know
where it lies. Nothing is lost while all rows fit together. If they do not, other seats are emptied, the one used
longest ago first, but none in which a turn is under way; so a single conversation can have all rows. Where a seat's
range is, is decided by `placed`, a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parkd.errors import ContextFull

ROW_GRAIN = 256
"""Ranges begin at multiples of this: blocks of an index begin there too, and rows are aligned in memory as they are at
row 0, so that kernels take the same path over them."""


class Occupant(Protocol):
    """A seat's conversation."""

    @property
    def position(self) -> int:
        """How many rows it has; 0: its range is free."""

    @property
    def is_held(self) -> bool:
        """Whether it must keep its rows: a turn is under way in it."""

    def reset(self) -> None: ...

    def move_rows(self, base: int) -> None:
        """Copies the rows to row `base` and on, where they begin from now on."""

    @property
    def base(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Range:
    """A seat's rows `[base, base + rows)`."""

    base: int
    rows: int


def footprint(rows: int, grain: int = ROW_GRAIN) -> int:
    """The rows that a range of `rows` rows takes: whole grains."""
    return -(-rows // grain) * grain


def placed(
    ranges: Mapping[int, Range], seat: int, rows: int, total: int, grain: int = ROW_GRAIN
) -> Mapping[int, int] | None:
    """Seat -> new base of the ranges that must move so that `seat` can have `rows` rows; None if that cannot be.

    `ranges` are those of seats with rows, disjoint, with bases at multiples of `grain`, as `total` is. A seat without
    rows is put into the widest gap: behind a neighbour that may grow, in the middle of what is left.
    """
    others = {each: kept for each, kept in ranges.items() if each != seat}
    if sum(footprint(kept.rows, grain) for kept in others.values()) + footprint(rows, grain) > total:
        return None
    order = sorted(others, key=lambda each: others[each].base)
    mine = ranges.get(seat)
    if mine is not None:
        order.insert(sum(others[each].base < mine.base for each in order), seat)
        start = mine.base
    else:
        index, start = _widest_gap(others, order, rows, total, grain)
        order.insert(index, seat)
    sizes = {each: footprint(rows if each == seat else others[each].rows, grain) for each in order}
    bases = {each: start if each == seat else others[each].base for each in order}
    # Left to right each range is pushed behind the one before it; then, from the end, back from what lies too far
    # right.
    reached = 0
    for each in order:
        bases[each] = max(bases[each], reached)
        reached = bases[each] + sizes[each]
    reached = total
    for each in reversed(order):
        bases[each] = min(bases[each], reached - sizes[each])
        reached = bases[each]
    return {each: base for each, base in bases.items() if each not in ranges or base != ranges[each].base}


def _widest_gap(
    others: Mapping[int, Range], order: Sequence[int], rows: int, total: int, grain: int
) -> tuple[int, int]:
    """The index in `order` before which a new range of `rows` rows goes, and where it begins."""
    starts = [0, *(others[each].base + footprint(others[each].rows, grain) for each in order)]
    ends = [*(others[each].base for each in order), total]
    index = max(range(len(starts)), key=lambda gap: ends[gap] - starts[gap])
    left = max(0, ends[index] - starts[index] - footprint(rows, grain))
    before = left // 2 // grain * grain if index else 0  # Nothing grows into the first gap.
    return index, starts[index] + before


class RowSpace:
    """The ranges of all seats. Used from the engine's one thread."""

    def __init__(self, total_rows: int, context_tokens: int, grain: int = ROW_GRAIN) -> None:
        """A seat can have up to `context_tokens` of the `total_rows` rows. Raises ValueError unless `total_rows` is a
        multiple of `grain` and holds a whole context."""
        if total_rows % grain or total_rows < context_tokens:
            raise ValueError(f"{total_rows} rows: not a multiple of {grain} that holds {context_tokens}")
        self.total_rows = total_rows
        self.context_tokens = context_tokens
        self.grain = grain
        self._seats: list[Occupant] = []
        self._used: list[int] = []
        """The seats, the one used longest ago first."""

    def add(self, seat: Occupant) -> Callable[[int], None]:
        """Adds a seat, which must be empty. Returns the function that makes room for so many rows of it, and for what
        it holds (`make_room`)."""
        number = len(self._seats)
        self._seats.append(seat)
        self._used.append(number)
        return lambda rows: self.make_room(number, rows)

    def end_of(self, number: int) -> int:
        """The row at which the range of a seat must end now: where the next one begins."""
        base = self._seats[number].base
        nexts = (each.base for each in self._others(number) if each.base > base)
        return min(nexts, default=self.total_rows)

    def make_room(self, number: int, rows: int) -> None:
        """Makes the range of a seat hold `rows` rows, which must be at most a context. Moves ranges; if they do not fit
        together, empties other seats first that are not held. Raises ContextFull."""
        seat = self._seats[number]
        if rows > self.context_tokens:
            raise ContextFull(seat.position, rows - seat.position, self.context_tokens)
        self._used.remove(number)
        self._used.append(number)
        if seat.position and seat.base + footprint(rows, self.grain) <= self.end_of(number):
            return
        while True:
            ranges = {
                each: Range(other.base, other.position) for each, other in enumerate(self._seats) if other.position
            }
            moves = placed(ranges, number, rows, self.total_rows, self.grain)
            if moves is not None:
                break
            free = (each for each in self._used if each in ranges and each != number and not self._seats[each].is_held)
            emptied = next(free, None)
            if emptied is None:
                raise ContextFull(seat.position, rows - seat.position, self.total_rows)
            self._seats[emptied].reset()
        self._carry_out(moves)

    def _others(self, number: int) -> Sequence[Occupant]:
        return [each for index, each in enumerate(self._seats) if index != number and each.position]

    def _carry_out(self, moves: Mapping[int, int]) -> None:
        """Moves ranges so that none is written over another: to the left from the left, to the right from the right."""
        seats = self._seats
        for number in sorted(moves, key=lambda each: seats[each].base):
            if moves[number] < seats[number].base:
                seats[number].move_rows(moves[number])
        for number in sorted(moves, key=lambda each: -seats[each].base):
            if moves[number] > seats[number].base:
                seats[number].move_rows(moves[number])
