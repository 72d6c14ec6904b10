"""The order of turns: short ones soon, nobody starved, little lost to switching, keys alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.lane.schedule import HALF_LIFE_S, LEAST_SLICE_S, SWITCH_SHARE, Accounts, Fair, Fifo, Job, Work
from parkd.replay.schedules import Done, Simulation, Task, simulate, waits
from parkd.types import TurnClass

STEP_S = 0.1

seconds = st.floats(0.05, 40.0)
tasks = st.builds(
    Task,
    at_s=st.floats(0.0, 60.0),
    read_s=seconds,
    answer_s=st.floats(0.0, 60.0),
    switch_s=st.floats(0.0, 0.4),
    owner=st.sampled_from(["anna", "ben", "carl"]),
    kind=st.sampled_from(list(TurnClass)),
)


def run(*given_tasks: Task, schedule: Fair | Fifo | None = None) -> Simulation:
    return simulate(given_tasks, schedule or Fair(), step_s=STEP_S)


def of(simulation: Simulation, task: Task) -> Done:
    return next(done for done in simulation.turns if done.task is task)


def guessed(task: Task, ran_s: float) -> float:
    """As a server believes: an answer is as long as others, then as long again."""
    said_s = max(0.0, ran_s - task.read_s)
    return max(0.0, task.read_s - ran_s) + (10.0 - said_s if said_s < 10.0 else said_s)


@settings(max_examples=30, deadline=None)
@given(st.lists(tasks, min_size=1, max_size=14), st.booleans())
def test_nobody_starves_and_switching_costs_little(some: list[Task], is_known: bool) -> None:
    """Whatever comes: every wait is bounded by what the turn itself needs, and a few rounds of those there at once."""
    options = {} if is_known else {"believed": guessed}
    done = simulate(some, Fair(), step_s=STEP_S, **options)
    assert done.ran_s == pytest.approx(sum(task.needs_s for task in some))
    assert done.switched_s <= SWITCH_SHARE * (done.ran_s + done.switched_s) + 1e-6
    round_s = done.longest_round_s + len(some) * (STEP_S + max(task.switch_s for task in some))
    for each in done.turns:
        rounds = 8 if each.task.kind is TurnClass.BATCH else 2
        patience_s = max(rounds * round_s, 3 * each.task.read_s)
        assert each.longest_wait_s <= 2 * patience_s + 2 * round_s


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.builds(replace, tasks, kind=st.just(TurnClass.INTERACTIVE)), min_size=1, max_size=3),
    st.floats(5.0, 50.0),
    st.floats(0.0, 2.0),
    st.sampled_from(["dora", "anna"]),
)
def test_a_short_job_runs_within_one_slice(some: list[Task], at_s: float, switch_s: float, owner: str) -> None:
    """However long the others are, and however large their state; beside others of its own key too."""
    owners = {"owner": owner} if owner == "anna" else {}
    long = [replace(task, at_s=0.0, answer_s=200.0, switch_s=switch_s, **owners) for task in some]
    short = Task(at_s, 0.2, 0.3, 0.01, owner, TurnClass.SIDE)
    done = run(*long, short)
    slice_s = max(LEAST_SLICE_S, switch_s * 19)
    assert of(done, short).first_s <= slice_s + 2 * STEP_S + switch_s + short.read_s + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(tasks, min_size=1, max_size=10))
def test_fifo_is_the_order_of_arrival_to_the_end(some: list[Task]) -> None:
    done = simulate(some, Fifo(), step_s=STEP_S)
    now_s = 0.0
    for each in done.turns:
        now_s = max(now_s, each.task.at_s) + each.task.needs_s
        assert each.end_s + each.task.at_s == pytest.approx(now_s)
        assert each.pauses == 0


def test_two_keys_have_equal_shares_however_many_turns_one_sends() -> None:
    many = [Task(0.0, 0.5, 100.0, 0.01, "anna") for _ in range(5)]
    alone = Task(0.0, 0.5, 100.0, 0.01, "ben")
    done = run(*many, alone)
    # Half of the engine is ben's until he has ended.
    assert of(done, alone).end_s == pytest.approx(2 * alone.needs_s, rel=0.1)
    one_key = run(*many, replace(alone, owner="anna"))
    assert max(each.end_s for each in one_key.turns) == pytest.approx(603.0, rel=SWITCH_SHARE)
    assert min(each.end_s for each in one_key.turns) > 500


def test_many_short_turns_of_one_key_do_not_take_the_share_of_another() -> None:
    """They fill all of the time, and get half of it from where their key is ten seconds ahead."""
    flood = [Task(at / 5, 0.1, 0.1, 0.01, "anna") for at in (0, 0, 0, *range(600))]
    long = Task(1.0, 0.5, 20.0, 0.01, "ben")
    faded_s = 2 * long.needs_s * 10.0 * math.log(2) / HALF_LIFE_S  # of the ten seconds, and used again
    assert of(run(*flood, long), long).end_s <= 10.0 + 2 * long.needs_s + faded_s + 2.0
    short = Task(60.0, 0.1, 0.3, 0.01, "ben")
    assert of(run(*flood, short), short).first_s <= 1.0


FLOODS = [
    # reading, answer, switch, turns: prompts that are read to their end are late at once, and so are all behind them
    (8.0, 1.0, 0.01, 30),
    (3.0, 0.2, 0.01, 40),
    (1.0, 10.0, 0.01, 24),
    (0.2, 3.0, 0.2, 30),
]


@pytest.mark.parametrize(("read_s", "answer_s", "switch_s", "turns"), FLOODS)
@pytest.mark.parametrize("kind", [TurnClass.INTERACTIVE, TurnClass.SIDE])
def test_found_by_use_late_turns_of_one_key_do_not_take_the_share_of_another(
    read_s: float, answer_s: float, switch_s: float, turns: int, kind: TurnClass
) -> None:
    """Three times what the engine can do: all that one key has there is overdue, and half of the time is another's."""
    needs_s = read_s + answer_s
    flood = [Task(number * needs_s / 3, read_s, answer_s, switch_s, "anna", kind) for number in range(turns)]
    alone = Task(turns * needs_s / 3, 0.5, 60.0, 0.01, "ben")
    done = run(*flood, alone)
    assert max(each.longest_wait_s for each in done.turns if each.task is not alone) > 2 * alone.read_s
    step_s = max(LEAST_SLICE_S, switch_s * 19) + switch_s + STEP_S
    assert of(done, alone).end_s <= (2 * alone.needs_s + step_s) * (1 + SWITCH_SHARE)


def test_found_by_use_of_one_key_the_shortest_of_the_short_goes_before_a_prompt_that_is_read() -> None:
    read = Job(1, Work(first_s=20.0, left_s=60.0), has_begun=True)
    short, shorter = Job(2, Work(left_s=0.9)), Job(3, Work(left_s=0.4))
    assert Fair().next([read, short], 0.0).number == 2
    assert Fair().next([read, short, shorter], 0.0).number == 3
    assert Fair().next([read, Job(4, Work(left_s=30.0))], 0.0).number == 1


def test_a_late_turn_of_a_key_that_had_more_runs_once_all_of_its_key_has_waited() -> None:
    had, others = (
        Job(1, Work(left_s=90.0), waited_s=9.0, owner_used_s=80.0, owner_waited_s=0.2),
        [Job(number, Work(left_s=90.0)) for number in (2, 3)],
    )
    assert Fair().next([had, *others], 0.0).number == 2
    assert Fair().next([replace(had, owner_waited_s=9.0), *others], 0.0).number == 1
    assert Fair().next([replace(had, owner_used_s=0.0), *others], 0.0).number == 1


def test_batch_has_what_others_leave_and_is_not_starved() -> None:
    batch = Task(0.0, 1.0, 20.0, 0.01, kind=TurnClass.BATCH)
    chats = [Task(at, 1.0, 9.5, 0.01) for at in range(0, 200, 10)]
    done = run(batch, *chats)
    busy = [each for each in done.turns if each.task is not batch]
    assert of(done, batch).end_s > 100
    assert of(done, batch).longest_wait_s <= 8 * done.longest_round_s + 1.0
    assert sum(each.first_s for each in busy) / len(busy) < 15


def test_prompts_are_read_one_after_another_and_answers_in_turns() -> None:
    """Read by turns, all prompts would be late; so would all answers but one, if each went to its end."""
    both = [Task(0.0, 20.0, 60.0, 0.01), Task(0.0, 20.0, 60.0, 0.01)]
    first, second = simulate(both, Fair(), step_s=STEP_S, believed=guessed).turns
    assert first.first_s < 25
    assert second.first_s < 60
    assert abs(first.end_s - second.end_s) < 25


def test_the_slice_grows_with_what_switching_costs() -> None:
    assert Job(1).slice_s == LEAST_SLICE_S
    assert Job(1, Work(switch_s=1.0)).slice_s == pytest.approx(19.0)


def test_one_that_cannot_be_paused_and_one_that_is_alone_run_on() -> None:
    running, other = Job(1, Work(left_s=100.0), ran_s=50.0), Job(2, Work(left_s=0.1))
    assert Fair().until_s(running, [], 7.0) is None
    assert Fair().until_s(replace(running, work=Work(left_s=100.0, can_pause=False)), [other], 7.0) is None
    assert Fair().until_s(running, [other], 7.0) == 7.0
    assert Fair().until_s(replace(running, ran_s=0.1), [other], 7.0) == pytest.approx(7.15)


def test_the_running_job_is_asked_again_if_it_goes_on() -> None:
    running, other = Job(1, Work(left_s=0.5), ran_s=50.0), Job(2, Work(left_s=100.0))
    assert Fair().until_s(running, [other], 7.0) == pytest.approx(7.25)


def test_what_a_key_used_fades_and_is_forgotten_when_nobody_is_there() -> None:
    accounts = Accounts()
    accounts.arrive(1, "anna", 0.0)
    accounts.run(1, 0.0)
    assert accounts.count(1, 10.0) == 10.0
    accounts.rest(1, 10.0)
    assert accounts.count(1, 20.0) == 0.0
    job = accounts.job(1, Work(), 70.0)
    assert (job.used_s, job.owner_used_s, job.waited_s, job.ran_s) == (10.0, pytest.approx(5.0), 60.0, 0.0)
    accounts.arrive(2, "ben", 70.0)
    assert accounts.job(2, Work(), 70.0).used_s == 10.0
    accounts.leave(1)
    accounts.leave(2)
    accounts.arrive(3, "anna", 71.0)
    assert accounts.job(3, Work(), 71.0).owner_used_s == 0.0


def test_waits_by_class() -> None:
    side = [Done(Task(0, 1, 1, kind=TurnClass.SIDE), first_s=float(at)) for at in range(1, 21)]
    seen = waits([*side, Done(Task(0, 1, 1), first_s=7.0)])
    assert (seen[TurnClass.SIDE].mean_s, seen[TurnClass.SIDE].p95_s, seen[TurnClass.SIDE].turns) == (10.5, 19.0, 20)
    assert seen[TurnClass.INTERACTIVE].p95_s == 7.0
    assert TurnClass.BATCH not in seen
