"""What the vendors' SDKs can send inside of messages, tools, choices and formats is honoured, refused by name, or told
in API.md to be without effect.

A value of every kind is made of the installed SDK's types, and put where it may stand. A field has an effect if what is
parsed changes with it, or a refusal names it; a kind has none if it is parsed as one that nobody knows. So a newer SDK
with a new field or kind fails here until it is decided about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.beta import message_create_params as anthropic_beta
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from typing_extensions import is_typeddict

from parkd.errors import InvalidRequest
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import TurnDialect
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_responses import OpenAIResponses

API = Path(__file__).parents[3] / "docs" / "API.md"
WRAPPERS = (Required, NotRequired, Annotated)
PIXEL, OTHER_PIXEL = (
    f"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNg{rest}"
    for rest in ("YGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC", "+M8AAAICAQB7CYF4AAAAAElFTkSuQmCC")
)
SCHEMA = {"type": "object"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TEXTS: Mapping[str, tuple[str, str]] = {
    "arguments": ("{}", '{"a": 1}'),
    "data": (PIXEL, OTHER_PIXEL),
    "image_url": (f"data:image/png;base64,{PIXEL}", f"data:image/png;base64,{OTHER_PIXEL}"),
    "media_type": ("image/png", "image/gif"),
    "name": ("f", "g"),
    "url": (f"data:image/png;base64,{PIXEL}", f"data:image/png;base64,{OTHER_PIXEL}"),
}
"""Values of fields that not every text can be."""
OBJECTS: Mapping[str, tuple[Any, Any]] = {
    "schema": (SCHEMA, {"type": "object", "maxProperties": 1}),
    "parameters": (SCHEMA, {"type": "object", "maxProperties": 1}),
    "input_schema": (SCHEMA, {"type": "object", "maxProperties": 1}),
    "tools": ([{"type": "function", "name": "f", "function": {"name": "f"}}], []),
}


@dataclass(frozen=True)
class Case:
    dialect: TurnDialect
    params: Any
    body: Mapping[str, Any]
    fields: tuple[str, ...]


CASES = {
    "chat": Case(
        OpenAIChat(),
        chat.CompletionCreateParamsBase,
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
        ("messages", "tools", "tool_choice", "response_format"),
    ),
    "Responses": Case(
        OpenAIResponses(),
        responses.ResponseCreateParamsBase,
        {
            "input": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
        ("input", "tools", "tool_choice", "text", "reasoning"),
    ),
    "Anthropic": Case(
        AnthropicMessages(),
        anthropic_beta.MessageCreateParamsBase,
        {
            "max_tokens": 9000,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
        ("messages", "system", "tools", "tool_choice", "thinking", "output_config"),
    ),
}
IMAGE_REFUSED = re.compile(r"refusal=['\"]\w")
"""An image that is nowhere here is refused when the turn begins."""
Build = Callable[[Any], dict[str, Any]]


def choices(hint: Any) -> list[Any]:
    """The types that a hint allows, None left out."""
    if get_origin(hint) in (Union, UnionType):
        return [one for part in get_args(hint) for one in choices(part)]
    if get_origin(hint) in WRAPPERS:
        return choices(get_args(hint)[0])
    return [] if hint is type(None) else [hint]


def required(kind: Any) -> list[str]:
    hints = get_type_hints(kind, include_extras=True)
    origins = {name: get_origin(hint) for name, hint in hints.items()}
    return [n for n, origin in origins.items() if origin is Required or (kind.__total__ and origin is not NotRequired)]


def values(hint: Any, name: str) -> list[Any]:
    """One or two values of a field."""
    if name in OBJECTS:
        return list(OBJECTS[name])
    [first, *_] = options = choices(hint)
    if get_origin(first) is Literal:
        return list(get_args(first))[:2]
    if is_typeddict(first):
        return [made(one) for one in options if is_typeddict(one)]
    if first is str:
        return list(TEXTS.get(name, ("x", "y")))
    if first in (bool, int, float):
        return [first(1), first(0)]
    items = get_args(first)
    if len(items) == 1:
        return [[one] for one in values(items[0], name)]
    return [{}, {"a": "b"}]


def made(kind: Any) -> dict[str, Any]:
    """A value with what it must have."""
    hints = get_type_hints(kind)
    return {name: values(hints[name], name)[0] for name in required(kind)}


def places(hint: Any) -> Iterator[tuple[Any, bool]]:
    """The typed dictionaries that may stand in a field, and whether as an element of a list."""
    for one in choices(hint):
        if is_typeddict(one):
            yield one, False
        elif len(get_args(one)) == 1:
            yield from ((kind, True) for kind in choices(get_args(one)[0]) if is_typeddict(kind))


def name_of(kind: Any, value: Mapping[str, Any]) -> str:
    """How API.md calls it: by its `type` or `role`, if it has one."""
    return str(value.get("type") or value.get("role") or "")


class Walk:
    """What of a dialect's values has no effect."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.without_effect: set[str] = set()
        self.known: set[str] = set()

    def parsed(self, body: Mapping[str, Any]) -> str:
        try:
            parsed = repr(self.case.dialect.parse(body, {}))
        except InvalidRequest as refused:
            return f"refused: {refused.param}"
        return "refused: an image" if IMAGE_REFUSED.search(parsed) else parsed

    def run(self) -> None:
        hints = get_type_hints(self.case.params)
        for field in self.case.fields:
            first = self.case.body.get(field, [])

            def at(value: Any, field: str = field, first: Any = first) -> dict[str, Any]:
                added = [*first, *value] if isinstance(value, list) else value
                return {"model": "m", **self.case.body, field: added}

            self.inside(hints[field], at, field, frozenset())

    def inside(self, hint: Any, build: Build, path: str, above: frozenset[Any]) -> None:
        for kind, in_list in places(hint):
            if kind in above:
                continue

            def at(value: Any, in_list: bool = in_list) -> dict[str, Any]:
                return build([value] if in_list else value)

            self.value(kind, at, path, above | {kind}, alone=sum(1 for _ in places(hint)) == 1)

    def value(self, kind: Any, build: Build, path: str, above: frozenset[Any], *, alone: bool) -> None:
        """`alone`: no other kind may stand in its place, so nobody looks which it is."""
        least = made(kind)
        name = name_of(kind, least)
        path = f"{path}.{name}" if name else path
        self.known.add(path)
        parsed = self.parsed(build(least))
        if parsed.startswith("refused: "):
            return
        if name and "role" not in least and not alone and parsed == self.parsed(build({"type": "unheard_of"})):
            self.without_effect.add(path)
            return
        hints = get_type_hints(kind)
        for field, hint in hints.items():
            if field in ("type", "role"):
                continue
            self.known.add(f"{path}.{field}")
            tried = [{**least, field: value} for value in values(hint, field)]
            tried += [{k: v for k, v in least.items() if k != field}] if field in least else []
            if all(self.parsed(build(value)) == parsed for value in tried):
                self.without_effect.add(f"{path}.{field}")
            else:

                def at(value: Any, field: str = field) -> dict[str, Any]:
                    return build({**least, field: value})

                self.inside(hint, at, f"{path}.{field}", above)


def told(name: str) -> set[str]:
    """The patterns in the table of API.md; what is inside of `additional_tools` is told with `tools`."""
    table = API.read_text().split("| API | inside of | without effect |")[1].split("\n\n")[0]
    rows = re.findall(rf"^\| {name} \| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    return {f"{field}.{each}" for field, cell in rows for each in re.findall(r"`([\w.*]+)`", cell)}


@pytest.mark.parametrize("name", CASES)
def test_found_by_use_8_every_field_inside_of_another_is_honoured_refused_or_told(name: str) -> None:
    walk = Walk(CASES[name])
    walk.run()
    known, without_effect = (
        {path.replace("input.additional_tools.tools.", "tools.") for path in paths}
        for paths in (walk.known, walk.without_effect)
    )
    matching = {pattern: {path for path in known if fnmatchcase(path, pattern)} for pattern in told(name)}
    assert sorted(without_effect.difference(*matching.values())) == [], "neither honoured nor told"
    wrong = {pattern: sorted(paths - without_effect) for pattern, paths in matching.items()}
    assert {pattern: paths for pattern, paths in wrong.items() if paths} == {}, "told to be without effect, but it has"
    assert [pattern for pattern, paths in matching.items() if not paths] == [], "nothing of this SDK"
