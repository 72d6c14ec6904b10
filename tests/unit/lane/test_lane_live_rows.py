"""What the rows mean after each move: units, and which stored blocks they descend from."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.lane.live_rows import LiveRows, restored
from parkd.types import ConversationKey, Units

KEY = ConversationKey("", b"model")


def units(count: int, first: int = 0) -> Units:
    return np.arange(first, first + count, dtype=np.uint64)


def parked(rows: int, blocks: tuple[int, ...]) -> LiveRows:
    return LiveRows(KEY, units(rows)).captured(blocks, rows, "p")


def test_reading_on_keeps_full_blocks_and_drops_the_partial_tail() -> None:
    live = parked(600, (1, 2, 3)).advance(KEY, units(700), 700)
    assert (live.lineage, live.covered, live.parked_id) == ((1, 2), 512, None)
    assert np.array_equal(live.units, units(700))


def test_nothing_read_leaves_everything_as_it_was() -> None:
    live = parked(600, (1, 2, 3))
    assert live.advance(KEY, units(900), 600) is live


@pytest.mark.parametrize(("position", "lineage"), [(599, (1, 2)), (512, (1, 2)), (511, (1,)), (255, ())])
def test_truncating_keeps_the_blocks_that_are_whole(position: int, lineage: tuple[int, ...]) -> None:
    live = parked(600, (1, 2, 3)).truncate(position)
    assert (live.position, live.lineage, live.covered) == (position, lineage, len(lineage) * 256)
    assert live.parked_id is None


def test_truncating_to_nothing_forgets_the_key() -> None:
    assert parked(600, (1, 2, 3)).truncate(0).key is None


def test_rewritten_rows_do_not_descend_from_what_was_there() -> None:
    other = np.concatenate([units(300), units(400, 5000)])
    live = parked(600, (1, 2, 3)).truncate(300).advance(KEY, other, 700)
    assert (live.lineage, live.covered) == ((1,), 256)


def test_a_partial_capture_covers_whole_blocks_only() -> None:
    live = LiveRows(KEY, units(1000)).captured((1, 2, 3), 600, "p")
    assert (live.lineage, live.covered, live.parked_id) == ((1, 2), 512, None)


def test_a_restore_inside_a_block_descends_from_the_blocks_before() -> None:
    live = restored(KEY, units(600), (1, 2), 550, None)
    assert (live.position, live.lineage, live.covered) == (550, (1, 2), 512)


def test_only_the_very_same_blocks_may_stay_in_place() -> None:
    live = parked(1000, (1, 2, 3, 4))
    assert live.shared_rows((1, 2, 9, 4)) == 512
    assert live.shared_rows((9, 2, 3)) == 0
    assert live.shared_rows((1, 2, 3, 4)) == 768  # the last is partial


def test_units_shorter_than_the_position_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        LiveRows().advance(KEY, units(10), 11)
