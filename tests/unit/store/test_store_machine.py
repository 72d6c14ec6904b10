"""Random histories of the store against the tests' own record of what was put in, and of what descends from what.

The store decides what it keeps and how much of a conversation fits. Everything else is expected: which blocks a capture
shares, which checkpoints it copies, inherits and gives up, what it supersedes, who owns each block, and every byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parkd.state import Grain
from parkd.store.budget import BLOCK_BYTES, CONVERSATION_BYTES, HASH_BYTES, UNIT_BYTES
from parkd.store.records import Capture, Lease, Refused
from tests.fault.fault_fs import FaultFs
from tests.fault.whole_kit import FIXED_BYTES, WholeEngine, whole_layout
from tests.unit.store.lineage_model import Expected, Known, LineageModel, Piece, superseded
from tests.unit.store.store_kit import (
    KEY,
    CopyEngine,
    Hooks,
    assert_same_rows,
    leased_state,
    make_hashes,
    make_layout,
    make_store,
    make_units,
)

BLOCK_TOKENS = 4
SLOTS = 5
CHECKPOINT_LIMIT = 4
"""Few, so that old ones must be given up."""
TREE = make_units(1, 64)
"""Prompts branch off this one, so that prefixes are shared."""


@dataclass
class Waiting:
    """A queued prompt, and the conversation that it would start from; None: there was none, or it was dropped."""

    release: Callable[[], None]
    source: str | None


@dataclass
class Open:
    """A capture that was copied and is not committed yet."""

    capture: Capture
    sums: object
    expected: Expected


# Rules have the names of `tests.lives.life` where they are steps of any life (read, restore, park, go_back). The others
# are what only a store does: its captures stay open, its leases are held, its prompts are expected. Steps, numbers and
# the history of a failure are those of hypothesis, which shortens a history that fails; so there are no Choices here.


class StoreMachine(RuleBasedStateMachine):
    """A rewindable model: any token is a resumable position."""

    layout = make_layout()
    budget_bytes = 150_000
    longest = 400
    has_hooks = False

    @initialize()
    def start(self):
        hooks = Hooks() if self.has_hooks else None
        self.store = make_store(
            self.budget_bytes, self.layout, slots=SLOTS, slab_hooks=hooks, checkpoint_limit=CHECKPOINT_LIMIT
        )
        self.engine = self.make_engine()
        self.model = self.engine.watcher = LineageModel(self.layout, BLOCK_TOKENS, CHECKPOINT_LIMIT)
        self.known: dict[str, Known] = {}
        """Every conversation that was ever parked."""
        self.present: list[str] = []
        """Those that must be there, in the order in which they were parked."""
        self.open: list[Open] = []
        self.leases: list[tuple[str, Lease]] = []
        self.waiting: list[Waiting] = []
        self.branches = 100

    def make_engine(self) -> CopyEngine:
        return CopyEngine(self.layout, context_tokens=512)

    # What is live

    @rule(shared=st.integers(0, 64), more=st.integers(1, 60))
    def read(self, shared, more):
        shared, more = min(shared, self.longest // 2), min(more, self.longest // 2)
        self.engine.read(TREE[:shared], checkpoint=shared > 0)
        self.engine.extend(self.more(more), checkpoint=True)

    @rule(more=st.integers(1, 40), holds=st.booleans())
    def extend(self, more, holds):
        if self.engine.position < self.longest:
            self.engine.extend(self.more(min(more, self.longest // 4)), checkpoint=holds)

    @precondition(lambda self: self.engine.position > 1)
    @rule(data=st.data())
    def go_back(self, data):
        places = [place for place in self.engine.fixed if place < self.engine.position]
        if self.layout.fixed_bytes and not places:
            return
        stops = st.sampled_from(places) if self.layout.fixed_bytes else st.integers(1, self.engine.position - 1)
        position = data.draw(stops)
        self.engine.truncate(position)

    @rule(data=st.data())
    def restore(self, data):
        chosen = self.pick(data)
        if chosen is None:
            return
        known, stop = self.known[chosen], self.pick_stop(data, chosen)
        with self.store.lease(chosen, stop) as lease:
            self.engine.restore(lease)
        self.model.restored(known, stop)
        assert lease.lineage == self.model.lineage
        assert np.array_equal(self.engine.units, known.units[:stop])
        assert_same_rows(self.engine.rows(), [stage[:stop] for stage in known.rows])
        if self.layout.fixed_bytes and known.checkpoints[stop].parts:
            assert_same_rows(self.engine.fixed[stop], known.checkpoints[stop].parts)

    # Captures

    @precondition(lambda self: self.engine.position > 0)
    @rule(outcome=st.sampled_from(["commit", "commit", "commit", "abort", "leave"]))
    def park(self, outcome):
        stored, kin = self.stored(), [self.known[i] for i in self.present]
        capture = self.store.begin_capture(self.engine.request())
        there = self.store.inspect().conversations
        if isinstance(capture, Refused):
            assert set(there) == set(self.present), "nothing is evicted for what is refused"
            return
        gone = [i for i in self.present if i not in there]
        assert not {*gone} & {i for i, _ in self.leases}, "what is leased was evicted"
        assert not {*gone} & {each.source for each in self.waiting}, "what a queued prompt starts from was evicted"
        assert not any(self.known[i].is_pinned for i in gone), "what is pinned was evicted"
        self.present = [i for i in self.present if i in there]
        expected = self.model.expected(self.engine, capture.position, stored, kin)
        self.check_begun(capture, expected)
        opened = Open(capture, self.engine.capture(capture.transfer), expected)
        if outcome == "commit":
            self.commit(opened)
            self.engine.lineage = self.store.get(self.present[-1]).blocks
            if isinstance(self.engine, WholeEngine):
                self.engine.covered = self.engine.position
            self.model.captured(expected.known)
        elif outcome == "abort":
            self.store.abort(capture)
        else:
            self.open.append(opened)

    def check_begun(self, capture, expected):
        """What is reserved, shared and copied."""
        tokens, known = self.engine.position, expected.known
        assert 0 < capture.position <= tokens
        assert capture.transfer.start == expected.start
        for stage in capture.transfer.stages:
            assert tuple(part.position for part in stage.fixed) == expected.copied
        if self.layout.fixed_bytes:
            assert list(known.checkpoints)[-1:] == [capture.position], "it ends where it can be resumed"
        [flight] = [each for each in self.store.inspect().captures if each.serial == capture.serial]
        assert (flight.position, flight.source) == (capture.position, None)
        self.model.name(known, flight.blocks)
        assert [checkpoint.position for checkpoint in flight.checkpoints] == list(known.checkpoints)
        for checkpoint in flight.checkpoints:
            state = known.checkpoints[checkpoint.position]
            assert state.checkpoint in (None, checkpoint.id), "another checkpoint than the one that it inherits"
            assert (state.checkpoint is None) == (checkpoint.position in expected.copied)
            state.checkpoint = checkpoint.id

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), commits=st.booleans())
    def finish(self, index, commits):
        opened = self.open.pop(index % len(self.open))
        if commits:
            self.commit(opened)
        else:
            self.store.abort(opened.capture)

    def commit(self, opened):
        known = opened.expected.known
        gone = superseded(opened.expected, [self.known[i] for i in self.present])
        parked = self.store.commit(opened.capture, opened.sums)
        assert parked.id not in self.known, "an id is never used again"
        assert (parked.key_digest, parked.layout_digest) == (KEY, self.layout.digest)
        known.is_pinned = any(each.is_pinned for each in gone)
        for each in self.waiting:
            if each.source in self.present and self.known[each.source] in gone:
                each.source = parked.id
        self.present = [i for i in self.present if self.known[i] not in gone]
        self.known[parked.id] = known
        self.present.append(parked.id)

    # The rest

    @rule(data=st.data())
    def hold(self, data):
        chosen = self.pick(data)
        if chosen is not None and len(self.leases) < 3:
            self.leases.append((chosen, self.store.lease(chosen, self.pick_stop(data, chosen))))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9))
    def let_go(self, index):
        self.leases.pop(index % len(self.leases))[1].release()

    @precondition(lambda self: len(self.waiting) < 2)
    @rule(shared=st.integers(0, 64))
    def expect(self, shared):
        """A prompt is queued."""
        release = self.store.expect(KEY, make_hashes(TREE[:shared], BLOCK_TOKENS))
        common = {i: self.common_blocks(self.known[i], TREE[:shared]) for i in self.present}
        best = max(common.values(), default=0)
        latest = [i for i in self.present if common[i] == best]
        self.waiting.append(Waiting(release, latest[-1] if best else None))

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def start_queued(self, index):
        self.waiting.pop(index % len(self.waiting)).release()

    @rule(data=st.data(), action=st.sampled_from(["drop", "touch", "pin", "unpin"]))
    def manage(self, data, action):
        chosen = self.pick(data)
        pinned = [i for i in self.present if self.known[i].is_pinned]
        if chosen is None or (action == "pin" and len(pinned) > 1):
            return
        if action == "drop":
            assert self.store.drop(chosen, "test")
            assert not self.store.drop(chosen, "test")
            self.present.remove(chosen)
            for each in self.waiting:
                each.source = None if each.source == chosen else each.source
        else:
            getattr(self.store, action)(chosen)
            self.known[chosen].is_pinned = {"pin": True, "unpin": False}.get(action, self.known[chosen].is_pinned)

    # What must hold

    @invariant()
    def conversations_are_what_was_put_in(self):
        seen = self.store.inspect()
        assert set(seen.conversations) == set(self.present)
        leases = Counter(i for i, _ in self.leases)
        awaited = Counter(each.source for each in self.waiting)
        for name, conversation in seen.conversations.items():
            known = self.known[name]
            assert np.array_equal(conversation.units, known.units)
            assert conversation.blocks == tuple(piece.block for piece in known.pieces)
            checkpoints = [(each.position, each.id) for each in conversation.checkpoints]
            assert checkpoints == [(place, state.checkpoint) for place, state in known.checkpoints.items()]
            assert (conversation.is_pinned, conversation.is_in_ram) == (known.is_pinned, True)
            assert (conversation.leases, conversation.awaited) == (leases[name], awaited[name])
        assert sorted(each.id for each in seen.fading) == sorted({i for i in leases if i not in self.present})

    @invariant()
    def every_byte_is_owned_and_charged(self):
        seen, stats = self.store.inspect(), self.store.stats()
        fading = {i for i, _ in self.leases if i not in self.present}
        holders = [self.known[i] for i in (*self.present, *fading)] + [each.expected.known for each in self.open]
        blocks = Counter(piece.block for known in holders for piece in known.pieces)
        checkpoints = Counter(state.checkpoint for known in holders for state in known.checkpoints.values())
        assert {i: block.owners for i, block in seen.blocks.items()} == blocks
        assert {i: checkpoint.owners for i, checkpoint in seen.checkpoints.items()} == checkpoints
        assert len({block.slot for block in seen.blocks.values()}) == len(blocks), "two blocks have one place"
        copying = {p.block for each in self.open for p in each.expected.known.pieces} - self.stored_blocks()
        assert {i for i, block in seen.blocks.items() if not block.is_sealed} == copying
        charged, held = seen.ram.charged_bytes, seen.ram.held_bytes
        for kind in ("slabs", "segments", "checkpoints", "idle"):
            assert charged[kind] == held[kind], kind
        assert charged["checkpoints"] == sum(each.ram_bytes for each in seen.checkpoints.values())
        if self.layout.is_opaque:
            sizes = {p.block: p.rows * self.layout.row_bytes for known in holders for p in known.pieces}
            assert charged["segments"] == sum(-(-size // 4096) * 4096 for size in sizes.values())
        else:
            stage_bytes = [-(-stage.fixed_bytes // 64) * 64 for stage in self.layout.stages]
            assert charged["checkpoints"] == len(checkpoints) * -(-sum(stage_bytes) // 4096) * 4096
            assert seen.ram.used_slots == len(blocks)
        described = [CONVERSATION_BYTES + k.position * UNIT_BYTES + k.position // 4 * HASH_BYTES for k in holders]
        assert charged["metadata"] == sum(described) + len(blocks) * BLOCK_BYTES
        assert stats.bytes_in_use <= stats.bytes_allocated == sum(charged.values()) <= self.budget_bytes
        assert (stats.conversations, stats.captures_in_flight) == (len(self.present), len(self.open))
        assert (stats.blocks, stats.shared_blocks) == (len(blocks), sum(owners > 1 for owners in blocks.values()))
        assert stats.pinned == sum(self.known[i].is_pinned for i in self.present)
        assert stats.leased == len({i for i, _ in self.leases})
        assert len(self.present) <= SLOTS

    @invariant()
    def a_look_up_finds_all_of_the_key(self):
        prompt = self.engine.units
        found = self.store.candidates(KEY, make_hashes(prompt, BLOCK_TOKENS))
        assert {parked.id: shared for parked, shared in found} == {
            i: self.common_blocks(self.known[i], prompt) for i in self.present
        }
        assert [shared for _, shared in found] == sorted((shared for _, shared in found), reverse=True)

    @invariant()
    def leased_bytes_stay(self):
        for name, lease in self.leases:
            known = self.known[name]
            for stage, part in enumerate(lease.transfer.stages):
                for run in part.rows:
                    expected = known.rows[stage][run.start : min(run.stop, lease.stop)].reshape(-1)
                    assert np.array_equal(run.buffer[: expected.size], expected)
                for fixed in part.fixed:
                    if known.checkpoints[lease.stop].parts:
                        assert np.array_equal(fixed.buffer, known.checkpoints[lease.stop].parts[stage])

    def teardown(self):
        if not hasattr(self, "store"):
            return
        for name in self.present:
            known = self.known[name]
            for stop in known.checkpoints if self.layout.fixed_bytes else (known.position, (known.position + 1) // 2):
                rows, fixed = leased_state(self.store, name, stop)
                assert_same_rows(rows, [stage[:stop] for stage in known.rows])
                if self.layout.fixed_bytes and known.checkpoints[stop].parts:
                    assert_same_rows(fixed, known.checkpoints[stop].parts)
        for each in self.open:
            self.store.abort(each.capture)
        for _, lease in self.leases:
            lease.release()
        self.store.close()
        assert self.store.stats().bytes_allocated == 0
        assert self.store.stats().blocks == 0

    def stored(self) -> set[Piece]:
        """The pieces that are in memory and complete."""
        holders = [self.known[i] for i in {*self.present, *(i for i, _ in self.leases)}]
        complete = {piece for known in holders for piece in known.pieces}
        return complete | {
            piece for each in self.open for piece in each.expected.known.pieces if piece in each.expected.shared
        }

    def stored_blocks(self) -> set[int]:
        return {piece.block for piece in self.stored()}

    def common_blocks(self, known: Known, prompt: np.ndarray) -> int:
        """Full blocks of equal tokens at the beginning of both."""
        most = min(known.position, len(prompt))
        differs = np.flatnonzero(known.units[:most] != prompt[:most])
        return int(differs[0] if len(differs) else most) // BLOCK_TOKENS

    def pick(self, data) -> str | None:
        return data.draw(st.sampled_from(sorted(self.present))) if self.present else None

    def pick_stop(self, data, chosen) -> int:
        known = self.known[chosen]
        if self.layout.fixed_bytes:
            return data.draw(st.sampled_from(sorted(known.checkpoints)))
        return data.draw(st.integers(1, known.position))

    def more(self, count) -> np.ndarray:
        self.branches += 1
        return make_units(self.branches, count)


class CheckpointMachine(StoreMachine):
    """A model with fixed state: only checkpoints are resumable positions."""

    layout = make_layout(fixed_bytes=(700, 1000))


class LockedMachine(CheckpointMachine):
    """The same in page-locked memory, whose free buffers are kept."""

    has_hooks = True


class WholeMachine(StoreMachine):
    """An engine whose state the store can't cut."""

    layout = whole_layout(Grain.OPAQUE)
    budget_bytes = 700_000
    longest = 80

    def make_engine(self) -> CopyEngine:
        return WholeEngine(self.layout, BLOCK_TOKENS, 1, FaultFs())


class WholeCheckpointMachine(WholeMachine):
    """The same with states at positions, each with bytes of its own."""

    layout = whole_layout(Grain.OPAQUE, FIXED_BYTES)


def test_candidates_of_the_tree_agree_with_a_scan():
    """Deepest first, and the count of shared blocks is the true one."""
    layout = make_layout()
    store, engine = make_store(8 << 20, layout), CopyEngine(layout)
    for shared in range(0, 64, 3):
        engine.read(np.concatenate([TREE[:shared], make_units(1000 + shared, 9)])).park(store)
    prompt = np.concatenate([TREE[:33], make_units(5, 20)])
    found = store.candidates(b"?" * 16, make_hashes(prompt, 4))
    assert found == []
    key_found = store.candidates(engine.request().key_digest, make_hashes(prompt, 4))
    depths = [shared for _, shared in key_found]
    assert depths == sorted(depths, reverse=True)
    assert len(key_found) == 22
    for parked, shared in key_found:
        common = np.argmin(np.append(parked.units[:33] == prompt[: len(parked.units[:33])], [False]))
        assert shared == common // 4


limits = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestStore = StoreMachine.TestCase
TestStore.settings = limits
TestCheckpoints = CheckpointMachine.TestCase
TestCheckpoints.settings = limits
TestLocked = LockedMachine.TestCase
TestLocked.settings = limits
TestWhole = WholeMachine.TestCase
TestWhole.settings = limits
TestWholeWithCheckpoints = WholeCheckpointMachine.TestCase
TestWholeWithCheckpoints.settings = limits
