"""Which rows each seat has: ranges never overlap, nothing moves or is lost without need, and no row is lost on the
way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parkd_engine.arenas.row_space import Range, RowSpace, footprint, placed

from parkd.errors import ContextFull

GRAIN = 4


def after(ranges: Mapping[int, Range], seat: int, rows: int, moves: Mapping[int, int]) -> dict[int, Range]:
    """The ranges once `moves` are carried out and `seat` has `rows` rows."""
    grown = {**ranges, seat: Range(ranges[seat].base if seat in ranges else -1, rows)}
    return {each: Range(moves.get(each, kept.base), kept.rows) for each, kept in grown.items()}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[dict[int, Range], int]:
    """Disjoint ranges in any order, and the number of all rows."""
    seats = draw(st.permutations(range(draw(st.integers(0, 4)))))
    ranges, reached = {}, 0
    for seat in seats:
        reached += GRAIN * draw(st.integers(0, 3))
        ranges[seat] = Range(reached, draw(st.integers(1, 14)))
        reached += footprint(ranges[seat].rows, GRAIN)
    return ranges, reached + GRAIN * draw(st.integers(0, 4))


@settings(max_examples=300, deadline=None)
@given(divisions(), st.integers(0, 4), st.integers(1, 30))
@example(({0: Range(0, 8), 1: Range(8, 4)}, 16), 0, 9)
def test_ranges_slide_apart_as_long_as_all_rows_fit(
    division: tuple[dict[int, Range], int], seat: int, rows: int
) -> None:
    ranges, total = division
    rows = max(rows, ranges[seat].rows if seat in ranges else 1)
    moves = placed(ranges, seat, rows, total, GRAIN)
    taken = sum(-(-kept.rows // GRAIN) for each, kept in ranges.items() if each != seat) + -(-rows // GRAIN)
    assert (moves is not None) == (taken * GRAIN <= total)
    if moves is None:
        return
    now = after(ranges, seat, rows, moves)
    cells = [row for kept in now.values() for row in range(kept.base, kept.base + kept.rows)]
    assert len(set(cells)) == len(cells), "no row is two seats'"
    assert all(0 <= row < total for row in cells)
    assert all(kept.base % GRAIN == 0 for kept in now.values())
    kept_order = [each for each in sorted(now, key=lambda each: now[each].base) if each in ranges]
    assert kept_order == sorted(ranges, key=lambda each: ranges[each].base)


def test_a_range_that_has_room_moves_nothing() -> None:
    ranges = {0: Range(0, 8), 1: Range(16, 4)}
    assert placed(ranges, 0, 16, 40, GRAIN) == {}
    assert placed(ranges, 1, 24, 40, GRAIN) == {}
    assert placed(ranges, 0, 17, 40, GRAIN) == {1: 20}, "its neighbour makes way by a grain"
    assert placed(ranges, 1, 26, 40, GRAIN) == {1: 12}, "or it goes back itself"


def test_a_new_range_leaves_room_to_the_one_before_it() -> None:
    assert placed({}, 0, 9, 64, GRAIN) == {0: 0}
    assert placed({0: Range(0, 8)}, 1, 8, 64, GRAIN) == {1: 32}, "in the middle of what is left"
    assert placed({0: Range(0, 8), 1: Range(32, 8)}, 2, 4, 64, GRAIN) == {2: 16}
    assert placed({0: Range(32, 32)}, 1, 4, 64, GRAIN) == {1: 0}, "nothing grows into what is before the first"


class Rows:
    """A seat whose rows are written in one list of cells, as an arena's are."""

    def __init__(self, cells: list[tuple[int, int] | None], name: int) -> None:
        self.cells, self.name = cells, name
        self.base = self.position = self.resets = self.moved = 0
        self.is_held = False

    def reset(self) -> None:
        self.position = 0
        self.resets += 1

    def move_rows(self, base: int) -> None:
        rows = self.cells[self.base : self.base + self.position]
        self.cells[base : base + self.position] = rows
        self.base = base
        self.moved += 1

    def grow(self, rows: int) -> None:
        for row in range(self.position, rows):
            self.cells[self.base + row] = (self.name, row)
        self.position = rows

    def check(self) -> None:
        assert self.cells[self.base : self.base + self.position] == [(self.name, row) for row in range(self.position)]


@pytest.mark.parametrize("seed", range(20))
def test_seats_keep_their_rows_and_the_one_used_longest_ago_makes_way(seed: int) -> None:
    random = np.random.default_rng(seed)
    total, context = 64, 60
    cells: list[tuple[int, int] | None] = [None] * total
    space = RowSpace(total, context, GRAIN)
    seats = [Rows(cells, name) for name in range(3)]
    rooms = [space.add(seat) for seat in seats]
    used = [0, 1, 2]
    for _ in range(200):
        number = int(random.integers(3))
        seat = seats[number]
        if random.random() < 0.2:
            seat.position = int(random.integers(seat.position + 1))
        rows = min(context, seat.position + int(random.integers(1, 20)))
        used.remove(number)
        used.append(number)
        expected = {each: seats[each].position for each in used[:-1] if seats[each].position}
        while sum(footprint(count, GRAIN) for count in expected.values()) + footprint(rows, GRAIN) > total:
            del expected[next(iter(expected))]
        rooms[number](rows)
        assert {each: seats[each].position for each in expected} == expected
        assert all(not seats[each].position for each in used[:-1] if each not in expected), "no more than needed"
        seat.grow(rows)
        for each in seats:
            each.check()


def test_a_context_is_the_most_that_a_seat_can_have() -> None:
    space = RowSpace(64, 50, GRAIN)
    one, two = (Rows([None] * 64, name) for name in range(2))
    room, _ = space.add(one), space.add(two)
    two.position, two.base = 10, 20
    room(50)
    assert (one.base, two.base) == (12, 0), "both fit: the other slid to the start"
    assert (two.position, two.resets) == (10, 0)
    with pytest.raises(ContextFull, match="a context of 50"):
        room(51)
    with pytest.raises(ValueError, match="holds 65"):
        RowSpace(64, 65, GRAIN)
    with pytest.raises(ValueError, match="multiple of 4"):
        RowSpace(66, 60, GRAIN)


@pytest.mark.parametrize("seed", range(20))
def test_a_seat_in_which_a_turn_is_under_way_keeps_its_rows(seed: int) -> None:
    """Whichever was used longest ago: others make way, or there is no room."""
    random = np.random.default_rng(seed)
    cells: list[tuple[int, int] | None] = [None] * 64
    space = RowSpace(64, 60, GRAIN)
    seats = [Rows(cells, name) for name in range(4)]
    rooms = [space.add(seat) for seat in seats]
    refused = 0
    for _ in range(200):
        number = int(random.integers(4))
        seats[int(random.integers(4))].is_held = bool(random.random() < 0.5)
        seat, held = seats[number], {each: each.position for each in seats if each.is_held}
        rows = min(60, seat.position + int(random.integers(1, 24)))
        kept = sum(footprint(each.position, GRAIN) for each in held if each is not seat)
        if kept + footprint(rows, GRAIN) > 64:
            with pytest.raises(ContextFull):
                rooms[number](rows)
            refused += 1
        else:
            rooms[number](rows)
            seat.grow(rows)
        assert all(
            each.position == (rows if each is seat and kept + footprint(rows, GRAIN) <= 64 else was)
            for each, was in held.items()
        )
        for each in seats:
            each.check()
        if random.random() < 0.3:
            seats[int(random.integers(4))].position = 0
    assert refused
