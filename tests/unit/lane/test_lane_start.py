"""How a turn starts, as a pure decision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parkd.lane.live_rows import LiveRows
from parkd.lane.start import DISK_READ_S, Seated, Start, cheapest, cold_start, decide_start, explain
from parkd.state import Costs, StageLayout, StateLayout
from parkd.store.records import Parked, ParkedCheckpoint, Tier
from parkd.types import CacheOutcome, ConversationKey, ImageSpan, PromptIdentity, SegmentSpan, Units

LIVE, RAM, DISK, COLD = CacheOutcome.LIVE, CacheOutcome.RESTORED_RAM, CacheOutcome.RESTORED_DISK, CacheOutcome.COLD
KEY = ConversationKey("", b"model")
LAYOUT = StateLayout((StageLayout(0, 1, 64, 0, b"one"), StageLayout(1, 2, 64, 0, b"two")), "xxh3-64")
FIXED = StateLayout((StageLayout(0, 1, 64, 4096, b"one"),), "xxh3-64")
COST = Costs(read_s=1e-3, bytes_per_s=1e9)


def units(*runs: tuple[int, int]) -> Units:
    return np.concatenate([np.arange(first, stop, dtype=np.uint64) for first, stop in runs])


def prompt(content: Units) -> PromptIdentity:
    segments = (SegmentSpan(0, 100, "system"), SegmentSpan(100, len(content), "message 2 (user)"))
    return PromptIdentity(KEY, content.astype(np.int64), content, (), segments)


def parked(
    content: Units, blocks: tuple[int, ...], checkpoints: tuple[int, ...] = (), layout: StateLayout = LAYOUT
) -> Parked:
    records = tuple(ParkedCheckpoint(position, position) for position in checkpoints)
    return Parked("p", KEY.digest, content, (), blocks, records, layout.digest, 0.0, 0.0)


def decide(
    asked: Units,
    live: Units | None = None,
    candidates: tuple[Parked, ...] = (),
    *,
    lineage: tuple[int, ...] = (),
    layout: StateLayout = LAYOUT,
    cost: Costs = COST,
    has_spare: bool = False,
) -> Start:
    conversation = LiveRows()
    if live is not None:
        conversation = LiveRows(KEY, live, lineage, len(lineage) * 256, "live" if has_spare else None)
    seats = [Seated(conversation)]
    return decide_start(prompt(asked), seats, candidates, layout=layout, cost=cost, has_spare=has_spare)


def test_the_cheapest_start_wins() -> None:
    cost = Costs(read_s=0.001, bytes_per_s=1e9, disk_bytes_per_s=1e8)
    live = Start(LIVE, 200)
    ram = Start(RAM, 900, move_bytes=100_000_000)
    disk = Start(DISK, 990, move_bytes=100_000_000, promote_bytes=100_000_000)
    assert cheapest([cold_start(), live, ram, disk], 1000, cost) is ram
    assert ram.cost_s(1000, cost) == pytest.approx(0.1 + 0.1)
    slow = Costs(read_s=0.001, bytes_per_s=1e6, disk_bytes_per_s=1e6)
    assert cheapest([cold_start(), live, ram, disk], 1000, slow) is live
    costly = Start(LIVE, 200, move_bytes=5_000_000)
    assert cheapest([cold_start(), costly], 1000, slow).source is COLD


def test_what_is_on_disk_costs_its_promotion_and_then_its_restore() -> None:
    """A start from disk was charged with the promotion alone, while a replay counted both."""
    cost = Costs(read_s=0.003, bytes_per_s=1e5, disk_bytes_per_s=2e5)
    record = replace(parked(units((0, 800)), (1, 2, 3, 4)), tier=Tier.DISK)
    live = LiveRows(KEY, units((0, 300), (5000, 5400)), (1, 9), 512)
    found = decide_start(prompt(units((0, 900))), [Seated(live)], (record,), layout=LAYOUT, cost=cost)
    assert (found.source, found.keep_rows) == (DISK, 256)
    promoted_s, restored_s, read_s = 800 * 128 / 2e5, (800 - 256) * 128 / 1e5, 100 * 0.003
    assert found.cost_s(900, cost) == pytest.approx(promoted_s + restored_s + read_s + DISK_READ_S)
    sooner = replace(cost, read_s=0.002)
    again = decide_start(prompt(units((0, 900))), [Seated(live)], (record,), layout=LAYOUT, cost=sooner)
    assert again.source is LIVE, "reading 500 more tokens takes 1.0 s, the promotion and the restore 1.2 s"
    left_out = decide_start(prompt(units((0, 900))), [Seated(live)], (record,), layout=LAYOUT, cost=cost, on_disk=False)
    assert left_out.source is LIVE


def test_of_equal_costs_the_one_that_moves_least_wins_then_the_deepest() -> None:
    free = Costs(read_s=0.0, bytes_per_s=float("inf"))
    moved, shallow, deep = Start(RAM, 9, move_bytes=5), Start(LIVE, 3), Start(LIVE, 7)
    assert cheapest([moved, shallow, deep], 10, free) is deep
    with pytest.raises(ValueError, match="empty"):
        cheapest([], 10, free)


def test_nothing_known_reads_cold() -> None:
    start = decide(units((0, 500)))
    assert (start.source, start.position, start.parked) == (CacheOutcome.COLD, 0, None)
    assert explain(prompt(units((0, 500))), start, "") == ""


def test_the_live_conversation_goes_on_without_a_copy() -> None:
    start = decide(units((0, 900)), units((0, 600)), (parked(units((0, 600)), (1, 2, 3)),))
    assert (start.source, start.position, start.keep_rows) == (CacheOutcome.LIVE, 600, 600)


def test_a_live_conversation_is_not_cut_for_little_where_another_can_be_live_beside_it() -> None:
    little, most = units((0, 200), (5000, 5400)), units((0, 400), (5000, 5400))
    assert decide(little, units((0, 600)), has_spare=True).source is CacheOutcome.COLD
    assert decide(little, units((0, 600))).position == 200
    assert decide(most, units((0, 600)), has_spare=True).position == 400


def test_a_turn_goes_on_in_the_seat_that_holds_most_of_its_prompt() -> None:
    seats = [Seated(LiveRows(KEY, held)) for held in (units((900, 990)), units((0, 300)), units((0, 600)))]
    start = decide_start(prompt(units((0, 900))), seats, (), layout=LAYOUT, cost=COST)
    assert (start.source, start.seat, start.position, start.common, start.known) == (LIVE, 2, 600, 600, 600)


def test_with_several_seats_a_restore_takes_the_one_with_most_of_its_blocks_and_nothing_else_a_free_one() -> None:
    record = parked(units((0, 800)), (1, 2, 3, 4))
    seats = [Seated(), Seated(LiveRows(KEY, units((0, 300), (5000, 5200)), (1, 9), 500, "live"))]
    start = decide_start(prompt(units((0, 900))), seats, (record,), layout=LAYOUT, cost=COST)
    assert (start.source, start.seat, start.position, start.keep_rows) == (RAM, 1, 800, 256)
    elsewhere = [Seated(LiveRows(KEY, units((0, 600)), (1, 2), 512, "live")), Seated()]
    start = decide_start(prompt(units((0, 200), (7000, 7500))), elsewhere, (), layout=LAYOUT, cost=COST)
    assert (start.source, start.seat) == (COLD, 1), "a parked one is not cut to little"


def test_the_prompts_last_token_always_runs() -> None:
    assert decide(units((0, 600)), units((0, 600))).position == 599


def test_a_deeper_parked_one_beats_the_live_head() -> None:
    record = parked(units((0, 800)), (1, 2, 3, 4))
    start = decide(units((0, 900)), units((0, 300), (5000, 5400)), (record,), lineage=(1, 9))
    assert (start.source, start.position) == (CacheOutcome.RESTORED_RAM, 800)
    assert start.keep_rows == 256  # block 1 is in the arenas already
    assert start.move_bytes == (800 - 256) * LAYOUT.row_bytes


@pytest.mark.parametrize(("position", "kept"), [(511, 256), (512, 256), (513, 512)])
def test_of_rows_that_are_all_live_the_last_block_is_restored_with_the_checkpoint(position: int, kept: int) -> None:
    record = parked(units((0, 800)), (1, 2, 3, 4), checkpoints=(position,), layout=FIXED)
    asked = units((0, position), (9000, 9100))
    start = decide(asked, units((0, 800)), (record,), lineage=(1, 2, 3), layout=FIXED)
    assert (start.position, start.keep_rows) == (position, kept)


def test_equal_units_without_common_descent_are_copied_whole() -> None:
    record = parked(units((0, 800)), (1, 2, 3, 4))
    start = decide(units((0, 900)), units((0, 300), (5000, 5400)), (record,), lineage=(7, 8))
    assert start.keep_rows == 0


def test_another_key_or_layout_is_never_a_start() -> None:
    foreign = replace(parked(units((0, 800)), (1,)), layout_digest=b"other")
    assert decide(units((0, 900)), None, (foreign,)).source is CacheOutcome.COLD
    live = LiveRows(ConversationKey("someone", b"model"), units((0, 800)))
    start = decide_start(prompt(units((0, 900))), [Seated(live)], (), layout=LAYOUT, cost=COST)
    assert start.source is CacheOutcome.COLD


def test_fixed_state_resumes_at_a_checkpoint_and_says_so() -> None:
    record = parked(units((0, 800)), (1, 2, 3, 4), checkpoints=(400, 700, 790), layout=FIXED)
    asked = units((0, 750), (5000, 5100))
    start = decide(asked, None, (record,), layout=FIXED)
    assert start.position == 700
    assert explain(prompt(asked), start, "") == "differs from token 750 in message 2 (user)"


def test_a_slow_tier_is_not_worth_its_copy() -> None:
    slow = Costs(read_s=1e-6, bytes_per_s=1e3)
    asked = units((0, 900))
    start = decide(asked, None, (parked(units((0, 800)), (1, 2, 3, 4)),), cost=slow)
    assert start.source is CacheOutcome.COLD
    assert explain(prompt(asked), start, "") == "reading is cheaper than restoring 800 tokens"


def test_what_is_gone_explains_before_what_differs() -> None:
    asked = units((0, 90), (5000, 5400))
    start = decide(asked, units((0, 600)))
    assert explain(prompt(asked), start, "") == "differs from token 90 in system"
    assert explain(prompt(asked), start, "evicted 3 s ago") == "evicted 3 s ago"


def test_a_prompt_that_only_goes_on_needs_no_reason() -> None:
    asked = units((0, 900))
    assert explain(prompt(asked), decide(asked, units((0, 600))), "") == ""


def test_live_rows_are_cut_before_a_picture_that_sees_itself() -> None:
    """The start of the picture, if the state is exact there; else a checkpoint before it."""
    span = ImageSpan(600, 700, b"d" * 32, sees_itself=True)
    asked = replace(prompt(units((0, 900))), images=(span,))
    live = LiveRows(KEY, asked.units[:650].copy())
    for floor, position in ((500, 600), (620, 512)):
        start = decide_start(asked, [Seated(live, (256, 512, 640), floor)], (), layout=FIXED, cost=COST)
        assert start.position == position
    known = parked(asked.units[:650], (1, 2, 3))
    start = decide_start(asked, [Seated()], (known,), layout=LAYOUT, cost=COST)
    assert start.position == 600


def test_what_a_prompt_leaves_is_named_only_where_both_go_on_otherwise() -> None:
    known = units((0, 500))
    assert decide(units((0, 600)), known).nearest is None, "it goes on from there"
    assert decide(units((0, 400)), known).nearest is None, "it is the head of it"
    assert decide(known, known).nearest is None
    assert decide(units((0, 400), (9000, 9100)), known).nearest is known
