"""Forms that a client may ask its answer to have, by the fields of every server's API, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.errors import InvalidRequest
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.types import FormKind, ToolChoice, ToolChoiceMode

SCHEMA = {"const": "42"}
MESSAGES = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (OpenAIChat(), {"messages": MESSAGES}),
    "completions": (OpenAICompletions(), {"prompt": "Hi"}),
    "responses": (OpenAIResponses(), {"input": "hi"}),
    "anthropic": (AnthropicMessages(), {"messages": MESSAGES, "max_tokens": 4}),
}
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ({"json_schema": SCHEMA}, SCHEMA),
    ({"json_schema": '{"const": "42"}'}, SCHEMA),
    ({"guided_json": SCHEMA}, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ({"guided_regex": "a+"}, (FormKind.REGEX, "a+")),
    ({"regex": "a+"}, (FormKind.REGEX, "a+")),
    ({"structured_outputs": {"regex": "a+"}}, (FormKind.REGEX, "a+")),
    ({"guided_choice": ["a", "b"]}, (FormKind.CHOICE, ("a", "b"))),
    ({"structured_outputs": {"choice": ["a"]}}, (FormKind.CHOICE, ("a",))),
    ({"guided_grammar": "root ::= [a]"}, (FormKind.GRAMMAR, "root ::= [a]")),
    ({"grammar": "root ::= [a]"}, (FormKind.GRAMMAR, "root ::= [a]")),
    ({"response_format": {"type": "grammar", "grammar": "root ::= [a]"}}, (FormKind.GRAMMAR, "root ::= [a]")),
    ({"grammar": "", "regex": None, "response_format": {"type": "text"}}, None),
]


@pytest.mark.parametrize(("asked", "expected"), FORMS)
@pytest.mark.parametrize("name", DIALECTS)
def test_no_form_is_passed_over(name: str, asked: dict[str, Any], expected: Any) -> None:
    dialect, body = DIALECTS[name]
    request = dialect.parse(body | asked, {})
    form = request.response_form
    assert (request.response_schema if form is None else (form.kind, form.source)) == expected


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"json_schema": 123}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"regex": 5}, "regex"),
        ({"grammar": {}}, "grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 123}}}, "response_format.schema"),
        ({"response_format": {"type": 123}}, "response_format.type"),
        ({"response_format": {"type": "hiccup"}}, "response_format.type"),
    ],
)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_form_that_is_none_is_refused_by_its_field(name: str, asked: dict[str, Any], param: str) -> None:
    dialect, body = DIALECTS[name]
    with pytest.raises(InvalidRequest) as caught:
        dialect.parse(body | asked, {})
    assert caught.value.param == param


@pytest.mark.parametrize("name", DIALECTS)
def test_two_forms_are_refused(name: str) -> None:
    dialect, body = DIALECTS[name]
    with pytest.raises(InvalidRequest, match="several forms"):
        dialect.parse(body | {"regex": "a", "guided_json": SCHEMA}, {})


READ = {"name": "read", "parameters": {"type": "object"}}
DELETE = {"name": "delete", "parameters": {"type": "object"}}
FLAT = [{"type": "function", "name": "delete"}]
NESTED = [{"type": "function", "function": {"name": "delete"}}]


@pytest.mark.parametrize("mode", [ToolChoiceMode.AUTO, ToolChoiceMode.REQUIRED])
def test_allowed_tools_are_the_only_ones_and_the_prompt_has_all(mode: ToolChoiceMode) -> None:
    expected = ToolChoice(mode, allowed=frozenset({"delete"}))
    flat = {"type": "allowed_tools", "mode": mode.value, "tools": FLAT}
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": mode.value, "tools": NESTED}}
    chat = {"messages": MESSAGES, "tools": [{"type": "function", "function": tool} for tool in (READ, DELETE)]}
    responses = {"input": "hi", "tools": [{"type": "function", **tool} for tool in (READ, DELETE)]}
    for dialect, body in ((OpenAIChat(), chat), (OpenAIResponses(), responses)):
        for choice in (flat, nested):
            request = dialect.parse(body | {"tool_choice": choice}, {})  # type: ignore[attr-defined]
            assert request.tool_choice == expected
            assert [tool["function"]["name"] for tool in request.tools] == ["read", "delete"]
        with pytest.raises(InvalidRequest, match="not in `tools`"):
            dialect.parse(  # type: ignore[attr-defined]
                body | {"tool_choice": {**flat, "tools": [{"type": "function", "name": "other"}]}}, {}
            )
        with pytest.raises(InvalidRequest, match="at least one"):
            dialect.parse(body | {"tool_choice": {**flat, "mode": "required", "tools": []}}, {})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("chat", {"reasoning_effort": "bogus"}),
        ("responses", {"reasoning": {"effort": "bogus"}}),
        ("anthropic", {"output_config": {"effort": "bogus"}}),
    ],
)
def test_an_unknown_effort_is_refused(name: str, asked: dict[str, Any]) -> None:
    dialect, body = DIALECTS[name]
    with pytest.raises(InvalidRequest, match="must be one of"):
        dialect.parse(body | asked, {})
