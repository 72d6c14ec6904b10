"""Look-up by key and prefix hashes, also when hashes collide."""

from __future__ import annotations

import random

import numpy as np
import pytest

from parkd.store.index import PrefixIndex
from parkd.store.store import CANDIDATE_LIMIT
from tests.unit.store.store_kit import KEY, CopyEngine, make_hashes, make_layout, make_store, make_units


@pytest.mark.parametrize("width", [16, 1])
def test_find_agrees_with_a_scan(width):
    """With hashes one byte wide, unequal prompts collide; the answer is still exact about paths."""
    rng = random.Random(7)
    index, paths = PrefixIndex(), {}
    for step in range(400):
        if rng.random() < 0.7 or not paths:
            branch = rng.randint(0, 5)
            units = np.concatenate([make_units(1, 4 * branch), make_units(rng.randint(2, 9), rng.randint(0, 30))])
            paths[f"c{step}"] = make_hashes(units, 4, width=width)
            index.add(f"c{step}", KEY, paths[f"c{step}"])
        else:
            gone = rng.choice(sorted(paths))
            index.remove(gone, KEY, paths.pop(gone))
        prompt = make_hashes(
            np.concatenate([make_units(1, 4 * rng.randint(0, 5)), make_units(rng.randint(2, 9), 20)]), 4, width=width
        )
        expected = {
            name: sum(prompt[:at] == path[:at] for at in range(1, min(map(len, (prompt, path))) + 1))
            for name, path in paths.items()
        }
        found = index.find(KEY, prompt, 1000)
        assert dict(found) == expected
        assert [shared for _, shared in found] == sorted(expected.values(), reverse=True)
        ending = index.ending_within(KEY, prompt)
        assert sorted(ending) == sorted(name for name, path in paths.items() if prompt[: len(path)] == path)
        assert_no_run_is_cut_in_vain(index)
    for name, path in paths.items():
        index.remove(name, KEY, path)
    assert index._keys == {}


def test_a_path_that_leaves_a_run_does_not_go_on_below_it():
    """Hashes of any width may collide: one that stands below the run's end says nothing of a path that left it."""
    index, (a, b, c, d, e) = PrefixIndex(), (bytes([at]) * 16 for at in range(5))
    index.add("long", KEY, (a, b, c, d))
    index.add("other", KEY, (a, b, c, e))
    assert dict(index.find(KEY, (a, d, d, d), 9)) == {"long": 1, "other": 1}
    assert index.ending_within(KEY, (a, d, d, d)) == []


def assert_no_run_is_cut_in_vain(index: PrefixIndex) -> None:
    """So that what a look-up costs depends on how paths branch, not on what was there once."""
    runs = [child for root in index._keys.values() for child in root.children.values()]
    while runs:
        run = runs.pop()
        assert run.enders or len(run.children) > 1
        assert set(run.ids) == set(run.enders).union(*(child.ids for child in run.children.values()))
        runs += run.children.values()


def test_the_latest_comes_first_among_equals_and_the_answer_is_bounded():
    index = PrefixIndex()
    shared = make_hashes(make_units(1, 8), 4)
    for number in range(100):
        index.add(f"c{number}", KEY, shared)
    found = index.find(KEY, shared, 10)
    assert found == [(f"c{number}", 2) for number in range(99, 89, -1)]


def test_colliding_hashes_supersede_only_what_is_a_prefix():
    """Every hash is the same: only the comparison of units tells conversations apart."""
    layout = make_layout()
    store, engine = make_store(4 << 20, layout), CopyEngine(layout)

    def park():
        request = engine.request()
        object.__setattr__(request, "prefix_hashes", (b"\0" * 16,) * (engine.position // 4))
        capture = store.begin_capture(request)
        return engine.finish(store, capture)

    first = park() if engine.read(make_units(1, 20)) else None
    engine.read(make_units(2, 40))
    second = park()
    assert store.get(first.id) is not None
    engine.extend(make_units(3, 8))
    third = park()
    assert store.get(second.id) is None
    names = {parked.id for parked, _ in store.candidates(KEY, (b"\0" * 16,) * 3)}
    assert names == {first.id, third.id}


def test_short_conversations_are_candidates_too_but_last():
    layout = make_layout()
    store, engine = make_store(8 << 20, layout), CopyEngine(layout)
    long = engine.read(make_units(1, 12)).park(store)
    short = engine.read(make_units(2, 3)).park(store)
    found = store.candidates(KEY, make_hashes(make_units(1, 12), 4))
    assert [(parked.id, shared) for parked, shared in found] == [(long.id, 3), (short.id, 0)]
    for seed in range(3, 3 + CANDIDATE_LIMIT):
        engine.read(make_units(seed, 3)).park(store)
    found = store.candidates(KEY, make_hashes(make_units(1, 12), 4))
    assert len(found) == CANDIDATE_LIMIT
    assert found[0][0].id == long.id
