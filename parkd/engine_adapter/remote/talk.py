"""A chat as one text, and back: what is identified is what is sent.

    SETTINGS {...} END
    TOOLS [...] END
    SYSTEM You are ... END
    USER What is ... END
    ASSISTANT THINKING ... TEXT ... CALL name ARGUMENTS {...} END
    RESULT ... CALL 0 END
    ASSISTANT                                   what opens an answer; the answer is written in the same way, up to END

The ids of calls, which clients and servers draw at random, are not in it: calls count from 0, and get ids from their
numbers when they are sent. So an agent that makes new ids does not make a new prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from parkd.engine_adapter.base import Rendered
from parkd.engine_adapter.remote.alphabet import FIRST_MARK_ID, Ids, Mark, text_of
from parkd.errors import InvalidRequest

ROLES = {"system": Mark.SYSTEM, "user": Mark.USER, "assistant": Mark.ASSISTANT, "tool": Mark.RESULT}
_ROLE_OF = {mark: role for role, mark in ROLES.items()}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's thinking in messages of clients."""
UNKNOWN_CALL = "="
"""Before the id of a call that is not in the messages."""


@dataclass(frozen=True)
class Talk:
    """What a server is asked."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False
    """An answer is to follow, or to go on."""
    begun: str = ""
    """The beginning of the answer; it is also the last message then."""


class TalkTemplate:
    """A `ChatTemplate`. Stateless."""

    def __init__(self, *, sends_thoughts: bool) -> None:
        """`sends_thoughts`: the server takes back the thinking of earlier answers; else it is left out."""
        self._sends_thoughts = sends_thoughts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        parts: list[str] = []
        if kwargs:
            parts += [Mark.SETTINGS.text, _json(dict(kwargs)), Mark.END.text]
        if tools:
            parts += [Mark.TOOLS.text, _json(list(tools)), Mark.END.text]
        calls: dict[str, int] = {}
        made = 0
        for message in messages:
            made = self._write(message, parts, calls, made)
            parts.append(Mark.END.text)
        if add_generation_prompt:
            parts.append(Mark.ASSISTANT.text)
        return Rendered("".join(parts))

    def _write(self, message: Mapping[str, Any], parts: list[str], calls: dict[str, int], made: int) -> int:
        """Adds a message. `calls` are the numbers of calls by id, of which there are `made` so far. Returns how many
        there are then."""
        role, content = message.get("role"), message.get("content")
        mark = ROLES.get(role) if isinstance(role, str) else None
        if mark is None:
            raise InvalidRequest(
                f"The role {role!r} cannot be sent on. Use system, user, assistant or tool.", param="messages"
            )
        if content is not None and not isinstance(content, str):
            raise InvalidRequest(
                "Only text can be sent on to this server. Leave out other parts of messages.", param="messages"
            )
        parts.append(mark.text)
        name = message.get("name")
        if isinstance(name, str) and mark is not Mark.ASSISTANT:
            parts += [Mark.NAME.text, name]
        thought = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str)), "")
        if thought and self._sends_thoughts and mark is Mark.ASSISTANT:
            parts += [Mark.THINKING.text, thought]
        if content:
            parts += [Mark.TEXT.text, content] if parts[-1] != mark.text else [content]
        if mark is Mark.RESULT:
            call_id = str(message.get("tool_call_id", ""))
            parts += [Mark.CALL.text, str(calls[call_id]) if call_id in calls else UNKNOWN_CALL + call_id]
        for call in message.get("tool_calls") or () if mark is Mark.ASSISTANT else ():
            name, arguments, call_id = _call(call)
            parts += [Mark.CALL.text, name, Mark.ARGUMENTS.text, arguments]
            calls[call_id] = made
            made += 1
        return made


def _call(call: Any) -> tuple[str, str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequest("A tool call has no function with a name and arguments as text.", param="messages")
    return name, arguments, str(call.get("id", ""))


def _json(value: Any) -> str:
    """As the client wrote it: the order of names stays."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Piece:
    mark: Mark
    text: str


def _pieces(ids: Ids) -> Iterator[_Piece]:
    is_mark = ids >= FIRST_MARK_ID
    places: list[int] = np.flatnonzero(is_mark).tolist()
    text = text_of(np.where(is_mark, 0, ids))  # at once, since each piece alone takes longer than its characters
    for start, stop in zip(places, [*places[1:], len(ids)], strict=True):
        yield _Piece(Mark(int(ids[start]) - FIRST_MARK_ID), text[start + 1 : stop])


def plain_text(ids: Ids) -> str | None:
    """The text of a prompt without marks, which is no chat; None for a chat."""
    return text_of(ids) if not len(ids) or ids[0] < FIRST_MARK_ID else None


def read_talk(ids: Ids, *, thought_field: str = "reasoning_content") -> Talk:
    """The chat that a prompt is. `thought_field` is the name of an answer's thinking in messages."""
    tools, settings = [], {}
    messages: list[dict[str, Any]] = []
    message: _Message | None = None
    calls = 0
    for piece in _pieces(ids):
        match piece.mark:
            case Mark.SETTINGS:
                settings = orjson.loads(piece.text)
            case Mark.TOOLS:
                tools = orjson.loads(piece.text)
            case Mark.END:
                if message is not None:
                    messages.append(message.document(thought_field))
                message = None
            case Mark.SYSTEM | Mark.USER | Mark.ASSISTANT | Mark.RESULT:
                message = _Message(piece)
            case _ if message is not None:
                calls += message.take(piece, calls)
            case _:
                raise AssertionError(f"{piece.mark.name} outside of a message")
    if message is None:
        return Talk(messages, tools, settings)
    begun = message.document(thought_field)
    if begun.get("content") or begun.get("tool_calls") or thought_field in begun:
        messages.append(begun)
    return Talk(messages, tools, settings, is_open=True, begun=begun.get("content") or "")


def with_systems_lead(talk: Talk) -> Talk:
    """The same chat, with the user saying what the system says behind the first other message."""
    lead = next((n for n, each in enumerate(talk.messages) if each["role"] != "system"), len(talk.messages))
    rest = [{**each, "role": "user"} if each["role"] == "system" else each for each in talk.messages[lead:]]
    return replace(talk, messages=[*talk.messages[:lead], *rest])


class _Message:
    """A message while it is read."""

    def __init__(self, head: _Piece) -> None:
        self._role = head.mark
        self._called: str | None = None
        self._thought = ""
        self._texts = [head.text]
        self._calls: list[dict[str, Any]] = []
        self._name = ""

    def take(self, piece: _Piece, calls: int) -> int:
        """Adds a piece; `calls` are those before it in the chat. Returns how many calls it adds."""
        match piece.mark:
            case Mark.NAME:
                self._called = piece.text
            case Mark.THINKING:
                self._thought += piece.text
            case Mark.TEXT:
                self._texts.append(piece.text)
            case Mark.CALL:
                self._name = piece.text
            case Mark.ARGUMENTS:
                function = {"name": self._name, "arguments": piece.text}
                self._calls.append({"id": call_id_of(calls), "type": "function", "function": function})
                return 1
        return 0

    def document(self, thought_field: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": _ROLE_OF[self._role]}
        if self._called is not None:
            message["name"] = self._called
        if self._role is Mark.RESULT:
            number = self._name
            known = number.removeprefix(UNKNOWN_CALL) if number.startswith(UNKNOWN_CALL) else call_id_of(int(number))
            message["tool_call_id"] = known
        content = "".join(self._texts)
        message["content"] = content if content or not self._calls else None
        if self._thought:
            message[thought_field] = self._thought
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def call_id_of(number: int) -> str:
    """Nine letters and digits, which the templates of all models take."""
    return f"call{number:05d}"
