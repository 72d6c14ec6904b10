"""What the tables say that an eviction would free, against sums by hand, and that they keep nothing of what is gone."""

from __future__ import annotations

import pytest

from parkd.state import Costs, Grain
from parkd.store.budget import BLOCK_BYTES, CONVERSATION_BYTES, HASH_BYTES, UNIT_BYTES
from parkd.store.eviction import rated
from parkd.store.policy import LruPolicy
from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import away, started
from tests.fault.tier_kit import parked as parked_by
from tests.fault.whole_kit import FIXED_BYTES, ROW_BYTES, WholeEngine, whole_layout
from tests.fault.workload import LAYOUTS
from tests.unit.store.store_kit import KEY, CopyEngine, Hooks, make_layout, make_store, make_units

FIXED = make_layout(fixed_bytes=(700, 1000))
SLOT_BYTES = 4 * (256 + 128)
CHECKPOINT_BYTES = 4096


def rating_of(store, parked):
    conversation = store.table.known(parked.id)
    return rated(store.table, conversation, conversation.ram, LruPolicy(), Costs(), 1000.0)


def described(position: int) -> int:
    return CONVERSATION_BYTES + position * UNIT_BYTES + position // 4 * HASH_BYTES


def test_a_branch_frees_the_blocks_and_checkpoints_that_only_it_holds():
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 8), checkpoint=True).extend(make_units(2, 4), checkpoint=True)
    first = engine.park(store)
    engine.truncate(8)
    engine.extend(make_units(3, 5), checkpoint=True)
    branch = engine.park(store)
    rating = rating_of(store, branch)
    assert (rating.candidate.position, rating.candidate.freed_tokens) == (13, 8)
    assert rating.candidate.freed_bytes == 2 * SLOT_BYTES + CHECKPOINT_BYTES
    assert rating.freed_slots == 2
    assert rating.freed_side_bytes == described(13) + 2 * BLOCK_BYTES + CHECKPOINT_BYTES
    slots, side_bytes = store.table.blocks.freed_with([first.blocks, branch.blocks])
    assert sorted(slots) == sorted(block.slot for block in store.inspect().blocks.values())
    assert side_bytes == 5 * BLOCK_BYTES
    alone = store.table.blocks.freed_with([branch.blocks])
    assert sorted(alone[0]) == sorted(store.inspect().blocks[block].slot for block in branch.blocks[2:])
    ids = [[c.id for c in each.checkpoints] for each in (first, branch)]
    assert store.table.checkpoints.bytes_freed_with(ids) == 3 * CHECKPOINT_BYTES
    assert store.table.checkpoints.bytes_freed_with(ids[1:]) == CHECKPOINT_BYTES
    store.drop(first.id, "a test")
    assert rating_of(store, branch).candidate.freed_bytes == 4 * SLOT_BYTES + 2 * CHECKPOINT_BYTES


def test_an_opaque_state_frees_all_of_its_tokens_or_none():
    layout = whole_layout(Grain.OPAQUE, FIXED_BYTES)
    store, engine = make_store(8 << 20, layout), WholeEngine(layout, 4, 1, FaultFs())
    engine.read(make_units(1, 6), checkpoint=True).extend(make_units(2, 4), checkpoint=True)
    parked = engine.park(store)
    whole_bytes = -(-10 * ROW_BYTES // 4096) * 4096
    rating = rating_of(store, parked)
    assert (rating.candidate.freed_bytes, rating.candidate.freed_tokens) == (whole_bytes + CHECKPOINT_BYTES, 10)
    assert (rating.freed_slots, rating.freed_side_bytes) == (
        0,
        described(10) + BLOCK_BYTES + whole_bytes + CHECKPOINT_BYTES,
    )
    assert store.table.blocks.freed_with([parked.blocks]) == ([], BLOCK_BYTES + whole_bytes)
    assert store.table.most_room()[1] == store.config.budget_bytes
    capture = store.begin_capture(engine.request())
    assert capture.transfer.start == 10, "nothing was added, so it shares the state and its checkpoints"
    shared = rating_of(store, parked)
    assert (shared.candidate.freed_bytes, shared.candidate.freed_tokens, shared.freed_slots) == (0, 0, 0)
    assert shared.freed_side_bytes == described(10)
    assert store.table.blocks.freed_with([parked.blocks]) == ([], 0)
    store.abort(capture)
    assert rating_of(store, parked).candidate.freed_tokens == 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tables_keep_nothing_of_what_is_gone(layout: str) -> None:
    """However many conversations a store has had: only its memory of why they left is longer, and that is bounded."""
    machine, store = started(layout=LAYOUTS[layout])
    before = sizes_of(store)
    ids = [parked_by(machine, store, 1)[0].id, away(machine, store, 2)[0].id]
    engine = machine.engine(3).read(make_units(3, 9), checkpoint=True)
    ids.append(engine.park(store).id)
    again = store.begin_capture(engine.request())
    ids.append(engine.finish(store, again).id)
    assert sizes_of(store) != before
    for name in ids:
        store.drop(name, "a test")
    while (job := store.next_job()) is not None:
        store.finished(job, None)
    assert sizes_of(store) == before


def sizes_of(store) -> dict[str, int]:
    """How much there is in each collection of the tables."""
    table = store.table
    parts = {"blocks": table.blocks, "checkpoints": table.checkpoints, "table": table, "disk": table.disk}
    sizes = {
        f"{part}.{name}": len(value)
        for part, each in parts.items()
        for name, value in vars(each).items()
        if hasattr(value, "__len__") and name not in ("gone", "ghosts")
    }
    return sizes | {"queue": len(store.queue), "index": len(store.candidates(KEY, ()))}


@pytest.mark.parametrize("fixed", [True, False])
def test_buffers_for_checkpoints_are_kept_ahead_only_where_they_are_page_locked(fixed):
    layout, hooks = FIXED if fixed else make_layout(), Hooks()
    for given in (hooks, None):
        store = make_store(4 << 20, layout, slab_hooks=given)
        store.grow_ahead()
        charged = store.inspect().ram.charged_bytes
        assert (charged["idle"] > 0) == (fixed and given is not None)
        assert charged["slabs"] > 0
        store.close()
    assert hooks.known == {}
