"""Why tokens were read, case by case: prompts built from messages, compared with what the same key sent before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parkd.identity.builder import IdentityBuilder
from parkd.identity.normalise import Normaliser, NormaliserConfig
from parkd.lane.reports.cause import Earlier, Judgement, cause_of
from parkd.lane.reports.explain import PromptParts
from parkd.lane.reports.ledger_rows import client_family
from parkd.lane.reports.volatile import rule_for, volatile_of
from parkd.lane.start import NOT_ASKED, OWN_GONE
from parkd.types import CacheOutcome, CacheReport, Cause, Divergence, PromptIdentity, TurnRequest
from tests.fakes.text import FakeTemplate, FakeTokenizer

TOKENIZER = FakeTokenizer()
BUILDER = IdentityBuilder(TOKENIZER, FakeTemplate(), b"f" * 16, 256, 1 << 20)
RULES = "Answer in short sentences, and never say more than what was asked. " * 8
DIFFERS = Divergence(0, "", "", "")
"""That something differs is known to whoever reused a part; where, is for the ledger to find."""
TALK = [
    {"role": "user", "content": "Where is the red book that I bought in spring?"},
    {"role": "assistant", "content": "On the upper shelf, left of the blue one."},
    {"role": "user", "content": "And where is the green one of which you told me?"},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look_up", "write_down", "throw_away")
]


def request(system: str | None = RULES, talk: list[dict[str, Any]] = TALK, **fields: Any) -> TurnRequest:
    head = [] if system is None else [{"role": "system", "content": system}]
    return TurnRequest(messages=[*head, *talk], **fields)


def built(asked: TurnRequest) -> PromptIdentity:
    return BUILDER.build(asked)


def sent(asked: TurnRequest, answer: str = "") -> Earlier:
    """A request of before, with the answer that it got."""
    prompt = built(asked)
    units = np.array(TOKENIZER.encode(answer), dtype=np.uint64)
    said = np.concatenate([prompt.units, units]) if answer else prompt.units
    return Earlier(prompt, said, PromptParts.of(asked))


def judged(now: TurnRequest, *earlier: Earlier, why: str = "", reused: int = 0, **report: Any) -> Judgement:
    prompt = built(now)
    outcome = CacheOutcome.LIVE if reused else CacheOutcome.COLD
    report.setdefault("divergence", DIFFERS if reused else None)
    given = CacheReport(outcome, len(prompt), reused, why, **report)
    return cause_of(
        prompt, PromptParts.of(now), given, earlier, lambda units: TOKENIZER.decode([int(unit) for unit in units])
    )


def test_a_prompt_that_nobody_sent_before() -> None:
    assert judged(request()) == Judgement(Cause.FIRST_TIME)


def test_another_conversation_of_the_same_agent_is_new_too() -> None:
    other = request(talk=[{"role": "user", "content": "How does one make bread from rye and water?"}])
    assert judged(request(), sent(other)).cause is Cause.FIRST_TIME
    head = len(built(request(talk=[])))
    assert judged(request(), sent(other), reused=head // 2).cause is Cause.NONE


def test_a_prompt_that_goes_on_where_the_answer_ended_has_no_cause() -> None:
    before = sent(request(), "It is lent.")
    asked = [*TALK, {"role": "assistant", "content": "It is lent."}, {"role": "user", "content": "To whom?"}]
    assert judged(request(talk=asked), before, reused=len(before.said) - 1) == Judgement(Cause.NONE)


def test_what_was_reused_whole_has_no_cause() -> None:
    length = len(built(request()))
    assert judged(request(), sent(request()), reused=length - 1, why="evicted 3 s ago: x") == Judgement(Cause.NONE)


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("evicted 12 s ago: its room was needed for another conversation", Cause.EVICTED),
        (OWN_GONE, Cause.EVICTED),
        ("not parked 3 s ago: needs 18.2 MiB, 12.0 MiB could be freed", Cause.REFUSED),
        ("dropped 3 s ago: it could not be read: damaged", Cause.DAMAGE),
        ("dropped 3 s ago: it was not used for 24 hours", Cause.EVICTED),
        ("dropped 3 s ago: it was forgotten because someone asked for that", Cause.FORGOTTEN),
        ("no exact state between tokens 0 and 700", Cause.NO_CHECKPOINT),
    ],
)
def test_what_was_known_whole_and_is_gone_counts_as_read_needlessly(why: str, cause: Cause) -> None:
    longer = request(talk=[*TALK, {"role": "assistant", "content": "There."}, {"role": "user", "content": "Thanks!"}])
    found = judged(longer, sent(request()), why=why)
    known = 0
    for one, other in zip(built(request()).units, built(longer).units, strict=False):
        if one != other:
            break
        known += 1
    assert (found.cause, found.needless_tokens) == (cause, known)
    assert judged(longer, sent(request()), why=why, reused=300).needless_tokens == known - 300


def test_a_restore_that_failed_is_damage_whatever_else_there_is() -> None:
    found = judged(request(), sent(request()), why="restore failed: a checksum differs", is_damaged=True)
    assert (found.cause, found.needless_tokens) == (Cause.DAMAGE, len(built(request())) - 1)


def test_what_was_chosen_is_not_needless() -> None:
    assert judged(request(), sent(request()), why=NOT_ASKED) == Judgement(Cause.NOT_ASKED)
    found = judged(request(), sent(request()), why="reading is cheaper than restoring 800 tokens")
    assert found == Judgement(Cause.CHEAPER)


@pytest.mark.parametrize(
    ("text", "known", "kind"),
    [
        ("2026-12-01T10:04:31Z", "2026-12-01T10:01:07Z", "clock"),
        ("10:04:31", "10:01:07", "clock"),
        ("Tue, 01 Dec 2026", "Mon, 30 Nov 2026", "clock"),
        ("1796119471", "1796119999", "clock"),
        ("0b1f6c7e-9d3a-4f46-8a55-0c2d6f2d9e10", "1b1f6c7e-9d3a-4f46-8a55-0c2d6f2d9e11", "id"),
        ("/tmp/run-a81x/out", "/tmp/run-k92z/out", "path"),
        ("17", "23", "counter"),
    ],
)
def test_text_that_changes_with_every_request_is_a_clock_and_has_a_rule(text: str, known: str, kind: str) -> None:
    line = "Request number: {} is what you see.\n"
    now, before = request(line.format(text) + RULES), request(line.format(known) + RULES)
    found = judged(now, sent(before))
    assert found.cause is Cause.CLOCK
    assert found.volatile is not None
    assert found.volatile.kind == kind
    prompt = built(now)
    unknown = max(len(text), len(known)) + len(prompt) - prompt.segments[-1].start  # with the generation prompt
    assert len(prompt) - unknown <= found.needless_tokens < len(prompt)
    rule = rule_for(found.volatile, ("system",), shows_text=True)
    assert rule is not None
    apply = Normaliser(NormaliserConfig(rules=(rule,))).apply
    assert apply(now.messages)[0] == apply(before.messages)[0], "with the rule both are one prompt"
    assert "equest number: " in rule.pattern.replace("\\", "")
    without = rule_for(found.volatile, ("system",), shows_text=False)
    assert (without is None) == (kind == "counter")
    if without is not None:
        assert "Request" not in without.pattern
        apply = Normaliser(NormaliserConfig(rules=(without,))).apply
        assert apply(now.messages)[0] == apply(before.messages)[0]


def test_other_words_are_no_clock() -> None:
    assert volatile_of("the red book", "the blue book") is None
    assert volatile_of("at 10:04 we", "at noon we") is None
    assert volatile_of("same", "same and more") is None


def test_another_system_message() -> None:
    found = judged(request(RULES.replace("short", "terse", 1)), sent(request()))
    assert found.cause is Cause.SYSTEM
    assert found.segment == "system"
    assert "terse" in found.text
    assert "short" in found.known_text


def test_a_system_message_that_moved() -> None:
    moved = [TALK[0], {"role": "system", "content": RULES}, *TALK[1:]]
    assert judged(request(None, moved), sent(request())).cause is Cause.SYSTEM_MOVED


def test_tools_in_another_order_are_told_from_other_tools() -> None:
    before = sent(request(tools=TOOLS))
    assert judged(request(tools=[TOOLS[1], TOOLS[0], TOOLS[2]]), before).cause is Cause.TOOLS_REORDERED
    assert judged(request(tools=TOOLS[1:]), before).cause is Cause.TOOLS


def test_another_model_name_that_the_template_wrote() -> None:
    """Nothing else of the head is different."""
    now, before = request("You are b." + RULES, model="b"), request("You are a." + RULES, model="a")
    earlier = sent(before)
    earlier = replace(earlier, parts=replace(PromptParts.of(now), model="a"))
    assert judged(now, earlier).cause is Cause.MODEL


def test_an_edited_history_counts_what_comes_behind() -> None:
    edited = [{**TALK[0], "content": TALK[0]["content"].replace("red", "old")}, *TALK[1:]]
    prompt = built(request(talk=edited))
    place = next(i for i, (a, b) in enumerate(zip(prompt.units, built(request()).units, strict=False)) if a != b)
    found = judged(request(talk=edited), sent(request()), reused=place)
    assert (found.cause, found.place, found.segment) == (Cause.HISTORY_EDITED, place, "message 2 (user)")
    behind = len(prompt) - place - len("old")
    generation = len(prompt) - prompt.segments[-1].start
    assert behind - generation - 1 <= found.needless_tokens <= behind


def test_an_answer_that_comes_back_in_other_tokens() -> None:
    before = sent(request(), "It is lent to the neighbour, who will bring it back in autumn.")
    asked = [
        *TALK,
        {"role": "assistant", "content": "It is lent to that neighbour, who will bring it back in autumn."},
        {"role": "user", "content": "To whom?"},
    ]
    place = next(
        i for i, (a, b) in enumerate(zip(built(request(talk=asked)).units, before.said, strict=False)) if a != b
    )
    found = judged(request(talk=asked), before, reused=place)
    assert (found.cause, found.place) == (Cause.TEMPLATE, place)
    assert found.needless_tokens == len(before.said) - place


def test_another_question_in_place_of_the_answer_is_no_rendered_answer() -> None:
    before = sent(request(), "It is lent to the neighbour, who will bring it back in autumn.")
    asked = [*TALK, {"role": "user", "content": "Never mind. What time is it, and how long until noon?"}]
    assert judged(request(talk=asked), before, reused=400).cause is Cause.NONE


def test_the_same_prompt_under_another_salt() -> None:
    before = sent(request(namespace="other"))
    found = judged(request(), before)
    assert (found.cause, found.needless_tokens) == (Cause.KEY, len(built(request())) - 1)


def test_the_family_of_a_client_is_its_first_product_without_version() -> None:
    agents = {
        "claude-cli/2.0.1 (external, cli)": "claude-cli",
        "OpenAI/Python 1.2": "openai",
        "Mozilla/5.0 (X11; Linux)": "browser",
        "python-httpx/0.28": "python-httpx",
        "": "",
        "(nothing)": "",
        "x" * 300: "x" * 32,
    }
    assert {agent: client_family(agent) for agent in agents} == agents


def test_a_message_that_comes_twice_was_known_once() -> None:
    again = [{**TALK[0], "content": "What was it?"}, TALK[1], TALK[1], TALK[2]]
    once = [{**TALK[0], "content": "What was it?"}, TALK[1], TALK[2]]
    place = next(
        i
        for i, (a, b) in enumerate(zip(built(request(talk=again)).units, built(request()).units, strict=False))
        if a != b
    )
    tokens = [judged(request(talk=talk), sent(request()), reused=place).needless_tokens for talk in (once, again)]
    assert tokens[0] == tokens[1]


def test_what_goes_on_where_something_known_ended_is_compared_with_nothing() -> None:
    class Untouched(list[Earlier]):
        def __iter__(self) -> Any:
            raise AssertionError("an earlier request was looked at")

    prompt = built(request())
    report = CacheReport(CacheOutcome.LIVE, len(prompt), 400)
    assert cause_of(prompt, None, report, Untouched(), str) == Judgement(Cause.NONE)


def test_the_newest_request_is_enough_if_it_had_nearly_all() -> None:
    """An older one that had still more is not looked for."""
    edited = [{**TALK[0], "content": TALK[0]["content"].replace("red", "old")}, *TALK[1:]]
    now = request("Be kind. " + RULES, edited)
    near, exact = sent(request(RULES, edited)), sent(request("Be kind! " + RULES, edited))
    assert judged(now, near, exact).known_text == judged(now, near).known_text
