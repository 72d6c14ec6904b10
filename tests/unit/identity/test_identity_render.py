from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from parkd.engine_adapter.base import Rendered
from parkd.errors import InvalidRequest
from parkd.identity.canonical import canonical_arguments, canonical_content, canonical_messages, canonical_tools
from parkd.identity.normalise import Normaliser, NormaliserConfig
from parkd.identity.profile import SystemInside, TemplateProfile, probe_template
from parkd.identity.render import Renderer
from parkd.types import TurnRequest
from tests.unit.identity.identity_fakes import ChatMl, make_builder, say, talk

CACHE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"b":1,"a":"é"}'}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _renderer(template: ChatMl) -> Renderer:
    return Renderer(template, Normaliser(NormaliserConfig()))


def _alternating(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Refuses like templates that want user and assistant in turn behind at most one system message."""
    roles = [message["role"] for message in messages]
    rest = roles[1:] if roles[0] == "system" else roles
    good = all((role == "user") == (place % 2 == 0) for place, role in enumerate(rest))
    return None if good else "roles must alternate"


@pytest.mark.parametrize(
    "content",
    ["hi", [_text("hi")], ["hi"], [{**_text("hi"), **CACHE}], [{"type": "input_text", "text": "hi"}], _text("hi")],
)
def test_one_text_written_in_many_ways_is_one_value(content: Any) -> None:
    assert canonical_content(content) == "hi"


def test_content_of_more_than_text_stays_a_list_without_hints() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    assert canonical_content([_text("hi"), {**image, **CACHE}]) == [_text("hi"), image]
    assert canonical_content([_text("a"), _text("b")]) == "a\nb"
    assert canonical_content(None) == canonical_content([]) == ""


def test_a_second_request_that_moves_hints_and_wraps_text_renders_the_same() -> None:
    builder = make_builder()
    first = talk(say("system", [{**_text("S"), **CACHE}]), say("user", "one", **CACHE), tools=({"name": "t", **CACHE},))
    second = talk(say("developer", "S"), say("user", [{**_text("one"), **CACHE}], name=None), tools=({"name": "t"},))
    assert builder.render(first) == builder.render(second)


def test_developer_reaches_the_prompt_as_system() -> None:
    """Report 42."""
    text = make_builder().render(talk(say("developer", "obey"), say("user", "hi")))
    assert text.startswith("<|start|>system\nobey<|end|>")


def test_a_system_message_in_the_middle_is_rendered_where_it_stands() -> None:
    """Report 33: no failure, no hoisting."""
    text = make_builder().render(talk(say("user", "one"), say("system", "mid"), say("user", "two")))
    assert text.index("one") < text.index("<|start|>system\nmid") < text.index("two")


def test_where_turns_must_alternate_it_joins_the_user_turn_and_the_prefix_stays() -> None:
    template = ChatMl(_alternating)
    renderer = _renderer(template)
    assert renderer.profile.system_inside is SystemInside.MERGED
    assert not renderer.profile.systems_lead
    turns = [say("system", "S"), say("system", "S2"), say("user", "one"), say("assistant", "yes")]
    before = renderer.render(talk(*turns, say("user", "two")))
    after = renderer.render(talk(*turns, say("user", "two"), say("system", "mid"), say("user", "three")))
    assert "<|start|>system\nS\n\nS2<|end|>" in after.text
    assert "<|start|>user\ntwo\n\nmid\n\nthree<|end|>" in after.text
    assert after.text.startswith(before.text.removesuffix("<|end|>\n<|start|>assistant\n"))
    assert (after.turns[-1].origin, after.turns[-1].last_origin) == (4, 6)


def test_where_the_template_refuses_system_inside_it_is_a_user_turn() -> None:
    def only_first(messages: Sequence[Mapping[str, Any]]) -> str | None:
        return "no" if any(message["role"] == "system" for message in messages[1:]) else None

    renderer = _renderer(ChatMl(only_first))
    assert renderer.profile.system_inside is SystemInside.USER
    text = renderer.render(talk(say("user", "one"), say("system", "mid"), say("user", "two"))).text
    assert "<|start|>user\nmid<|end|>\n<|start|>user\ntwo" in text


def test_a_template_that_hoists_system_messages_gets_them_as_user_turns() -> None:
    class Hoisting(ChatMl):
        def render(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> Rendered:
            ordered = sorted(messages, key=lambda message: message["role"] != "system")
            return super().render(ordered, *rest, **more)

    assert probe_template(Hoisting()).system_inside is SystemInside.USER


def test_a_template_without_system_gets_a_user_turn() -> None:
    def none_at_all(messages: Sequence[Mapping[str, Any]]) -> str | None:
        return "no" if any(message["role"] == "system" for message in messages) else _alternating(messages)

    renderer = _renderer(ChatMl(none_at_all))
    assert renderer.render(talk(say("system", "S"), say("user", "one"))).text.startswith(
        "<|start|>user\nS\n\none<|end|>"
    )


def test_a_refusal_the_probe_did_not_foresee_is_tried_again_with_joined_turns() -> None:
    def not_after_tools(messages: Sequence[Mapping[str, Any]]) -> str | None:
        roles = [message["role"] for message in messages]
        return "no" if ("tool", "system") in pairwise(roles) else None

    renderer = _renderer(ChatMl(not_after_tools))
    assert renderer.profile.system_inside is SystemInside.IN_PLACE
    text = renderer.render(talk(say("user", "q"), say("tool", "r"), say("system", "mid"))).text
    assert "<|start|>user\nmid" in text
    with pytest.raises(InvalidRequest, match="alternate"):
        _renderer(ChatMl(_alternating)).render(talk(say("assistant", "a"), say("user", "q")))


def test_what_template_code_raises_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match="cannot take these messages"):
        _renderer(ChatMl()).render(talk(say("user", "q", tool_calls=[{"odd": 1}])))


@pytest.mark.parametrize("arguments", ['{"b":1,"a":"é"}', '{"b": 1, "a": "\\u00e9"}', {"b": 1, "a": "é"}])
def test_arguments_written_in_many_ways_are_one_value(arguments: Any) -> None:
    assert canonical_arguments(arguments, as_text=False) == {"b": 1, "a": "é"}
    assert canonical_arguments(arguments, as_text=True) == '{"b": 1, "a": "é"}'


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '"text"'])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(arguments: str) -> None:
    assert canonical_arguments(arguments, as_text=False) == arguments
    assert canonical_arguments(arguments, as_text=True) == arguments


def test_missing_arguments_are_an_empty_object() -> None:
    assert canonical_arguments(None, as_text=True) == canonical_arguments("", as_text=True) == "{}"


def test_the_form_of_calls_is_the_one_the_template_takes() -> None:
    """One that adds argument text to a string, and that shows calls only where content is None."""

    class Texts(ChatMl):
        def render(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> Rendered:
            shown = []
            for message in messages:
                calls = message.get("tool_calls", ()) if message["content"] is None else ()
                content = "".join("CALL" + call["function"]["name"] + call["function"]["arguments"] for call in calls)
                shown.append({"role": message["role"], "content": content or message["content"]})
            return super().render(shown, *rest, **more)

    renderer = _renderer(Texts())
    assert renderer.profile.arguments_as_text
    assert renderer.profile.calls_want_none
    turns = [say("user", "q"), say("assistant", "", tool_calls=[_CALL])]
    assert 'CALLf{"b": 1, "a": "é"}' in renderer.render(talk(*turns)).text


def test_nulls_empty_calls_and_hints_inside_calls_vanish() -> None:
    call = {**_CALL, **CACHE, "index": 0, "extra": None}
    message = say("assistant", None, tool_calls=[call], refusal=None, audio=None)
    (turn,) = canonical_messages([message], TemplateProfile())
    function = {"name": "f", "arguments": {"b": 1, "a": "é"}}
    assert turn.message == say("assistant", "", tool_calls=[{"id": "c1", "type": "function", "function": function}])
    (plain,) = canonical_messages([say("assistant", None, tool_calls=[])], TemplateProfile())
    assert plain.message == say("assistant", "")


def test_a_parameter_named_like_a_hint_stays() -> None:
    parameters = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert canonical_tools([{**tool, **CACHE}, {**tool, "function": {**tool["function"], **CACHE}}]) == [tool, tool]


def test_the_probe_finds_how_turns_open() -> None:
    profile = probe_template(ChatMl())
    assert profile.openers == {role: f"<|start|>{role}\n" for role in ("user", "assistant", "system", "tool")}
    assert profile.generation_prompt == "<|start|>assistant\n"
    assert not profile.arguments_as_text
    assert not profile.calls_want_none


def test_a_template_that_refuses_all_is_survived_by_the_probe() -> None:
    assert probe_template(ChatMl(lambda messages: "never")).openers == {}


def test_raw_prompts_and_empty_requests() -> None:
    builder = make_builder()
    assert builder.render(TurnRequest(prompt="raw <|start|> text")) == "raw <|start|> text"
    for request in (TurnRequest(), TurnRequest(prompt="")):
        with pytest.raises(InvalidRequest):
            builder.build(request)


@pytest.mark.parametrize("content", ["It is", [_text("It is")]])
def test_a_message_to_continue_is_left_open(content: Any) -> None:
    ask, begun = say("user", "q"), say("assistant", content)
    builder = make_builder()
    opened = builder.render(talk(ask))
    assert builder.render(talk(ask, begun, continues=True)) == f"{opened}It is"
    assert builder.render(talk(ask, begun)) == f"{opened}It is<|end|>\n<|start|>assistant\n"


def test_a_message_is_not_continued_inside_thinking_nor_without_a_turn_before_it() -> None:
    class Thinking(ChatMl):
        def render(self, *args: Any, **more: Any) -> Rendered:
            rendered = super().render(*args, **more)
            opens = rendered.text.endswith("<|start|>assistant\n")
            return Rendered(f"{rendered.text}<think>\n") if opens else rendered

    ask, begun = say("user", "q"), say("assistant", "It is")
    for template, turns in ((Thinking(), [ask, begun]), (ChatMl(), [begun]), (ChatMl(), [ask, say("assistant", "")])):
        builder = make_builder(template=template)
        assert builder.render(talk(*turns, continues=True)) == builder.render(talk(*turns))


def test_a_continued_message_is_found_again_when_the_client_joins_both_parts() -> None:
    builder = make_builder()
    ask = say("user", "q")
    first = builder.build(talk(ask, say("assistant", "It is"), continues=True))
    joined = builder.build(talk(ask, say("assistant", "It is blue"), say("user", "why")))
    shared = len(first.token_ids)
    assert joined.token_ids[:shared].tolist() == first.token_ids.tolist()
    assert first.segments[-1].label == "generation prompt"
