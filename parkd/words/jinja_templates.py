"""Chat templates in Jinja, as their authors tried them: with what transformers gives them, in a sandbox.

The environment and the functions are those of transformers' documentation ("Chat templates", "Writing a chat
template"): `trim_blocks`, `lstrip_blocks`, loop controls, `tojson` without escapes, `raise_exception`,
`strftime_now`, and the block `generation`. Templates come from strangers: they see plain values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

COMPILED_TEMPLATES = 16
"""Kept, since compiling one takes milliseconds."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of what a message thought, the one that most templates read first; gpt-oss's reads `thinking`."""


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model said, for training: here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainDict:
    """`dict` as templates may call it; the class itself would let them reach what it inherits."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class PlainNamespace(Namespace):
    """A namespace without names of Python's own, through which a template could leave the sandbox."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *values = given
        Namespace.__init__(self)
        for name, value in dict(*values, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"A chat template cannot keep a value under the name {name!r}.")
        super().__setitem__(name, value)


def render(
    source: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    named: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text that the template makes. Messages keep their own type, which may want to know when they are read. Raises
    TemplateError, and whatever else a template can fail with."""
    values = {"documents": None, **{name: plain(value) for name, value in named.items()}}
    return _compiled(source).render(
        messages=[_shown(message) for message in messages],
        tools=plain(tools),
        add_generation_prompt=add_generation_prompt,
        **values,
    )


def plain(value: Any) -> Any:
    """The value in dicts, lists, tuples, texts and numbers. Anything else becomes its type's name: it may have methods,
    and the sandbox does not know which of them do harm."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # without what an enumeration or a subclass adds
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.generic):
        return plain(value.item())
    return f"<{type(value).__name__}>"


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    values = _with_thoughts(plain(message))
    if type(message) is dict:
        return values
    shown = copy(message)
    shown.clear()
    shown.update(values)
    return shown


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with what it thought under all names that templates read."""
    thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


@lru_cache(maxsize=COMPILED_TEMPLATES)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, dict=PlainDict(), namespace=PlainNamespace)
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
