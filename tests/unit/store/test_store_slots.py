"""The slot allocator and the slabs behind it."""

from __future__ import annotations

import itertools
import mmap
import random

import numpy as np
import pytest

from parkd.state import Grain
from parkd.store.budget import Budget, Kind, Need, Room
from parkd.store.slabs import PAGE_BYTES, SlabGeometry, SlabPool, anonymous
from parkd.store.slots import SlotAllocator
from tests.fault.whole_kit import whole_layout
from tests.unit.store.store_kit import Hooks, make_layout


def runs(slots):
    return 1 + sum(later != earlier + 1 for earlier, later in itertools.pairwise(slots))


def test_random_histories_never_hand_out_a_slot_twice():
    rng = random.Random(5)
    for _ in range(30):
        slots, held = SlotAllocator(), []
        bases = [slots.add_region(rng.randint(1, 40)) for _ in range(3)]
        known = {base + offset for base in bases for offset in range(slots.size(base))}
        for _ in range(200):
            if rng.random() < 0.5 and slots.free_slots:
                after = rng.choice(held) if held and rng.random() < 0.5 else None
                taken = slots.allocate(rng.randint(1, slots.free_slots), after)
                assert not set(taken) & set(held)
                assert set(taken) <= known
                held += taken
            else:
                rng.shuffle(held)
                cut = rng.randint(0, len(held))
                slots.free(held[:cut])
                held = held[cut:]
            assert slots.used_slots == len(held) == len(set(held))
            assert slots.free_slots == len(known) - len(held)
            for base, used in slots.regions.items():
                assert used == sum(base <= slot < base + slots.size(base) for slot in held)
        slots.free(held)
        # All merged: one run a region.
        assert sorted(slots._starts) == sorted(bases)


def test_blocks_continue_behind_the_conversations_last():
    slots = SlotAllocator()
    slots.add_region(100)
    hole = slots.allocate(3)
    mine = slots.allocate(5)
    slots.free(hole)
    # The hole fits exactly, but a longer run is worth more.
    assert slots.allocate(3, after=mine[-1]) == [8, 9, 10]
    assert slots.allocate(3) == hole


def test_best_fit_keeps_long_runs_for_long_conversations():
    slots = SlotAllocator()
    slots.add_region(30)
    slots.allocate(30)
    slots.free([*range(2, 12), *range(14, 18), *range(20, 26)])
    assert slots.allocate(4) == [14, 15, 16, 17]
    assert slots.allocate(7) == [2, 3, 4, 5, 6, 7, 8]
    assert runs(slots.allocate(9)) == 2


def test_slots_of_two_slabs_are_never_neighbours():
    slots = SlotAllocator()
    slots.add_region(4)
    slots.add_region(4)
    taken = slots.allocate(8)
    assert runs(taken) == 2
    assert slots.region_of(taken[3]) != slots.region_of(taken[4])


def test_freeing_twice_and_taking_too_much_are_caught():
    slots = SlotAllocator()
    slots.add_region(8)
    taken = slots.allocate(4)
    slots.free(taken[1:2])
    with pytest.raises(AssertionError):
        slots.free(taken[1:2])
    with pytest.raises(AssertionError):
        SlotAllocator().allocate(1)


@pytest.mark.parametrize("row_bytes", [(8,), (8, 24, 16), (4096, 512), (0,), (0, 64)])
def test_geometry_never_promises_more_than_slabs_can_give(row_bytes):
    layout = make_layout(row_bytes, (0,) * len(row_bytes))
    geometry = SlabGeometry.of(layout, 4, 64 << 10, 1 << 20)
    for size in [*range(0, 40_000, 777), 100_000, 250_000]:
        slots = geometry.slots_in(size)
        full, rest = divmod(slots, geometry.most_slots)
        taken = full * geometry.slab_bytes(geometry.most_slots) + (geometry.slab_bytes(rest) if rest else 0)
        assert taken <= size
    assert geometry.slab_bytes(geometry.most_slots) <= 64 << 10


def test_empty_slabs_make_room_for_other_bytes():
    layout, hooks = make_layout((1024, 1024)), Hooks()
    budget = Budget(64 * PAGE_BYTES)
    pool = SlabPool(SlabGeometry.of(layout, 4, 1 << 20, budget.limit_bytes), budget, hooks)
    pool.reserve(Need(30, 0))
    slots = pool.allocate(30, None)
    assert sum(hooks.known.values()) == budget[Kind.SLABS] > 56 * PAGE_BYTES
    need = Need(4, 28 * PAGE_BYTES)
    assert not pool.geometry.fits(need, pool.room())
    assert pool.geometry.fits(need, pool.room(slots[2:]))
    pool.free(slots[2:])
    pool.reserve(need)
    budget.charge(Kind.CHECKPOINTS, need.side_bytes)
    assert pool.free_slots >= 4
    assert sum(hooks.known.values()) == budget[Kind.SLABS]
    pool.free(slots[:2])
    pool.close()
    assert hooks.known == {}
    assert budget[Kind.SLABS] == 0


def test_random_reservations_that_fit_are_kept():
    """What `room` promises, `reserve` delivers, whatever the slabs look like."""
    rng = random.Random(3)
    layout = make_layout((40, 24))
    for _ in range(20):
        budget = Budget(rng.randint(20, 90) * PAGE_BYTES + rng.randint(0, 4095))
        pool = SlabPool(SlabGeometry.of(layout, 4, 5 * PAGE_BYTES, budget.limit_bytes), budget)
        held, side = [], 0
        for _ in range(150):
            room = pool.room()
            need = Need(rng.randint(0, 300), rng.randint(0, max(0, room.free_bytes)))
            if pool.geometry.fits(need, room):
                pool.reserve(need)
                budget.charge(Kind.METADATA, need.side_bytes)
                side += need.side_bytes
                held += pool.allocate(need.slots, None)
            rng.shuffle(held)
            cut = rng.randint(0, len(held))
            pool.free(held[:cut])
            held = held[cut:]
            back = rng.randint(0, side)
            budget.credit(Kind.METADATA, back)
            side -= back
            assert budget.allocated_bytes <= budget.limit_bytes


def test_stages_of_neighbouring_slots_are_contiguous_and_apart():
    layout = make_layout((16, 8))
    budget = Budget(1 << 20)
    pool = SlabPool(SlabGeometry.of(layout, 4, 1 << 20, budget.limit_bytes), budget)
    pool.reserve(Need(6, 0))
    first, *_ = pool.allocate(6, None)
    for slot in range(first, first + 6):
        for stage, part in enumerate((64, 32)):
            pool.buffer(stage, slot, part)[:] = 10 * stage + slot - first
    for stage, part in enumerate((64, 32)):
        together = pool.buffer(stage, first, 6 * part)
        assert np.array_equal(together, np.repeat(np.arange(6) + 10 * stage, part))


def test_budget_refuses_more_than_it_has():
    budget = Budget(100)
    budget.charge(Kind.METADATA, 60)
    with pytest.raises(AssertionError):
        budget.charge(Kind.SLABS, 41)
    with pytest.raises(AssertionError):
        budget.credit(Kind.SLABS, 1)
    budget.charge(Kind.SLABS, 40)
    budget.credit(Kind.SLABS, 40)
    assert (budget.free_bytes, budget.peak_bytes, budget.side_bytes) == (40, 100, 60)


def test_large_memory_asks_for_huge_pages_where_there_are_any(monkeypatch):
    asked = []

    class Watched(mmap.mmap):
        def madvise(self, *given):
            asked.append((len(self), *given))

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(mmap, "mmap", Watched)
    least = 2 << 20
    for size in (PAGE_BYTES, least - PAGE_BYTES, least):
        assert anonymous(size).nbytes == size
    assert asked == [(least, 14)]
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert anonymous(least).nbytes == least
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("open_slots", "free_bytes", "slots", "side_bytes", "fits"),
    [
        (2, 100, 2, 100, True),  # what is there is enough, to the last byte
        (2, 100, 1, 101, False),  # slots cannot be used for other bytes
        (2, 0, 3, 0, False),
        (0, PAGE_BYTES, PAGE_BYTES // 64, 0, True),  # a slab of a page, full
        (0, PAGE_BYTES - 1, 1, 0, False),  # a slot fits, its slab does not
        (0, PAGE_BYTES + 64, PAGE_BYTES // 64 + 1, 0, False),
        (1, PAGE_BYTES + 7, PAGE_BYTES // 64 + 1, 7, True),
        (1, PAGE_BYTES + 6, PAGE_BYTES // 64 + 1, 7, False),
        (0, 10 * PAGE_BYTES + 100, 10 * PAGE_BYTES // 64, 0, True),  # the rest is no slab
    ],
)
def test_what_fits_is_counted_to_the_byte(open_slots, free_bytes, slots, side_bytes, fits):
    geometry = SlabGeometry((64,), 10 * PAGE_BYTES // 64)
    assert geometry.fits(Need(slots, side_bytes), Room(open_slots, free_bytes)) == fits


def test_slabs_are_smaller_where_other_state_shares_the_budget():
    budget_bytes = 64 << 20
    for fixed_bytes, pieces in ((0, 8), (700, 32)):
        geometry = SlabGeometry.of(make_layout((1024,), (fixed_bytes,)), 4, 1 << 30, budget_bytes)
        assert geometry.full_slab_bytes == budget_bytes // pieces


def test_no_slab_is_made_for_states_that_are_not_rows():
    geometry = SlabGeometry.of(whole_layout(Grain.OPAQUE), 4, 1 << 20, 64 << 20)
    assert not SlabPool(geometry, Budget(64 << 20)).grow_ahead()


def test_room_counts_a_slab_as_free_only_if_all_that_is_used_of_it_goes():
    budget = Budget(16 * PAGE_BYTES)
    pool = SlabPool(SlabGeometry((PAGE_BYTES,), 4), budget)
    pool.reserve(Need(8, 0))
    slots = pool.allocate(8, None)
    assert pool.room() == Room(0, 8 * PAGE_BYTES)
    assert pool.room(slots[:6]) == Room(2, 12 * PAGE_BYTES)
    assert pool.room(slots) == Room(0, 16 * PAGE_BYTES)


def test_slabs_grow_ahead_up_to_the_share_of_metadata():
    for slots, grows in ((63, True), (64, False)):
        pool = SlabPool(SlabGeometry((PAGE_BYTES,), slots), Budget(64 * PAGE_BYTES))
        assert pool.grow_ahead() == grows
