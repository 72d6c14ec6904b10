"""llama.cpp in process, in blocks: ranges of a conversation's cells leave and come back alone, with equal bits.

The reference is the library's own state of the whole sequence and its logits, of a conversation that stayed.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import BLOCK_TOKENS, Grain, RowRun, StageTransfer, Transfer
from tests.integration.api.api_harness import running
from tests.integration.llama.llama_cpp_kit import loaded, opening, turn_after

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

import llama_cpp.llama_cpp as low

from parkd.engine_adapter.llama_cpp.ranges import RANGE, CellRanges, Rows
from tests.integration.llama.test_llama_cpp_bits import (
    NEVER,
    capture,
    converse,
    logits_of,
    some_tokens,
    whole_state,
)

LENGTH = 2 * BLOCK_TOKENS + 90
LONG = 4 * BLOCK_TOKENS + 70
CASES = [
    ("tiny", "f16", "auto", 1),
    ("tiny-sliding", "q8_0", "auto", 1),
    ("tiny-dense", "f16", "auto", 1),
    ("tiny-dense", "q8_0", "on", 3),
    ("tiny-dense", "f16", "off", 3),
    ("tiny-experts", "q4_0", "on", 2),
]
"""With how many blocks are copied at once, as on cards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama-cpp-blocks")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def loaded_engine(request: pytest.FixtureRequest, folder: Path):
    name, cache_type, flash_attn, copies = request.param
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type, "flash_attn": flash_attn}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("parkd.engine_adapter.llama_cpp.library.copies_at_once", lambda _cards, _fixed: copies)
        engine = stack.enter_context(loaded(name, folder, **types))
        patch.undo()
        if engine.uses_cards and flash_attn == "off":
            pytest.skip("on cards such a state is moved whole")
        yield engine


@pytest.fixture
def engine(loaded_engine):
    loaded_engine.reset()
    return loaded_engine


def go_on(engine) -> tuple[np.ndarray, np.ndarray]:
    """The whole state and the logits after more tokens: of a batch, and of single ones."""
    engine.extend(some_tokens(7, 70), cancel=NEVER)
    engine.checkpoint()
    return whole_state(engine), logits_of(engine, [40, 41])


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def zeroed(stage: StageTransfer) -> StageTransfer:
    runs = tuple(replace(run, buffer=np.zeros_like(run.buffer)) for run in stage.rows)
    return StageTransfer(runs, tuple(replace(part, buffer=np.zeros_like(part.buffer)) for part in stage.fixed))


def tagged(engine) -> list[int]:
    """How far the sequences reach through which blocks are moved; -1 where none has cells."""
    memory, copies = engine.context.memory, engine.model.copies
    return [low.llama_memory_seq_pos_max(memory, RANGE + number) for number in range(copies)]


def joined(first: Transfer, second: Transfer) -> Transfer:
    """What two captures took, as one restore."""
    [one], [two] = first.stages, second.stages
    rows = np.concatenate((first.checksums, second.checksums))
    stage = StageTransfer((*one.rows, *two.rows), two.fixed)
    return replace(second, start=0, stages=(stage,), checksums=rows)


def test_sums_that_are_made_behind_a_copy_are_the_same(engine) -> None:
    """As on cards: the state may change as soon as `start_capture` has returned."""
    converse(engine, LENGTH, None)
    engine.checkpoint()
    parked = capture(engine, None)
    again = replace(parked, stages=(zeroed(parked.stages[0]),))
    engine.uses_cards = True
    try:
        in_flight = engine.start_capture(again)
        assert in_flight is not None
        engine.reset()
        engine.extend(some_tokens(9, 300), cancel=NEVER)
        sums = in_flight.wait()
    finally:
        engine.uses_cards = False
    assert np.array_equal(sums.rows, parked.checksums)
    assert np.array_equal(sums.fixed, parked.fixed_checksums)


def test_its_state_is_blocks(engine) -> None:
    assert engine.info.layout.grain is Grain.ROWS


def test_only_the_new_blocks_are_taken_and_all_come_back(engine) -> None:
    """A grown conversation: two blocks are taken early, the rest later."""
    converse(engine, 2 * BLOCK_TOKENS, None)
    engine.checkpoint()
    early = capture(engine, None)
    engine.extend(some_tokens(5, 90), cancel=NEVER)
    engine.checkpoint()
    late = capture(engine, None, start=2 * BLOCK_TOKENS)
    stayed = go_on(engine)
    engine.reset()
    engine.extend(some_tokens(8, 700), cancel=NEVER)
    engine.restore(joined(early, late))
    assert engine.position == LENGTH
    assert same(go_on(engine), stayed)


def test_live_blocks_stay_and_the_others_are_added(engine) -> None:
    """Another end is read over the same beginning, which then stays where it is."""
    converse(engine, BLOCK_TOKENS, None)
    engine.checkpoint()
    first = capture(engine, None)
    engine.extend(some_tokens(5, LENGTH - BLOCK_TOKENS), cancel=NEVER)
    engine.checkpoint()
    second = capture(engine, None, start=BLOCK_TOKENS)
    stayed = go_on(engine)
    engine.restore(first)
    engine.extend(some_tokens(6, 400), cancel=NEVER)
    engine.restore(second)
    assert engine.position == LENGTH
    assert same(go_on(engine), stayed)


def test_bytes_of_a_block_do_not_depend_on_what_happened_to_it(engine) -> None:
    """Its first rows, taken at the time, after growth, and after they came back."""
    converse(engine, BLOCK_TOKENS, None)
    engine.checkpoint()
    at_once = capture(engine, None)
    engine.extend(some_tokens(5, 300), cancel=NEVER)
    engine.checkpoint()
    later = capture(engine, None)
    engine.reset()
    engine.restore(later)
    again = capture(engine, None)
    assert at_once.checksums[0] == later.checksums[0]
    assert np.array_equal(later.checksums, again.checksums)
    assert np.array_equal(later.fixed_checksums, again.fixed_checksums)


def test_after_rewinds_and_other_conversations_bits_are_equal(engine) -> None:
    """Cells are freed and used again, in pieces; what is then taken goes on like what stayed."""

    def wander() -> None:
        engine.reset()
        engine.extend(some_tokens(8, 130), cancel=NEVER)
        converse(engine, BLOCK_TOKENS + 40, None)
        for seed, place in ((11, BLOCK_TOKENS - 60), (12, 70), (13, 200)):
            engine.checkpoint()
            at = place if place >= engine.rewind_floor else max((0, *(c for c in engine.checkpoints if c <= place)))
            engine.truncate(at)
            engine.extend(some_tokens(seed, 300), cancel=NEVER, checkpoint_at=(at + 100,))
        engine.extend(some_tokens(14, LENGTH - engine.position), cancel=NEVER)
        engine.checkpoint()

    wander()
    parked = capture(engine, None)
    stayed = go_on(engine)
    engine.reset()
    for seed in (21, 22):
        engine.extend(some_tokens(seed, 333), cancel=NEVER)
    engine.restore(parked)
    assert same(go_on(engine), stayed)
    wander()
    assert same(go_on(engine), stayed)


def test_any_prefix_of_a_full_attention_is_resumed(engine) -> None:
    if engine.info.layout.fixed_bytes:
        pytest.skip("resumed at checkpoints")
    converse(engine, LENGTH, None)
    parked = capture(engine, None)
    for place in (1, BLOCK_TOKENS, BLOCK_TOKENS + 5, LENGTH - 1):
        engine.reset()
        converse(engine, LENGTH, None)
        engine.truncate(place)
        stayed = go_on(engine)
        engine.reset()
        engine.restore(replace(parked, resume_at=place))
        assert engine.position == place
        assert same(go_on(engine), stayed), place


@pytest.mark.parametrize("at", [2, 40, 5000, -1])
def test_a_damaged_block_is_a_miss(engine, at: int) -> None:
    """In its header, its cells, its keys, its end: compared before the library sees it."""
    converse(engine, LENGTH, None)
    engine.checkpoint()
    parked = capture(engine, None)
    [run] = parked.stages[0].rows
    run.buffer[at] ^= 1
    with pytest.raises(RestoreFailed):
        engine.restore(parked)
    assert (engine.position, engine.sequence.position, engine.checkpoints) == (0, 0, ())


def test_a_damaged_partial_state_is_a_miss(engine) -> None:
    if not engine.info.layout.fixed_bytes:
        pytest.skip("it has none")
    converse(engine, LENGTH, None)
    engine.checkpoint()
    parked = capture(engine, None)
    parked.stages[0].fixed[0].buffer[100] ^= 1
    with pytest.raises(RestoreFailed):
        engine.restore(parked)
    assert engine.position == 0


def test_rows_of_another_place_are_refused(engine) -> None:
    """Its checksum is right, but it is the block of other positions."""
    converse(engine, LENGTH, None)
    engine.checkpoint()
    parked = capture(engine, None)
    [stage] = parked.stages
    [run] = stage.rows
    size = engine.info.layout.stages[0].block_bytes(BLOCK_TOKENS)
    swapped = np.concatenate((run.buffer[size : 2 * size], run.buffer[:size], run.buffer[2 * size :]))
    rows = StageTransfer((RowRun(run.start, run.stop, swapped),), stage.fixed)
    with pytest.raises(RestoreFailed):
        engine.restore(replace(parked, stages=(rows,), checksums=parked.checksums[[1, 0, 2]]))
    assert engine.position == 0


def test_cells_out_of_order_are_not_parked(engine) -> None:
    """The later rows are set first, so that they lie in front: sums over them would round otherwise elsewhere."""
    converse(engine, LENGTH, None)
    engine.checkpoint()
    parked = capture(engine, None)
    [run] = parked.stages[0].rows
    stage, ranges = engine.info.layout.stages[0], engine._moves._ranges
    size = stage.block_bytes(BLOCK_TOKENS)
    engine.reset()
    later = Rows(BLOCK_TOKENS, 2 * BLOCK_TOKENS, run.buffer[size : 2 * size])
    assert ranges.write([later, Rows(0, BLOCK_TOKENS, run.buffer[:size])]) is None
    places = ((200, 400), (0, 200), (300, 500))  # the first is not in order, and the others are on their way
    with pytest.raises(EngineFailure, match="in order"):
        list(ranges.read(Rows(*place, np.empty(stage.block_bytes(200), dtype=np.uint8)) for place in places))
    assert set(tagged(engine)) == {-1}
    engine.reset()


def test_many_blocks_leave_and_come_back_as_one_by_one(engine) -> None:
    converse(engine, LONG, None)
    engine.checkpoint()
    parked, [stage] = capture(engine, None), engine.info.layout.stages
    assert set(tagged(engine)) == {-1}
    one_by_one = CellRanges(engine.sequence, engine._moves._ranges.form)
    for start in range(0, LONG, BLOCK_TOKENS):
        rows = Rows(start, min(start + BLOCK_TOKENS, LONG), np.zeros(0, dtype=np.uint8))
        rows = replace(rows, state=np.zeros(stage.block_bytes(rows.stop - start), dtype=np.uint8))
        [state] = one_by_one.read([rows])
        at = start // BLOCK_TOKENS * stage.block_bytes(BLOCK_TOKENS)
        assert np.array_equal(parked.stages[0].rows[0].buffer[at : at + state.nbytes], state), start
    stayed = go_on(engine)
    engine.reset()
    engine.extend(some_tokens(8, 700), cancel=NEVER)
    engine.restore(parked)
    assert set(tagged(engine)) == {-1}
    assert same(go_on(engine), stayed)


def test_one_of_many_blocks_is_damaged(engine) -> None:
    """Others are being copied when it is found; the next conversation is read into an empty memory."""
    converse(engine, LONG, None)
    engine.checkpoint()
    stayed, parked = whole_state(engine), capture(engine, None)
    [stage] = engine.info.layout.stages
    parked.stages[0].rows[0].buffer[3 * stage.block_bytes(BLOCK_TOKENS) + 5000] ^= 1
    with pytest.raises(RestoreFailed, match="checksum"):
        engine.restore(parked)
    assert (engine.position, set(tagged(engine))) == (0, {-1})
    converse(engine, LONG, None)
    engine.checkpoint()
    assert np.array_equal(whole_state(engine), stayed)


def test_the_library_tells_when_a_state_has_its_cells(engine) -> None:
    """Before they are filled: only then may others be changed."""
    if engine.info.layout.fixed_bytes:
        pytest.skip("its blocks are moved one by one")
    converse(engine, 300, None)
    engine.checkpoint()
    form, seen = engine._moves._ranges.form, []
    rows = Rows(0, 300, np.zeros(form.bytes_of(300), dtype=np.uint8))
    list(engine._moves._ranges.read([rows]))
    engine.reset()

    def on_cells() -> None:
        seen.append(low.llama_memory_seq_pos_max(engine.context.memory, RANGE))

    assert engine.sequence.write_state(rows.state, 0, RANGE, on_cells=on_cells)
    assert 299 in seen


def test_a_part_that_does_not_fit_what_is_live_is_refused(engine) -> None:
    converse(engine, LENGTH, None)
    engine.checkpoint()
    late = capture(engine, None, start=BLOCK_TOKENS)
    engine.reset()
    engine.extend(some_tokens(9, 100), cancel=NEVER)
    with pytest.raises(RestoreFailed):
        engine.restore(late)
    assert engine.position == 0


@pytest.mark.anyio
async def test_siblings_share_their_beginning_and_a_turn_moves_what_is_new(engine) -> None:
    """Two conversations with the same long system prompt, the second turn of each: the store holds the beginning once,
    and copies of a grown conversation are its new blocks."""
    layout = engine.info.layout
    block = layout.stages[0].block_bytes(BLOCK_TOKENS)
    system = {"role": "system", "content": opening("a", 280)[1]["content"]}
    one, two = ([system, {"role": "user", "content": words}] for words in ("Begin.", "Begin elsewhere."))
    async with running(engine) as server:

        def moved() -> float:
            metrics = server.server.proxy.metrics
            return metrics.registry.get_sample_value("parkd_moved_bytes_total", {"direction": "park"}) or 0.0

        first = await server.chat(one, max_tokens=6)
        await server.settled()
        whole = moved()
        grown = await server.chat(turn_after(one, first.text), max_tokens=6)
        await server.settled()
        blocks = -(-len(server.prompt_tokens(turn_after(one, first.text))) // BLOCK_TOKENS)
        assert grown.cache == "live"
        assert blocks >= 4
        assert moved() - whole <= 2 * block + 8 * layout.fixed_bytes
        await server.chat(two, max_tokens=6)
        await server.settled()
        assert server.store.stats().shared_blocks >= 3


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["tiny", "tiny-dense"])
async def test_longer_blocks_as_on_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A grown conversation that leaves and comes back, in blocks of 512 tokens, answers as one that stayed."""
    monkeypatch.setattr("parkd.engine_adapter.llama_cpp.engine.block_tokens_for", lambda _key_bytes, _cards: 512)
    system = {"role": "system", "content": opening("a", 200)[1]["content"]}
    one, two = ([system, {"role": "user", "content": words}] for words in ("Begin.", "Begin elsewhere."))
    with loaded(name, folder) as engine:
        assert engine.info.layout.block_tokens == 512
        said = {}
        for is_alone in (False, True):
            engine.reset()
            async with running(engine, budget_bytes=0 if is_alone else 64 << 20) as server:
                first = await server.chat(one, max_tokens=6)
                if not is_alone:
                    await server.chat(two, max_tokens=6)
                second = await server.chat(turn_after(one, first.text), max_tokens=6)
                said[is_alone] = first.text, second.text
                if not is_alone:
                    assert second.cache == "restored-ram"
                    assert second.reused == len(server.prompt_tokens(one)) + 5
                    assert server.store.config.block_tokens == 512
                    assert server.store.stats().shared_blocks == 1
        assert said[True] == said[False]
