"""The canary: what it notices, and who may say that it has passed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from parkd_tier.canary import PARAMS_KEY, Reply, Verdict, alike, trial_lengths, try_all
from parkd_tier.opening import Proof
from parkd_tier.vllm.gate import MOST_RECORDED, WAIT_S, Gate, Role

CHUNK_TOKENS = 16
TOKEN = "the token"


class FakeEngine:
    """Answers a sum over its prompt, restored up to the last whole chunk. `fault` is what is wrong with it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.kept: dict[str, list[int]] = {}
        self.salts: list[str] = []
        self.lengths: list[int] = []

    def ask(self, prompt: list[int], salt: str, params: Mapping[str, Any]) -> Reply:
        said = params[PARAMS_KEY]
        assert said["token"] == TOKEN
        self.salts.append(salt)
        self.lengths.append(len(prompt))
        state = list(prompt)
        if "record" in said:
            self.kept[said["record"]] = list(prompt)
        elif self.fault != "restores nothing":
            whole = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            state = [*self.kept[said["replay"]][:whole], *prompt[whole:]]
            if self.fault == "wrong at whole chunks" and len(prompt) % CHUNK_TOKENS == 0:
                state[0] += 1
        shift = 0.5 if self.fault == "other odds" and "replay" in said else 0.01 * ("replay" in said)
        return Reply((str(sum(state)),), (-1.0 - shift,))


def verdict_of(fault: str = "") -> Verdict:
    return try_all(FakeEngine(fault).ask, CHUNK_TOKENS, TOKEN, random.Random(1))


def test_an_engine_that_restores_rightly_passes() -> None:
    engine = FakeEngine()
    assert try_all(engine.ask, CHUNK_TOKENS, TOKEN, random.Random(1)).passed
    assert len(set(engine.salts)) == len(engine.salts), "no request knows another's state by itself"
    assert set(engine.lengths) == set(trial_lengths(CHUNK_TOKENS)) == {63, 64, 65, 73}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("restores nothing", "none was used"),
        ("wrong at whole chunks", "64 tokens"),
        ("other odds", "another than the cold one"),
    ],
)
def test_an_engine_that_does_not_fails(fault: str, told: str) -> None:
    verdict = verdict_of(fault)
    assert not verdict.passed
    assert told in verdict.told


def test_replies_are_alike_in_tokens_and_odds() -> None:
    one = Reply(("1", "2"), (-0.1, -0.2))
    assert alike(one, Reply(("1", "2"), (-0.15, -0.2)))
    assert not alike(one, Reply(("1", "3"), (-0.1, -0.2)))
    assert not alike(one, Reply(("1", "2"), (-0.1, -0.4)))


def gate(proof: Proof | None = None, *, is_needed: bool = True) -> tuple[Gate, list[Verdict], list[float]]:
    kept: list[Verdict] = []
    now = [0.0]
    return Gate(TOKEN, proof, kept.append, is_needed=is_needed, monotonic=lambda: now[0]), kept, now


def said(**params: object) -> dict[str, object]:
    return {PARAMS_KEY: {"token": TOKEN, **params}}


def test_nothing_is_restored_before_a_canary_has_passed() -> None:
    assert not gate()[0].is_open
    assert not gate(Proof(False, "it answered otherwise"))[0].is_open
    assert gate(Proof(True, "fine"))[0].is_open
    assert gate(is_needed=False)[0].is_open


def test_a_passed_canary_opens_and_a_failed_one_closes() -> None:
    opened, kept, _ = gate()
    opened.note_replayed(4)
    opened.role(said(verdict={"passed": True, "told": "fine"}))
    assert opened.is_open
    opened.role(said(verdict={"passed": False, "told": "wrong"}))
    assert not opened.is_open
    assert kept == [Verdict(True, "fine"), Verdict(False, "wrong")]


def test_a_canary_that_restored_nothing_has_not_passed() -> None:
    opened, kept, _ = gate()
    opened.role(said(verdict={"passed": True, "told": "fine"}))
    assert not opened.is_open
    assert not kept[0].passed


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {PARAMS_KEY: 5},
        {PARAMS_KEY: {"verdict": {"passed": True}}},
        {PARAMS_KEY: {"token": "a guess", "verdict": {"passed": True}, "replay": "a"}},
        {PARAMS_KEY: {"token": None, "replay": "a"}},
    ],
)
def test_whoever_has_not_the_token_is_no_canary(params: dict[str, object] | None) -> None:
    opened, kept, _ = gate()
    opened.note_replayed(4)
    assert opened.role(params) is None
    assert not opened.is_open
    assert kept == []


def test_a_replay_finds_what_was_recorded_place_by_place() -> None:
    opened, _, now = gate()
    record, replay = opened.role(said(record="a")), opened.role(said(replay="a"))
    assert record is not None
    assert replay is not None
    assert not opened.knows(replay)
    opened.record(record, {(16, 0): b"key 1", (32, 0): b"key 2"})
    assert opened.knows(replay)
    assert opened.stand_in(replay, (32, 0)) == b"key 2"
    assert opened.stand_in(replay, (32, 1)) is None
    assert opened.waits(replay)
    now[0] += WAIT_S
    assert not opened.waits(replay)


def test_what_is_recorded_is_bounded() -> None:
    opened, _, _ = gate()
    for number in range(MOST_RECORDED + 1):
        opened.record(Role(record=str(number)), {})
    assert not opened.knows(Role(replay="0"))
    assert opened.knows(Role(replay="1"))
