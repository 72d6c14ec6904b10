"""Random histories of the store against a dictionary of what was put in."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parkd.store.records import Refused
from tests.unit.store.store_kit import (
    CopyEngine,
    Hooks,
    assert_counts,
    assert_same_rows,
    assert_within_budget,
    leased_rows,
    make_hashes,
    make_layout,
    make_store,
    make_units,
)

BUDGET_BYTES = 150_000
SLOTS = 5
TREE = make_units(1, 64)
"""Prompts branch off this one, so that prefixes are shared."""


class StoreMachine(RuleBasedStateMachine):
    """A rewindable model: any token is a resumable position."""

    fixed_bytes = (0, 0)
    has_hooks = False

    @initialize()
    def start(self):
        self.layout = make_layout(fixed_bytes=self.fixed_bytes)
        self.store = make_store(BUDGET_BYTES, self.layout, slots=SLOTS, slab_hooks=Hooks() if self.has_hooks else None)
        self.engine = CopyEngine(self.layout, context_tokens=512)
        self.model: dict[str, tuple[np.ndarray, list[np.ndarray], dict[int, list[np.ndarray]]]] = {}
        self.open = []
        self.leases = []
        self.pinned: set[str] = set()
        self.branches = 100

    # What is live

    @rule(shared=st.integers(0, 64), more=st.integers(1, 60))
    def read_cold(self, shared, more):
        self.branches += 1
        self.engine.read(TREE[:shared], checkpoint=shared > 0)
        self.engine.extend(make_units(self.branches, more), checkpoint=True)

    @rule(more=st.integers(1, 40))
    def extend(self, more):
        if self.engine.position < 400:
            self.branches += 1
            self.engine.extend(make_units(self.branches, more), checkpoint=True)

    @rule(data=st.data())
    def restore(self, data):
        parked = self.pick(data)
        if parked is None:
            return
        stop = self.pick_stop(data, parked)
        with self.store.lease(parked.id, stop) as lease:
            self.engine.restore(lease)
        units, rows, fixed = self.model[parked.id]
        assert np.array_equal(self.engine.units, units[:stop])
        assert_same_rows(self.engine.rows(), [stage[:stop] for stage in rows])
        if fixed:
            assert_same_rows(self.engine.fixed[stop], fixed[stop])

    # Captures

    @precondition(lambda self: self.engine.position > 0)
    @rule(outcome=st.sampled_from(["commit", "commit", "abort", "leave"]))
    def park(self, outcome):
        before = {parked.id for parked, _ in self.visible()}
        capture = self.store.begin_capture(self.engine.request())
        if isinstance(capture, Refused):
            assert {parked.id for parked, _ in self.visible()} == before
            return
        sums = self.engine.capture(capture.transfer)
        flight = self.store._captures[capture.serial]
        # Checkpoints of before a restore are not live any more: the ones that the store adds came from the model.
        fixed = self.inherited(flight.checkpoints)
        content = self.engine.units[: capture.position].copy(), self.engine.rows(capture.position), fixed
        if outcome == "commit":
            self.commit(capture, sums, content)
            self.engine.lineage = self.store.get(capture_id(self.model)).blocks
        elif outcome == "abort":
            self.store.abort(capture)
        else:
            self.open.append((capture, sums, content))

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), commits=st.booleans())
    def finish(self, index, commits):
        capture, sums, content = self.open.pop(index % len(self.open))
        if commits:
            self.commit(capture, sums, content)
        else:
            self.store.abort(capture)

    def commit(self, capture, sums, content):
        parked = self.store.commit(capture, sums)
        self.model[parked.id] = content
        self.pinned = {i for i in self.pinned if self.store.get(i) is not None}
        if self.store._shelf.entries[parked.id].is_pinned:
            self.pinned.add(parked.id)

    # The rest

    @rule(data=st.data())
    def hold(self, data):
        parked = self.pick(data)
        if parked is not None and len(self.leases) < 3:
            stop = self.pick_stop(data, parked)
            self.leases.append((parked.id, self.store.lease(parked.id, stop)))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9))
    def let_go(self, index):
        self.leases.pop(index % len(self.leases))[1].release()

    @rule(data=st.data(), action=st.sampled_from(["drop", "touch", "pin", "unpin"]))
    def manage(self, data, action):
        parked = self.pick(data)
        if parked is None or (action == "pin" and len(self.pinned) > 1):
            return
        if action == "drop":
            assert self.store.drop(parked.id, "test")
            self.pinned.discard(parked.id)
        else:
            getattr(self.store, action)(parked.id)
            {"pin": self.pinned.add, "unpin": self.pinned.discard, "touch": lambda _: None}[action](parked.id)

    # What must hold

    @invariant()
    def holds(self):
        assert_within_budget(self.store)
        assert_counts(self.store)
        assert all(self.store.get(conversation_id) is not None for conversation_id in self.pinned)
        for parked, _ in self.visible():
            units, _, fixed = self.model[parked.id]
            assert np.array_equal(parked.units, units)
            places = [checkpoint.position for checkpoint in parked.checkpoints]
            assert places == sorted(fixed)
            assert sum(block is not None for block in map(self.store._shelf.blocks.get, parked.blocks)) == -(
                -parked.position // 4
            )
        for conversation_id, lease in self.leases:
            for stage, part in enumerate(lease.transfer.stages):
                for run in part.rows:
                    stop = min(run.stop, lease.stop)
                    expected = self.model[conversation_id][1][stage][run.start : stop].reshape(-1)
                    assert np.array_equal(run.buffer[: expected.size], expected)
                for fixed in part.fixed:
                    assert np.array_equal(fixed.buffer, self.model[conversation_id][2][lease.stop][stage])

    def teardown(self):
        if not hasattr(self, "store"):
            return
        for parked, _ in self.visible():
            rows = self.model[parked.id][1]
            stop = parked.checkpoints[-1].position if parked.checkpoints else parked.position
            assert_same_rows(leased_rows(self.store, parked, stop), [stage[:stop] for stage in rows])
        for capture, _, _ in self.open:
            self.store.abort(capture)
        for _, lease in self.leases:
            lease.release()
        self.store.close()
        assert self.store.stats().bytes_allocated == 0
        assert self.store.stats().blocks == 0

    def visible(self):
        return [(entry.parked, None) for entry in self.store._shelf.entries.values()]

    def pick(self, data):
        ids = sorted(parked.id for parked, _ in self.visible())
        return self.store.get(data.draw(st.sampled_from(ids))) if ids else None

    def pick_stop(self, data, parked):
        if self.layout.fixed_bytes:
            return data.draw(st.sampled_from([checkpoint.position for checkpoint in parked.checkpoints]))
        return data.draw(st.integers(1, parked.position))

    def inherited(self, checkpoints):
        """The fixed state at each, from the live engine or from the conversation that had that checkpoint first."""
        parts = {}
        for checkpoint in checkpoints:
            memory = self.store._shelf.checkpoints.parts(checkpoint.id, writeable=False)
            parts[checkpoint.position] = [part.buffer.copy() for part in memory]
            if checkpoint.position in self.engine.fixed:
                assert_same_rows(parts[checkpoint.position], self.engine.fixed[checkpoint.position])
        return parts


class CheckpointMachine(StoreMachine):
    """A model with fixed state: only checkpoints are resumable positions."""

    fixed_bytes = (700, 1000)


class LockedMachine(CheckpointMachine):
    """The same in page-locked memory, whose free buffers are kept."""

    has_hooks = True


def capture_id(model):
    return next(reversed(model))


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
