"""The memory of recent requests, and what is told of two prompts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from parkd.identity.matcher import common_prefix
from parkd.lane.reports import explain
from parkd.lane.reports.explain import SEGMENT_BYTES, Explained, PromptParts, RequestMemory, diagnose
from parkd.lane.reports.told import told_report
from parkd.types import (
    CacheOutcome,
    CacheReport,
    ConversationKey,
    Diagnosis,
    DiagnosisKind,
    PromptIdentity,
    SegmentSpan,
    Told,
    TurnRequest,
)

KEY = ConversationKey("", b"f" * 16)


def explained(request_id: str, ids: list[int], owner: str = "", tail: int = 0, **request: object) -> Explained:
    token_ids = np.array(ids, dtype=np.int64)
    spans = [SegmentSpan(0, len(ids) - tail, "message 1 (user)")]
    if tail:
        spans.append(SegmentSpan(len(ids) - tail, len(ids), "generation prompt"))
    prompt = PromptIdentity(KEY, token_ids, token_ids.view(np.uint64), (), tuple(spans))
    parts = PromptParts.of(TurnRequest(**request))  # type: ignore[arg-type]
    return Explained(request_id, owner, prompt, parts, 0.0)


def test_a_request_is_found_by_its_own_id_and_by_its_answers() -> None:
    memory = RequestMemory()
    memory.add(explained("req_abc", [1]))
    memory.add(explained("mine", [1]))
    for name in ("req_abc", "msg_abc", "resp_abc", "chatcmpl-req_abc", "cmpl-abc"):
        assert memory.get(name, "") is not None, name
    assert memory.get("chatcmpl-mine", "") is not None
    assert memory.get("abcd", "") is None


def test_nobody_finds_or_pushes_out_anothers_request_by_choosing_its_id() -> None:
    memory = RequestMemory()
    memory.add(explained("same", [1, 2], owner="anna"))
    memory.add(explained("same", [3], owner="ben"))
    mine = memory.get("same", "anna")
    assert mine is not None
    assert len(mine.prompt) == 2
    assert memory.get("same", "carl") is None


def test_count_and_bytes_are_bounded_and_the_oldest_go() -> None:
    memory = RequestMemory(limit=3, limit_bytes=16 * 25 + 2 * SEGMENT_BYTES)
    for number in range(5):
        memory.add(explained(f"r{number}", [1]))
    assert [number for number in range(5) if memory.get(f"r{number}", "")] == [2, 3, 4]
    memory.add(explained("large", [1] * 24))
    assert memory.bytes == 16 * 25 + 2 * SEGMENT_BYTES
    assert memory.get("r3", "") is None
    assert memory.get("r4", "") is not None
    memory.add(explained("larger", [1] * 100))
    assert memory.get("larger", "") is not None, "the newest stays whatever its size"
    assert memory.get("large", "") is None


@pytest.mark.parametrize(
    ("ids", "reused", "expected"),
    [
        ([1, 2, 3, 9, 9, 9], 5, Diagnosis(DiagnosisKind.HIT, common_tokens=3)),
        ([1, 2, 3, 9, 9, 9], 0, Diagnosis(DiagnosisKind.UNAVAILABLE, common_tokens=3)),
        ([1, 7, 3, 9, 9, 9], 1, Diagnosis(DiagnosisKind.CHANGED, "messages", 1, 2)),
    ],
)
def test_the_generation_prompt_of_the_earlier_request_is_not_missed(
    ids: list[int], reused: int, expected: Diagnosis
) -> None:
    earlier = explained("a", [1, 2, 3, 4, 4], tail=2)
    assert diagnose(explained("b", ids), earlier, reused) == expected


def test_the_part_that_changed_is_named() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    earlier = explained("a", [1, 2, 3], messages=(system, user), model="m", tools=({"name": "t"},))
    cases = {
        "messages": {"messages": (system, user), "model": "m", "tools": ({"name": "t"},)},
        "system": {"messages": ({**system, "content": "x"}, user), "model": "m", "tools": ({"name": "t"},)},
        "tools": {"messages": (system, user), "model": "m"},
        "model": {"messages": (system, user), "model": "n", "tools": ({"name": "t"},)},
    }
    for part, request in cases.items():
        assert diagnose(explained("b", [1, 9, 9], **request), earlier, 0).changed == part  # type: ignore[arg-type]
    assert diagnose(explained("b", [1]), None, 0) == Diagnosis(DiagnosisKind.NOT_FOUND)


def test_a_key_is_told_of_what_a_server_gave_up_only_as_far_as_it_sent_it_itself() -> None:
    """Keys of one namespace share what a server holds, and none is to learn what another has sent."""
    report = CacheReport(CacheOutcome.COLD, 100, 0, "differs")
    told = Told(100, 40, held_tokens=40, gone="evicted: tokens 40 to 80", gone_from=40)
    for own_tokens, why in ((41, "evicted: tokens 40 to 80; differs"), (40, "differs"), (0, "differs")):
        said = told_report(report, told, is_over=True, own_tokens=lambda own=own_tokens: own)
        assert (said.why, said.held_tokens, said.reused_tokens) == (why, 40, 40)
    assert told_report(report, told, is_over=True).why == "evicted: tokens 40 to 80; differs"
    assert told_report(report, told, is_over=False).why == "differs"


def test_what_a_key_said_before_is_found_without_comparing_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model that compares all; of one long conversation, only the newest turn is compared."""
    draw = random.Random(1)
    for _ in range(40):
        memory, said = RequestMemory(), list[list[int]]()
        for number in range(12):
            ids = [draw.randrange(2) for _ in range(draw.randrange(1, 8))]
            said.append(ids)
            memory.add(explained(f"r{number}", ids))
            memory.note_kept(memory.latest_of("")[0], draw.randrange(len(ids) + 1))
        now = explained("now", [draw.randrange(2) for _ in range(6)])
        memory.add(now)
        units = now.prompt.units.tolist()
        commons = [_common(ids, units) for ids in said]
        found = memory.own_nearest(now)
        assert _common(found.units.tolist(), units) == max(commons)
        kept = [_common(one.kept.tolist(), units) for one in memory.own_before(now)]
        assert found.kept_tokens == max(kept)
    compared = 0

    def counted(one: Any, other: Any) -> int:
        nonlocal compared
        compared += 1
        return common_prefix(one, other)

    monkeypatch.setattr(explain, "common_prefix", counted)
    memory = RequestMemory()
    for turn in range(1, 40):
        memory.add(explained(f"turn {turn}", list(range(turn * 10))))
    now = explained("now", list(range(400)))
    memory.add(now)
    assert len(memory.own_nearest(now).units) == 390
    assert compared == 1


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
