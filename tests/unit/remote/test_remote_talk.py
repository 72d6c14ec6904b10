"""A chat as one text of characters and marks, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parkd.engine_adapter.remote.alphabet import FIRST_MARK_ID, Characters, JoinedText, Mark, ids_of
from parkd.engine_adapter.remote.talk import Talk, TalkTemplate, call_id_of, plain_text, read_talk
from parkd.errors import InvalidRequest
from parkd.identity.cuts import cuttable_tokens
from parkd.identity.matcher import divergence_of
from parkd.types import Unit
from tests.unit.identity.identity_fakes import make_builder, say, talk

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def there_and_back(
    messages: list[dict[str, Any]], *, tools: Any = (), kwargs: Any = None, opens: bool = True, thoughts: bool = True
) -> Talk:
    template = TalkTemplate(sends_thoughts=thoughts)
    text = template.render(messages, tools, kwargs or {}, add_generation_prompt=opens).text
    return read_talk(np.array(Characters().encode(text)))


def test_a_chat_comes_back_as_it_was() -> None:
    messages = [
        {"role": "system", "content": "Be brief.\n\n"},
        {"role": "user", "content": '  \u20ac \U0001f600 {"a": 1}  ', "name": "ann"},
        {
            "role": "assistant",
            "content": "Hm.",
            "reasoning_content": "think",
            "tool_calls": [call("f", '{"a":  1}', "x")],
        },
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Go on."},
    ]
    talk = there_and_back(messages, tools=TOOLS, kwargs={"enable_thinking": False})
    expected = [dict(message) for message in messages]
    expected[2]["tool_calls"] = [call("f", '{"a":  1}', call_id_of(0))]
    expected[3]["tool_call_id"] = call_id_of(0)
    assert talk.messages == expected
    assert list(talk.tools) == TOOLS
    assert talk.settings == {"enable_thinking": False}
    assert (talk.is_open, talk.begun) == (True, "")


def test_calls_count_through_the_chat_and_results_name_theirs() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "b"), call("f", "{}", "a")]}
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in ("a", "b")]
    again = {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "a")]}
    last = [
        {"role": "tool", "content": "later", "tool_call_id": "a"},
        {"role": "tool", "content": "?", "tool_call_id": "z"},
    ]
    sent = there_and_back([calls, *results, again, *last]).messages
    assert [each["id"] for each in sent[0]["tool_calls"]] == [call_id_of(0), call_id_of(1)]
    assert [each["tool_call_id"] for each in (*sent[1:3], *sent[4:])] == [
        call_id_of(1),
        call_id_of(0),
        call_id_of(2),
        "z",
    ]
    assert sent[0]["content"] is None


def test_ids_of_calls_fit_the_templates_of_all_models() -> None:
    assert all(call_id_of(number).isalnum() and len(call_id_of(number)) == 9 for number in (0, 7, 99999))


def test_thoughts_are_left_out_for_a_server_that_takes_none() -> None:
    message = {"role": "assistant", "content": "Yes.", "reasoning": "deep"}
    assert there_and_back([message], thoughts=False).messages == [{"role": "assistant", "content": "Yes."}]
    assert there_and_back([message]).messages == [{"role": "assistant", "content": "Yes.", "reasoning_content": "deep"}]


def test_a_chat_may_be_closed_or_begun() -> None:
    user = {"role": "user", "content": "Hi"}
    assert there_and_back([user], opens=False).is_open is False
    text = TalkTemplate(sends_thoughts=True).render([user], (), {}).text + "The answer"
    talk = read_talk(np.array(Characters().encode(text)))
    assert (talk.is_open, talk.begun) == (True, "The answer")
    assert talk.messages == [user, {"role": "assistant", "content": "The answer"}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "tool_calls": ["f"]},
    ],
)
def test_what_cannot_be_sent_on_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        TalkTemplate(sends_thoughts=True).render([message], (), {})


def test_marks_are_no_characters() -> None:
    characters, everything = Characters(), "".join(mark.text for mark in Mark)
    assert characters.encode(everything) == [FIRST_MARK_ID + n for n in range(len(Mark))]
    letters = characters.encode_parts([everything, Mark.USER.text, "a\ud800"], frozenset(characters.control_tokens))
    assert letters == [*map(ord, everything), Mark.USER.id, ord("a"), 0xD800]
    assert characters.decode(letters) == everything + Mark.USER.text + "a\ud800"
    assert JoinedText().push([ord("a"), Mark.CALL.id, 0x1F600]) == f"a{Mark.CALL.joint}\U0001f600"
    assert ids_of("a\U0010ff00") == [97, 0x10FF00]


def test_a_text_can_be_cut_at_every_mark() -> None:
    assert cuttable_tokens(Characters()) == {mark.text for mark in Mark}


def test_a_prompt_without_marks_is_no_chat() -> None:
    assert plain_text(np.array(ids_of("Once"))) == "Once"
    assert plain_text(np.array([Mark.USER.id, *ids_of("Once")])) is None


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [("Hi", "Hi you", "' yo' where an end was known"), ("Hi you", "Hi", "an end where ' yo' was known")],
)
def test_a_difference_at_an_end_shows_no_private_character(before: str, now: str, told: str) -> None:
    builder = make_builder(Characters(), TalkTemplate(sends_thoughts=True))
    old, new = (builder.build(talk(say("user", text))) for text in (before, now))
    divergence = str(divergence_of(new, old.units, Characters(), Unit.CHARACTER))
    assert divergence.endswith(told)
    assert divergence.startswith("character 3 in message 1 (user)")


def test_a_difference_shows_the_characters_before_an_end() -> None:
    builder = make_builder(Characters(), TalkTemplate(sends_thoughts=True))
    old, new = (builder.build(talk(say("user", text))) for text in ("a b", "a cd"))
    assert "'cd' where 'b' was known" in str(divergence_of(new, old.units, Characters(), Unit.CHARACTER))
