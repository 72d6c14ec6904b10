"""Every field that the vendors' SDKs can send is honoured, refused by name, or told in API.md to be without effect.

The fields are those of the installed SDKs' types, so a newer SDK with a new field fails here until it is decided about.
What a dialect never looks at is without effect.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.beta import message_create_params as anthropic_beta
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from typing_extensions import is_typeddict

from parkd.errors import InvalidRequest
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import ResponseMeta, TurnDialect
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.proxy.dialects.openai_responses import OpenAIResponses

API = Path(__file__).parents[3] / "docs" / "API.md"
TALK = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CASES: dict[str, tuple[TurnDialect, Any, dict[str, Any]]] = {
    "chat": (
        OpenAIChat(),
        chat.CompletionCreateParamsBase,
        {
            "messages": TALK,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
    "completions": (OpenAICompletions(), completions.CompletionCreateParamsBase, {"prompt": "x", "stream_options": {}}),
    "Responses": (
        OpenAIResponses(),
        responses.ResponseCreateParamsBase,
        {"input": TALK, "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    ),
    "Anthropic": (
        AnthropicMessages(),
        anthropic_beta.MessageCreateParamsBase,
        {"messages": TALK, "max_tokens": 4},
    ),
}
"""By the names of API.md: the dialect, the SDK's type, and a body with the objects whose own fields are looked at."""
NESTED = {"stream_options", "reasoning", "text"}


class Read(dict[str, Any]):
    """A body that knows which of its fields were looked at."""

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        inner = {k: Read(v, f"{k}.") if k in NESTED and isinstance(v, dict) else v for k, v in body.items()}
        super().__init__(inner)
        self.path = path
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    @property
    def all_seen(self) -> set[str]:
        inner = [value for value in self.values() if isinstance(value, Read)]
        return {self.path + name for name in self.seen}.union(*(one.all_seen for one in inner))


def told() -> dict[str, set[str]]:
    """The table of API.md."""
    table = API.read_text().split("| API | without effect |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", table, re.MULTILINE)
    return {name: set(re.findall(r"`([\w.]+)`", cells)) for name, cells in rows}


def typed_dicts(hint: Any) -> set[Any]:
    """The typed dictionaries that a field may hold."""
    if get_origin(hint) in (Union, UnionType, Required, NotRequired, Annotated):
        return set().union(*(typed_dicts(one) for one in get_args(hint)))
    return {hint} if is_typeddict(hint) else set()


def known_to_the_sdk(params: Any) -> set[str]:
    fields = set()
    for name, hint in get_type_hints(params).items():
        fields.add(name)
        if name in NESTED:
            fields |= {f"{name}.{inner}" for one in typed_dicts(hint) for inner in get_type_hints(one)}
    return fields


def read_of(dialect: TurnDialect, body: dict[str, Any]) -> set[str]:
    read, meta = Read({"model": "m", "stream": True, **body}), ResponseMeta("i", "m", 0)
    dialect.at_once(read, meta)
    dialect.encoder(dialect.parse(read, {}), read, meta)
    return read.all_seen


@pytest.mark.parametrize("name", CASES)
def test_found_by_use_8_every_field_of_an_sdk_is_honoured_refused_or_told(name: str) -> None:
    dialect, params, body = CASES[name]
    read, without_effect = read_of(dialect, body), told()[name]
    known = known_to_the_sdk(params)
    assert {field for field in known - read if not {field, field.split(".")[0]} & without_effect} == set()
    assert without_effect & read == set(), "told to be without effect, but looked at"
    assert without_effect <= known, "no field of this SDK"


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("chat", {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"reasoning_effort": "bogus"}, "reasoning_effort"),
        ("Responses", {"reasoning": {"effort": "bogus"}}, "reasoning_effort"),
        ("Anthropic", {"output_config": {"effort": "bogus"}}, "reasoning_effort"),
        ("chat", {"functions": [FUNCTION]}, "functions"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"best_of": 3}, "best_of"),
        ("Responses", {"background": True}, "background"),
        ("Responses", {"previous_response_id": "r"}, "previous_response_id"),
        ("Anthropic", {"thread": {"id": "t"}}, "thread"),
    ],
)
def test_found_by_use_8_what_cannot_be_had_is_refused_by_name(name: str, fields: dict[str, Any], param: str) -> None:
    dialect, _, body = CASES[name]
    with pytest.raises(InvalidRequest) as refused:
        dialect.parse({"model": "m", **body, **fields}, {})
    assert refused.value.param == param


def test_text_alone_is_what_is_given_anyway() -> None:
    dialect, _, body = CASES["chat"]
    assert dialect.parse({**body, "modalities": ["text"]}, {}).messages
