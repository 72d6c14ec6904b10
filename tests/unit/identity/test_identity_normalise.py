from __future__ import annotations

from typing import Any

import pytest

from parkd.errors import ConfigError
from parkd.identity.normalise import Normaliser, NormaliserConfig, RewriteRule
from tests.unit.identity.identity_fakes import make_builder, say, talk

HEADER = "x-anthropic-billing-header: cc_version=9.9.1.abc; cc_entrypoint=cli; cch={};"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    "content",
    [
        [_text(HEADER.format("0a")), _text("Be brief.")],
        [_text(HEADER.format("0a") + "\n"), _text("Be brief.")],
        HEADER.format("0a") + "\nBe brief.",
    ],
    ids=["a block", "a block with a line end", "a line"],
)
def test_a_billing_header_is_dropped(role: str, content: Any) -> None:
    """Reports 21 and 34."""
    (system, user) = Normaliser(NormaliserConfig()).apply([say(role, content), say("user", "hi")])[0]
    assert system["content"] in ([_text("Be brief.")], "Be brief.")
    assert user == say("user", "hi")


def test_a_system_message_that_is_only_a_header_is_dropped_whole() -> None:
    messages = [say("system", [_text(HEADER.format("0a"))]), say("user", "hi")]
    assert Normaliser(NormaliserConfig()).apply(messages)[0] == messages[1:]


@pytest.mark.parametrize(
    "messages",
    [
        [say("system", "Note: " + HEADER)],
        [say("system", [_text("Be brief."), _text(HEADER)])],
        [say("user", HEADER)],
        [say("system", "Be brief."), say("system", HEADER)],
        [say("system", " " + HEADER)],
        [say("system", None)],
        [say("system", [])],
    ],
    ids=["not at the start", "second block", "a user's", "second message", "indented", "nothing", "no block"],
)
def test_what_stands_elsewhere_is_the_prompt(messages: list[dict[str, Any]]) -> None:
    assert Normaliser(NormaliserConfig()).apply(messages)[0] == messages


def test_the_flag_keeps_the_header() -> None:
    messages = [say("system", HEADER.format("0a")), say("user", "hi")]
    assert Normaliser(NormaliserConfig(drop_billing_header=False)).apply(messages)[0] == messages


def test_two_requests_that_differ_in_the_header_have_the_same_units() -> None:
    builder = make_builder()
    one, two = (
        builder.build(talk(say("system", [_text(HEADER.format(n)), _text("Be brief.")]), say("user", "hi")))
        for n in ("0a", "ff")
    )
    assert one.units.tolist() == two.units.tolist()
    assert one.segments[1].label == "message 2 (user)"


def test_operator_rules_rewrite_the_roles_they_name_and_no_other() -> None:
    rule = RewriteRule(r"Today is \S+\.", "Today is a day.")
    normaliser = Normaliser(NormaliserConfig(rules=(rule,)))
    messages = [
        say("system", "Today is Monday. Go."),
        say("system", [_text("Today is Friday."), {"type": "image"}]),
        say("user", "Today is Monday."),
    ]
    assert normaliser.apply(messages)[0] == [
        say("system", "Today is a day. Go."),
        say("system", [_text("Today is a day."), {"type": "image"}]),
        messages[2],
    ]
    assert messages[0]["content"] == "Today is Monday. Go.", "the client's own stays"


@pytest.mark.parametrize("rule", [RewriteRule("("), RewriteRule("a", r"\2")])
def test_a_rule_that_is_not_valid_is_refused_at_start(rule: RewriteRule) -> None:
    with pytest.raises(ConfigError, match="rewrite rule"):
        Normaliser(NormaliserConfig(rules=(rule,)))
