"""Traces, generators, the driver over the real store, the bound, the recorder and the command."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest

from parkd.errors import ConfigError
from parkd.lane import start
from parkd.lane.start import DISK_READ_S
from parkd.replay import command
from parkd.replay.bound import clairvoyant_bound_s
from parkd.replay.driver import Replayer, replay
from parkd.replay.generators import GENERATORS, generate
from parkd.replay.measured import measured_reading
from parkd.replay.recorder import Recorder
from parkd.replay.result import DEFAULT_COSTS, ReplayConfig
from parkd.replay.schedules import schedule_table, tasks_of
from parkd.replay.trace import (
    HASH_BYTES,
    Trace,
    TraceError,
    TraceHeader,
    TurnRecord,
    read_trace,
    turn_line,
    write_trace,
)
from parkd.state import Costs
from parkd.store.policy import POLICIES, LruPolicy, ValuePolicy

SMALL = {
    "parent-worker": "rounds=3&workers=2&parent_tokens=3000&worker_tokens=1500&shared=1000",
    "round-robin": "agents=5&turns=5&tokens=2000&shared=600",
    "fan-out": "workers=4&shared=3000&tail=600&turns=2&waves=2",
    "chat-titles": "chats=4&turns=4",
    "compaction": "agents=2&turns=8&start=2000&limit=8000&shared=800",
    "one-shots": "chats=2&turns=5&tokens=3000&flood=12&shot=2000",
}
HEADER = TraceHeader(256, (1024,), (0,))


def small(name: str, seed: int = 0) -> Trace:
    made = generate(f"{name}?{SMALL[name]}&seed={seed}")
    return Trace(made.name, HEADER, made.turns)


def block(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def turn(at_s: float, blocks, *, key: str = "") -> TurnRecord:
    chain = tuple(block(number) for number in blocks)
    return TurnRecord(at_s, key, len(chain) * 256 + 10, len(chain) * 256 + 10, chain)


@pytest.mark.parametrize("name", list(GENERATORS))
def test_a_generated_trace_is_the_same_for_a_seed_and_survives_its_file(name, tmp_path):
    made = small(name)
    assert made.turns == small(name).turns
    assert made.turns != small(name, seed=1).turns
    assert [each.at_s for each in made.turns] == sorted(each.at_s for each in made.turns)
    assert all(len(each.chain) == each.live_tokens // 256 for each in made.turns)
    write_trace(tmp_path / "t.jsonl", made)
    back = read_trace(tmp_path / "t.jsonl")
    assert back.header == made.header
    assert [each.chain for each in back.turns] == [each.chain for each in made.turns]
    assert len(read_trace(tmp_path / "t.jsonl", limit=3).turns) == 3


def test_the_public_format_is_read(tmp_path):
    path = tmp_path / "public.jsonl"
    path.write_text('{"timestamp": 2500, "input_length": 1100, "output_length": 9, "hash_ids": [0, 7, 9]}\n')
    read = read_trace(path)
    assert read.header.block_tokens == 512
    assert read.turns == (TurnRecord(2.5, "", 1100, 1024, (block(0), block(7))),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("nonsense\n", "line 1: not JSON"),
        ("[]\n", "line 1: not a JSON object"),
        ('{"a": 1}\n', "neither a parkd trace"),
        ('{"parkd_trace": 1, "block_tokens": 256, "row_bytes": [8], "fixed_bytes": []}\n', "sizes"),
        (
            '{"parkd_trace": 1, "block_tokens": 256, "row_bytes": [8], "fixed_bytes": [0]}\n'
            '{"at": 0, "key": "", "prompt": 300, "live": 600, "chain": "00"}\n',
            "line 2",
        ),
        ('{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1]}\n', "do not cover"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


@pytest.mark.parametrize("text", ["nothing", "round-robin?wings=2", "round-robin?agents=0", "round-robin?agents=x"])
def test_generators_refuse_what_they_do_not_know(text):
    with pytest.raises(TraceError):
        generate(text)


def test_a_b_a_finds_a_again_and_counts_what_it_saved():
    """Report 5's shape: A, B, A."""
    turns = [turn(0, range(10)), turn(10, range(100, 110)), turn(20, [*range(10), 50])]
    result = replay(HEADER, turns, ReplayConfig(1 << 26, ValuePolicy()))
    assert (result.requests, result.parked_hit_tokens, result.live_hit_tokens) == (3, 2560, 0)
    saved = DEFAULT_COSTS.reading_s(0, 2560) - 2560 * 1024 / DEFAULT_COSTS.bytes_per_s
    assert result.saved_s == pytest.approx(saved)
    assert result.written_bytes == (10 + 10 + 1) * 256 * 1024
    assert (result.evictions, dict(result.refusals)) == (0, {})


def test_live_state_needs_no_store_and_keys_share_nothing():
    turns = [turn(0, range(4)), turn(1, range(6)), turn(2, range(6), key="other")]
    result = replay(HEADER, turns, ReplayConfig(1 << 26, LruPolicy()))
    assert (result.live_hit_tokens, result.parked_hit_tokens) == (1024, 0)
    assert result.saved_s == result.live_saved_s > 0


def test_a_restore_slower_than_reading_is_not_taken():
    """Report 54."""
    turns = [turn(0, range(10)), turn(10, range(100, 110)), turn(20, range(11))]
    slow = Costs(read_s=1e-6, bytes_per_s=1e3)
    result = replay(HEADER, turns, ReplayConfig(1 << 26, LruPolicy(), slow))
    assert (result.hit_tokens, result.saved_s) == (0, 0.0)


def test_fixed_state_resumes_at_checkpoints_only():
    header = TraceHeader(256, (1024,), (4096,))
    turns = [turn(0, range(10)), turn(10, range(100, 110)), turn(20, [*range(6), 70, 71]), turn(30, [*range(10), 72])]
    result = replay(header, turns, ReplayConfig(1 << 26, LruPolicy()))
    assert result.parked_hit_tokens == 2560  # the fork inside found no checkpoint, the continuation did


def test_a_fork_at_a_parked_checkpoint_is_taken_where_its_rows_are_live():
    header = TraceHeader(256, (1024,), (4096,))
    turns = [turn(0, range(6)), turn(10, range(10)), turn(20, [*range(6), 70, 71])]
    result = replay(header, turns, ReplayConfig(1 << 26, LruPolicy()))
    assert (result.live_hit_tokens, result.parked_hit_tokens) == (1536, 1536)


def test_of_rows_that_are_all_live_a_replay_restores_the_last_block_with_the_checkpoint():
    """As a server does: the lane's own decision says so."""
    header = TraceHeader(256, (1024,), (4096,))
    turns = [turn(0, range(6)), turn(10, range(10)), turn(20, [*range(6), 70, 71])]
    result = replay(header, turns, ReplayConfig(1 << 26, LruPolicy()))
    read_s = DEFAULT_COSTS.reading_s(0, 1536)
    moved_bytes = 256 * 1024 + 4096
    assert result.live_saved_s == pytest.approx(read_s)
    assert result.parked_saved_s == pytest.approx(read_s - moved_bytes / DEFAULT_COSTS.bytes_per_s, rel=1e-9)


def test_a_replayed_turn_starts_by_the_lanes_own_decision(monkeypatch):
    """What the lane would not start from, a replay does not either."""
    turns = [turn(0, range(10)), turn(10, range(100, 110)), turn(20, range(11)), turn(30, range(12))]
    monkeypatch.setattr(start, "cheapest", lambda starts, *_, **__: min(starts, key=lambda each: each.position))
    result = replay(HEADER, turns, ReplayConfig(1 << 26, LruPolicy()))
    assert (result.hit_tokens, result.saved_s, result.live_saved_s) == (0, 0.0, 0.0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", list(GENERATORS))
def test_budgets_hold_and_no_policy_passes_the_bound(name, policy):
    made = small(name)
    whole = replay(made.header, made.turns, ReplayConfig(1 << 32, policy)).peak_bytes
    for part in (6, 3):
        replayer = Replayer(made.header, ReplayConfig(whole // part, policy))
        for each in made.turns:
            replayer.turn(each)
            stats = replayer.store.stats()
            assert stats.bytes_in_use <= stats.bytes_allocated <= whole // part
        result = replayer.finish()
        most_s = clairvoyant_bound_s(made.header, made.turns, DEFAULT_COSTS, whole // part)
        assert result.live_saved_s <= result.saved_s <= most_s * (1 + 1e-9)
        assert most_s <= result.cold_s


def test_the_bound_is_at_least_the_best_of_all_choices():
    """Small enough to try every set of blocks that could be held: intervals of single blocks."""
    turns = [turn(index, [[1], [2], [3]][place]) for index, place in enumerate([0, 1, 2, 0, 1, 2, 0, 2, 1])]
    size_bytes, costs = 256 * 1024, DEFAULT_COSTS
    gain = costs.reading_s(0, 256) - size_bytes / costs.bytes_per_s
    asked: dict[bytes, int] = {}
    gaps = []
    for index, each in enumerate(turns):
        if each.chain[0] in asked:
            gaps.append((asked[each.chain[0]], index))
        asked[each.chain[0]] = index
    for budget in (1, 2, 3):
        best = 0.0
        for chosen in itertools.product((0, 1), repeat=len(gaps)):
            kept = [gap for gap, taken in zip(gaps, chosen, strict=True) if taken]
            if all(sum(first <= at < last for first, last in kept) <= budget for at in range(len(turns))):
                best = max(best, len(kept) * gain)
        bound = clairvoyant_bound_s(HEADER, turns, costs, budget * size_bytes)
        assert best <= bound * (1 + 1e-9)
        assert bound <= len(gaps) * gain * (1 + 1e-9)
    assert clairvoyant_bound_s(HEADER, turns, costs, size_bytes) < len(gaps) * gain * 0.9


def test_value_saves_at_least_what_lru_saves_where_agents_go_round():
    made = generate("round-robin?agents=6&turns=12&tokens=4000&step=300&shared=600")
    made = Trace(made.name, HEADER, made.turns)
    budget = 16 << 20  # three of the six, once they are grown
    lru, value = (replay(HEADER, made.turns, ReplayConfig(budget, policy)) for policy in (LruPolicy(), ValuePolicy()))
    assert value.saved_s > 2 * lru.saved_s
    assert value.written_bytes < lru.written_bytes / 4  # report 31: no churn


def test_agents_in_a_budget_that_collapsed_do_not_churn():
    """Report 31: where a sixth of what goes round fits, a part of it stays instead of all of it passing through."""
    made = generate("round-robin?agents=6&turns=20&tokens=4000&step=100&shared=600")
    made = Trace(made.name, HEADER, made.turns)
    whole = replay(made.header, made.turns, ReplayConfig(1 << 32, LruPolicy())).peak_bytes
    lru, value = (
        replay(made.header, made.turns, ReplayConfig(whole // 6, policy)) for policy in (LruPolicy(), ValuePolicy())
    )
    assert lru.evictions > 40, "the case is one of churn"
    assert value.evictions < 12
    assert value.written_bytes < lru.written_bytes / 10
    assert value.parked_saved_s > 2 * lru.parked_saved_s


def test_workers_over_one_prefix_hold_it_once():
    made = generate("fan-out?workers=16&shared=20000&tail=2500&turns=1&waves=1")
    replayer = Replayer(made.header, ReplayConfig(1 << 38, ValuePolicy()))
    for each in made.turns:
        replayer.turn(each)
    once = 20_000 + sum(each.live_tokens - 20_000 for each in made.turns)
    assert replayer.store.stats().bytes_in_use <= 1.3 * once * sum(made.header.row_bytes)


def test_a_recording_holds_hashes_and_sizes_and_replays(tmp_path):
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, HEADER, 100.0)
    assert path.stat().st_mode & 0o777 == 0o600, "found by use 5: others could read it"
    units = np.arange(1000, dtype=np.uint64)
    for at_s, count in ((100.5, 600), (102.0, 1000)):
        recorder.note(
            at_s=at_s, key_digest=b"k" * 16, prompt_tokens=count - 50, units=units[:count], end="stop", extra={"a": 1}
        )
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(lines[1]) == {"at", "key", "prompt", "live", "chain", "end", "a"}
    read = read_trace(path)
    assert [(each.at_s, each.prompt_tokens, each.live_tokens) for each in read.turns] == [
        (0.5, 550, 600),
        (2.0, 950, 1000),
    ]
    first, second = (each.chain for each in read.turns)
    assert (first, len(second)) == (second[:2], 3)
    other = Recorder(tmp_path / "u.jsonl", HEADER, 100.0)
    other.note(at_s=101.0, key_digest=b"k" * 16, prompt_tokens=550, units=units[:600], end="stop", extra={})
    other.close()
    assert read_trace(tmp_path / "u.jsonl").turns[0].chain[0] != first[0]  # a secret of its own
    with pytest.raises(ConfigError, match="the file exists already"):
        Recorder(path, HEADER, 0.0)


def test_a_recorder_that_falls_behind_drops_and_counts(tmp_path, caplog):
    recorder = Recorder(tmp_path / "t.jsonl", HEADER, 0.0)
    recorder._waiting.put_nowait = _refuse
    recorder.note(at_s=1.0, key_digest=b"k" * 16, prompt_tokens=1, units=np.zeros(1, np.uint64), end="", extra={})
    recorder.close()
    assert recorder.dropped == 1
    assert "1 turns are missing" in caplog.text


@pytest.mark.parametrize("flag", ["--save", "--plot"])
def test_the_command_replaces_no_file_unless_told_to(tmp_path, flag):
    """It wrote over any file that was named."""
    file = tmp_path / "mine.svg"
    file.write_text("precious")
    words = ["generate:round-robin?agents=2&turns=2&tokens=2000", "--budgets", "64", "--policy", "lru", flag, str(file)]
    said: list[str] = []
    with pytest.raises(ConfigError, match="add --force"):
        command.run(words, said.append)
    assert file.read_text() == "precious"
    assert said == [], "found out before the work"
    assert command.run([*words, "--force"], said.append) == 0
    assert file.read_bytes() != b"precious"


def _refuse(_item) -> None:
    import queue

    raise queue.Full


def test_the_command_prints_a_curve_over_budgets(tmp_path):
    said: list[str] = []
    words = ["generate:round-robin?agents=3&turns=3&tokens=2000", "--budgets", "64,128", "--bytes-per-token", "512,512"]
    assert command.run([*words, "--bound", "--save", str(tmp_path / "t.jsonl")], said.append) == 0
    lines = said[1].splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        *([mib, policy.name] for mib in ("64", "128") for policy in POLICIES),
        ["64", "bound"],
        ["128", "bound"],
    ]
    assert command.run([str(tmp_path / "t.jsonl"), "--budgets", "64", "--policy", "lru"], said.append) == 0
    assert len(said[-1].splitlines()) == 2


def test_a_disk_brings_back_what_memory_cannot_hold():
    """Eight conversations that memory holds two of: the disk holds them all, at its own price."""
    turns = [turn(100 * at + who, range(100 * who, 100 * who + 10 + at)) for at in range(3) for who in range(8)]
    budget, disk = 8 << 20, 64 << 20
    alone = replay(HEADER, turns, ReplayConfig(budget, LruPolicy()))
    both = replay(HEADER, turns, ReplayConfig(budget, LruPolicy(), disk_bytes=disk))
    assert (alone.hit_tokens, alone.disk_written_bytes) == (0, 0)
    assert both.disk_hit_tokens == both.parked_hit_tokens == 8 * (10 + 11) * 256
    hit_bytes = 8 * (10 + 11) * 256 * 1024
    moved_s = hit_bytes / DEFAULT_COSTS.bytes_per_s + hit_bytes / DEFAULT_COSTS.disk_bytes_per_s + 16 * DISK_READ_S
    saved = 8 * sum(DEFAULT_COSTS.reading_s(0, blocks * 256) for blocks in (10, 11)) - moved_s
    assert both.saved_s == pytest.approx(saved)
    assert both.disk_read_bytes == hit_bytes
    assert 8 * 12 * 256 * 1024 < both.disk_written_bytes < 1.1 * 8 * 12 * 256 * 1024  # grown ones write what is new
    assert both.saved_s <= clairvoyant_bound_s(HEADER, turns, DEFAULT_COSTS, budget + disk) * (1 + 1e-9)
    slow = Costs(DEFAULT_COSTS.read_s, DEFAULT_COSTS.read_growth_s, disk_bytes_per_s=1e5)
    assert replay(HEADER, turns, ReplayConfig(budget, LruPolicy(), slow, disk_bytes=disk)).hit_tokens == 0
    worn = replay(HEADER, turns, ReplayConfig(budget, LruPolicy(), disk_bytes=disk, write_bytes_per_day=1))
    assert (worn.disk_written_bytes, worn.disk_hit_tokens) == (0, 0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_disk_budgets_hold_and_the_largest_hits_most(policy):
    made, hits = small("round-robin"), []
    for mib in (0, 4, 16, 256):
        replayer = Replayer(made.header, ReplayConfig(8 << 20, policy, disk_bytes=mib << 20))
        for each in made.turns:
            replayer.turn(each)
            if mib:
                assert replayer.store.disk_stats().bytes_in_use <= mib << 20
        hits.append(replayer.finish().hit_tokens)
    assert hits[-1] == max(hits) > hits[0]


def test_the_command_prints_a_curve_over_disk_budgets(tmp_path):
    said: list[str] = []
    words = ["generate:round-robin?agents=4&turns=4&tokens=2000", "--bytes-per-token", "1024", "--policy", "lru"]
    picture = tmp_path / "curve.svg"
    asked = [*words, "--budgets", "20", "--disk-budgets", "0,256", "--bound"]
    assert command.run([*asked, "--plot", str(picture)], said.append) == 0
    lines = [line.split() for line in said[1].splitlines()]
    assert said[1].splitlines()[0].endswith("disk MiB  from disk  to disk MiB")
    assert [line[-3] for line in lines[1:]] == ["0", "256", "0", "256"]
    assert lines[1][-2:] == ["0", "0"]
    assert int(lines[2][-2].replace(",", "")) > 0
    assert "disk budget, MiB" in picture.read_text()
    with pytest.raises(ConfigError, match="disk-budgets"):
        command.run([*words, "--disk-budgets", "4,-1"])


def test_a_model_gives_sizes_and_what_reading_costs(tmp_path):
    asked: list[tuple[str, ...]] = []

    def sizes_of(words):
        asked.append(tuple(words))
        return command.ModelSizes((512, 256), (0, 0), 2e9, 4e4)

    path, said = tmp_path / "t.jsonl", []
    words = ["generate:round-robin?agents=2&turns=2&tokens=2000", "--budgets", "64", "--policy", "lru"]
    flags = ["--model", "m", "--devices", "a,b", "--tflops", "10", "--save", str(path)]
    assert command.run([*words, *flags], said.append, sizes_of) == 0
    assert asked == [("--model", "m", "--devices", "a,b")]
    trace = read_trace(path)
    assert (trace.header.row_bytes, trace.header.fixed_bytes) == ((512, 256), (0, 0))
    again = replay(trace.header, trace.turns, ReplayConfig(64 << 20, LruPolicy(), Costs(2e-4, 4e-9)))
    assert f"{again.saved_s:,.1f}" in said[1].splitlines()[1].split()
    assert again.saved_s > 0.1


@pytest.mark.parametrize(
    "words", [["nowhere.jsonl"], ["generate:x"], ["generate:fan-out", "--budgets", "0"], ["generate:fan-out", "--what"]]
)
def test_the_command_refuses_with_a_message(words):
    with pytest.raises(ConfigError):
        command.run(words)


def test_a_line_is_one_line_without_text():
    line = turn_line(turn(1.23456, range(2)))
    assert "\n" not in line
    assert json.loads(line)["at"] == 1.235


def _recorded(path, turns):
    """A recording whose turns read `(prompt, reused, seconds)`."""
    lines = ['{"parkd_trace": 1, "block_tokens": 256, "row_bytes": [1024], "fixed_bytes": [0]}']
    for at, (prompt, reused, seconds) in enumerate(turns):
        chain = "".join(f"{at * 1000 + block:016x}" for block in range(prompt // 256))
        line = {"at": at, "key": "a", "prompt": prompt, "live": prompt, "chain": chain, "end": "stop"}
        lines.append(json.dumps(line | {"reused": reused, "prefill_s": seconds, "cache": "cold"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _line_s(prompt, reused, read_s, growth_s):
    """Seconds to read the tokens `[reused, prompt)`, one by one."""
    return sum(read_s + depth * growth_s for depth in range(reused, prompt))


SHAPES = [(1000, 0), (9000, 512), (3000, 2900), (20_000, 0), (600, 0), (30_000, 25_600)]


@pytest.mark.parametrize(("read_s", "growth_s"), [(0.02, 0.0), (0.004, 3e-7), (0.0, 1e-6)])
def test_found_by_use_23_reading_costs_what_it_cost_in_the_recording(tmp_path, read_s, growth_s):
    """Issue 22, item 23: 177 s of reading in a recording became 4."""
    turns = [(prompt, reused, _line_s(prompt, reused, read_s, growth_s)) for prompt, reused in SHAPES]
    trace, said = _recorded(tmp_path / "t.jsonl", turns), []
    assert command.run([str(trace), "--policy", "lru", "--budgets", "64"], said.append) == 0
    assert f"{read_s * 1e3:.3g} ms, measured: {sum(s for *_, s in turns):,.0f} s in 6 turns" in said[0]
    assert f"{growth_s * 1e9:.3g} ns more, measured" in said[0]
    assert "8 GB/s, assumed (--restore-gb-per-s)" in said[0]
    assert "1 GB/s, assumed (--disk-gb-per-s)" in said[0]
    saved = tmp_path / "saved.jsonl"
    assert command.run([str(trace), "--policy", "lru", "--budgets", "64", "--save", str(saved)], said.append) == 0
    assert read_trace(saved).turns == read_trace(trace).turns


def test_found_by_use_23_as_many_seconds_as_were_recorded_however_they_scatter(tmp_path):
    rng = random.Random(3)
    turns = [(prompt, reused, rng.uniform(0.1, 20.0)) for prompt, reused in SHAPES * 5]
    measured = measured_reading(read_trace(_recorded(tmp_path / "t.jsonl", turns)).turns)
    assert measured.read_s >= 0
    assert measured.growth_s >= 0
    modelled = sum(_line_s(prompt, reused, measured.read_s, measured.growth_s) for prompt, reused, _ in turns)
    assert modelled == pytest.approx(sum(seconds for *_, seconds in turns), rel=1e-6)


def test_found_by_use_23_what_is_given_and_what_is_assumed_is_said(tmp_path):
    said = []
    words = ["generate:round-robin?agents=2&turns=2&tokens=2000", "--budgets", "64", "--policy", "lru"]
    assert command.run([*words, "--read-ms", "2", "--disk-gb-per-s", "3"], said.append) == 0
    assert said[0].splitlines()[1:] == [
        "reading a token   2 ms, as given",
        "a token of depth  10 ns more, assumed (--read-ms, --read-growth-ns)",
        "memory            8 GB/s, assumed (--restore-gb-per-s)",
        "disk              3 GB/s, as given",
    ]


def test_found_by_use_23_turns_that_did_not_read_their_prompt_tell_nothing():
    turns = [
        TurnRecord(0.0, "a", 1000, 1000, (b"h" * 8,) * 3, "stop", 0, None),  # not told
        TurnRecord(1.0, "a", 1000, 400, (b"h" * 8,), "cancelled", 0, 5.0),  # cut while it read
        TurnRecord(2.0, "a", 1000, 1000, (b"h" * 8,) * 3, "stop", 1000, 0.0),  # all reused
    ]
    assert measured_reading(turns) is None


def test_schedules_are_compared_over_a_trace():
    """A title behind a long answer: at once under `fair`, last under `fifo`. Reading takes 0.1 s, a token 10 ms."""
    header = TraceHeader(4, (8,), (0,))
    long = TurnRecord(0.0, "a", 8, 2008, tuple(block(n) for n in range(502)))
    title = TurnRecord(1.0, "a", 8, 12, tuple(block(1000 + n) for n in range(3)))
    tasks = tasks_of(header, [long, title], [0.1, 0.1], Costs(bytes_per_s=8e9), 0.01)
    assert [(task.kind.value, round(task.read_s, 2), round(task.answer_s, 2)) for task in tasks] == [
        ("interactive", 0.11, 19.99),
        ("side", 0.11, 0.03),
    ]
    assert tasks[0].switch_s == pytest.approx(2 * 2008 * 8 / 8e9)
    lines = {tuple(line.split()[:2]): line.split() for line in schedule_table(tasks).splitlines()[1:]}
    assert float(lines["fair", "side"][3]) < 0.5
    assert float(lines["fifo", "side"][3]) == pytest.approx(20.1 - 1.0 + 0.11, abs=0.1)
    assert (lines["fair", "interactive"][-2], lines["fifo", "interactive"][-2]) == ("1", "0")


def test_the_command_compares_schedules_if_asked():
    said = []
    assert (
        command.run(["generate:round-robin?agents=2&turns=2", "--budgets", "64", "--policy", "lru"], said.append) == 0
    )
    assert not any("fifo" in line for line in said)
    words = ["generate:round-robin?agents=2&turns=2", "--budgets", "64", "--policy", "lru", "--schedules"]
    assert command.run(words, said.append) == 0
    assert "fifo" in said[-1]
    assert "interactive" in said[-1]
