"""What an engine keeps of its checkpoints, against a list that is searched anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parkd.state import KeptStates, chunk_end


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["keep", "use", "cut"]), st.integers(1, 6)), max_size=30))
def test_the_earliest_stays_and_of_the_rest_the_least_recently_used_goes(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    kept: KeptStates[str] = KeptStates(limit)
    model: list[int] = []
    """Positions, the least recently used first."""
    for step, position in steps:
        if step == "keep":
            given_up: list[str | None] = []

            def copy(dropped: str | None, at: int = position, seen: list[str | None] = given_up) -> str:
                seen.append(dropped)
                return f"state {at}"

            kept.keep(position, copy)
            if position in model:
                model.remove(position)
                assert given_up == []
            else:
                victim = None
                if len(model) == limit:
                    victim = next((place for place in model if place != min(model)), model[0])
                    model.remove(victim)
                assert given_up == [victim and f"state {victim}"]
            model.append(position)
        elif step == "use" and position in model:
            assert kept.use(position) == f"state {position}"
            model.remove(position)
            model.append(position)
        elif step == "cut":
            kept.forget_beyond(position)
            model = [place for place in model if place <= position]
            assert kept.last(6) == max(model, default=0)
        assert kept.positions == tuple(sorted(model))


def test_without_memory_for_a_copy_nothing_is_kept_and_its_room_stays_free() -> None:
    kept: KeptStates[str] = KeptStates(2)
    for position in (1, 2):
        kept.keep(position, lambda _: "state")
    kept.keep(3, lambda _: None)
    assert kept.positions == (1,)


def test_nothing_is_kept_at_0_or_without_room() -> None:
    for kept, position in ((KeptStates[str](0), 5), (KeptStates[str](3), 0)):
        kept.keep(position, lambda _: "state")
        assert kept.positions == ()


def test_chunks_end_at_multiples_of_the_batch_and_at_checkpoints() -> None:
    ends, at = [], 5
    while at < 50:
        at = chunk_end(at, 50, 16, (16, 20, 33))
        ends.append(at)
    assert ends == [16, 20, 32, 33, 48, 50]
