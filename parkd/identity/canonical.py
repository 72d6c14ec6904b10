"""Converts messages to a canonical form that a model's template accepts, so that equal messages give equal values.

Clients write the same message in many ways: a string or a list of text parts, `null` fields, cache hints that move with
every request, arguments as a string or an object. If the template saw these differences, the prompt's tokens would
differ and no state could be reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parkd.identity.profile import SystemInside, TemplateProfile
from parkd.identity.surrogates import mended
from parkd.types import Message

PART_SEPARATOR = "\n"
"""Separates text parts of one message that are joined for a template that takes strings only."""

MERGE_SEPARATOR = "\n\n"
"""Separates messages that are joined into one turn because the template requires it."""

_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """A message in the form that the template takes, and its origin."""

    message: dict[str, Any]
    origin: int
    """Index of the client's message; if several were joined, of the first."""
    last_origin: int
    role: str
    """The client's role; `system` for `developer`."""


def canonical_content(content: Any) -> str | list[dict[str, Any]]:
    """The content: a string if there is only text, else a list of parts, text parts as `{"type": "text", "text":
    ...}`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence):
        return str(content)
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, Mapping):
            text = part.get("text")
            if isinstance(text, str) and part.get("type", "text") in _TEXT_PARTS:
                parts.append({"type": "text", "text": text})
            else:
                parts.append({name: value for name, value in part.items() if name != "cache_control"})
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return PART_SEPARATOR.join(part["text"] for part in parts)
    return parts


def canonical_arguments(arguments: Any, *, as_text: bool) -> Any:
    """Arguments of a tool call, as an object or as JSON text with uniform spacing. Text that is not a JSON object is
    left as it is."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(mended(arguments)) if arguments.strip() else {}
        except ValueError:
            return arguments
        if not isinstance(value, dict):
            return arguments
    elif arguments is None:
        value = {}
    return json.dumps(value, ensure_ascii=False) if as_text else value


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions without cache hints. A parameter that has the name of a cache hint is kept."""
    result = []
    for tool in tools:
        clean = {name: value for name, value in tool.items() if name != "cache_control"}
        function = clean.get("function")
        if isinstance(function, Mapping) and "cache_control" in function:
            clean["function"] = {name: value for name, value in function.items() if name != "cache_control"}
        result.append(clean)
    return result


def canonical_messages(
    messages: Sequence[Message], profile: TemplateProfile, *, first_origin: int = 0
) -> list[CanonicalMessage]:
    """One message for each turn that the template renders, in order.

    `first_origin` is the index, in the client's list, of `messages[0]`.
    """
    turns: list[CanonicalMessage] = []
    leading = True
    for offset, message in enumerate(messages):
        turn = _canonical(message, profile, first_origin + offset)
        leading = leading and turn.role == "system"
        if turn.role == "system":
            _place_system(turns, turn, profile, leading=leading)
        else:
            _append(turns, turn, profile)
    return turns


def _canonical(message: Message, profile: TemplateProfile, origin: int) -> CanonicalMessage:
    clean = {
        name: value
        for name, value in message.items()
        if value is not None and name not in ("cache_control", "content", "tool_calls", "role")
    }
    role = str(message.get("role", "user"))
    role = "system" if role == "developer" else role
    content: Any = canonical_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        clean["tool_calls"] = [_canonical_call(call, profile) for call in calls]
        if content == "" and profile.calls_want_none:
            content = None
    return CanonicalMessage({"role": role, "content": content, **clean}, origin, origin, role)


def _canonical_call(call: Any, profile: TemplateProfile) -> Any:
    if not isinstance(call, Mapping):
        return call
    clean = {
        name: value for name, value in call.items() if value is not None and name not in ("cache_control", "index")
    }
    function = clean.get("function")
    if isinstance(function, Mapping):
        arguments = canonical_arguments(function.get("arguments"), as_text=profile.arguments_as_text)
        clean["function"] = {**function, "arguments": arguments}
    clean.setdefault("type", "function")
    return clean


def _place_system(
    turns: list[CanonicalMessage], turn: CanonicalMessage, profile: TemplateProfile, *, leading: bool
) -> None:
    """A system message at its original place; as a user turn if the template allows no system message there."""
    if not leading:
        if profile.system_inside is not SystemInside.IN_PLACE:
            turn = replace(turn, message={**turn.message, "role": "user"})
        _append(turns, turn, profile)
    elif not profile.system_first:
        _append(turns, replace(turn, message={**turn.message, "role": "user"}), profile)
    elif turns and not profile.systems_lead:
        turns[-1] = _merged(turns[-1], turn)
    else:
        turns.append(turn)


def _append(turns: list[CanonicalMessage], turn: CanonicalMessage, profile: TemplateProfile) -> None:
    both_user = bool(turns) and turns[-1].message["role"] == "user" == turn.message["role"]
    if both_user and profile.system_inside is SystemInside.MERGED:
        turns[-1] = _merged(turns[-1], turn)
    else:
        turns.append(turn)


def _merged(into: CanonicalMessage, turn: CanonicalMessage) -> CanonicalMessage:
    """Joins two turns. The first stays in front, so that a prefix of the conversation remains a prefix."""
    first, second = into.message["content"], turn.message["content"]
    content: Any
    if isinstance(first, str) and isinstance(second, str):
        content = MERGE_SEPARATOR.join(text for text in (first, second) if text)
    else:
        content = _parts(first) + _parts(second)
    return replace(into, message={**into.message, "content": content}, last_origin=turn.last_origin)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
