"""Finds out which messages a chat template accepts and how it opens a turn, by rendering it.

A template is a program, so its text tells little. At start, it is rendered once for each of several small conversations
whose texts are unique marks:

    ...<|im_start|>user\\nUMARK<|im_end|>\\n<|im_start|>assistant\\nAMARK<|im_end|>\\n
                        |---- user's end -----|------- opener -----|

The end of a turn is the text after its mark at the end of a prompt. The rest of the text between two marks opens the
second turn. An opener that cannot be found this way is left out, which costs checkpoints and labels, but never changes
an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from parkd.engine_adapter.base import ChatTemplate
from parkd.identity.tokens import common_chars

_SYSTEM, _SYSTEM_2, _USER, _USER_2, _ANSWER, _RESULT = (
    "Qsysmark",
    "Qsynmark",
    "Qusemark",
    "Qusnmark",
    "Qansmark",
    "Qresmark",
)
_CALL, _ARGUMENT, _VALUE = "qcallmark", "qargmark", "Qvalmark"
_CALLS = (_CALL, "othermark")
"""Names of tools that have no beginning in common."""
_CALL_ID = "callqmark"
"""Nine letters: some templates refuse any other length."""

_NO_KWARGS: Mapping[str, Any] = {}
_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "qtool",
            "description": "q",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    },
)


_LAST_MARK = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
"""A token of structure at the end of a text, as templates write them."""
_HALF_MARK = re.compile(r"(<[^<>]*|\[[^\[\]]*)$")
"""The beginning of a token at the end of a text."""
THOUGHT = "reasoning_content"
"""The field of an assistant message in which clients send thinking back, in canonical form."""


class SystemInside(StrEnum):
    """How to render a system message that is not the first message."""

    IN_PLACE = "in-place"
    USER = "user"
    """As a user turn at its place, since the template refuses, drops or moves it."""
    MERGED = "merged"
    """As USER, but joined with the user turn before or after it, since turns must alternate."""


@dataclass(frozen=True)
class TemplateProfile:
    """The form of messages that this template requires."""

    arguments_as_text: bool = False
    """Whether arguments of tool calls are JSON text; otherwise they are an object."""
    calls_want_none: bool = False
    """Whether an assistant message with calls alone has content None; otherwise it is an empty string."""
    system_first: bool = True
    """Whether the template renders a first system message; otherwise it becomes a user turn."""
    systems_lead: bool = True
    """Whether several system messages may come first; otherwise they are joined."""
    system_inside: SystemInside = SystemInside.IN_PLACE
    openers: Mapping[str, str] = field(default_factory=dict)
    """Role -> the text that opens its turn, if that is known."""
    generation_prompt: str = ""
    """The text that `add_generation_prompt` adds; may be empty."""
    answer_openers: tuple[str, ...] = ()
    """The tokens at the end of other turns behind which an answer begins, where the template opens it with nothing."""
    thought_in_blocks: bool = False
    """Whether thinking is shown only as a part of the content: `{"type": "thinking", "thinking": ...}`."""
    thought_excludes_text: bool = False
    """Whether a message with calls must not have both thinking and text."""
    written: str = field(default="", repr=False)
    """All that the template wrote for these conversations."""


def probe_template(template: ChatTemplate) -> TemplateProfile:
    """Profiles a template by rendering about twenty small conversations. Never raises if the template refuses some."""
    probe = _Probe(template)
    as_text = probe.arguments_as_text()
    want_none = probe.calls_want_none(as_text)
    probe.thoughts(as_text, want_none)
    system_first = probe.in_order([_say("system", _SYSTEM), _say("user", _USER)])
    lead = [_say("system", _SYSTEM)] if system_first else []
    generation_prompt = probe.generation_prompt()
    profile = TemplateProfile(
        arguments_as_text=as_text,
        calls_want_none=want_none,
        system_first=system_first,
        systems_lead=system_first and probe.in_order([*lead, _say("system", _SYSTEM_2), _say("user", _USER)]),
        system_inside=probe.system_inside(lead),
        openers=probe.openers(as_text, want_none, generation_prompt),
        generation_prompt=generation_prompt,
        answer_openers=probe.answer_openers(as_text, want_none),
    )
    in_blocks, excludes = probe.thought_form(as_text, want_none)
    profile = replace(profile, thought_in_blocks=in_blocks, thought_excludes_text=excludes)
    return replace(profile, written="\n".join(probe.written))


def as_shown(message: Mapping[str, Any], profile: TemplateProfile) -> Mapping[str, Any]:
    """A canonical message with its thinking where the template looks for it. Text that may not stand beside thinking
    and calls becomes the end of the thinking: so nothing that was said is lost."""
    thought, content = message.get(THOUGHT), message.get("content")
    if not thought or not isinstance(thought, str) or message.get("role") != "assistant":
        return message
    if profile.thought_excludes_text and message.get("tool_calls") and content and isinstance(content, str):
        empty = None if profile.calls_want_none else ""
        message = {**message, THOUGHT: f"{thought}\n\n{content}", "content": empty}
    return _with_blocks(message) if profile.thought_in_blocks else message


def _with_blocks(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    blocks = [{"type": "thinking", "thinking": message[THOUGHT]}, *text]
    return {**{name: value for name, value in message.items() if name != THOUGHT}, "content": blocks}


def _say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(as_text: bool, content: str | None, name: str = _CALL) -> dict[str, Any]:
    arguments: Any = f'{{"{_ARGUMENT}": "{_VALUE}"}}' if as_text else {_ARGUMENT: _VALUE}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return _say("assistant", content, tool_calls=[call])


class _Probe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.written: list[str] = []

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: bool = False,
        generation: bool = False,
        kwargs: Mapping[str, Any] = _NO_KWARGS,
    ) -> str | None:
        """The rendered text; None if the template refuses. One that needs tools gets them."""
        for shown in (_TOOLS,) if tools else ((), _TOOLS):
            text = self._rendered(messages, shown, kwargs, generation=generation)
            if text is not None:
                self.written.append(text)
                return text
        return None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        generation: bool,
    ) -> str | None:
        try:
            return self._template.render(messages, tools, kwargs, add_generation_prompt=generation).proven()
        except Exception:  # a template may raise anything; a refusal is a result here
            return None

    def thoughts(self, as_text: bool, want_none: bool) -> None:
        """Renders what shows the marks of thinking, calls and results; `written` is all that is wanted of it."""
        call = _call(as_text, None if want_none else "")
        thought = {**call, "reasoning_content": _ANSWER, "thinking": _ANSWER}
        result = _say("tool", _RESULT, tool_call_id=_CALL_ID, name=_CALL)
        self.text([_say("user", _USER), thought, result], tools=True, generation=True)
        self.text([_say("user", _USER), _say("assistant", _ANSWER, reasoning_content=_SYSTEM)])
        for thinks in (True, False):
            self.text([_say("user", _USER)], generation=True, kwargs={"enable_thinking": thinks, "thinking": thinks})

    def in_order(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether each message's content appears exactly once, in the order of the messages."""
        text = self.text(messages)
        if text is None:
            return False
        marks = [message["content"] for message in messages]
        found = [text.find(mark) for mark in marks]
        return found == sorted(found) and found[0] >= 0 and all(text.count(mark) == 1 for mark in marks)

    def arguments_as_text(self) -> bool:
        for content in ("", None):
            text = self.text([_say("user", _USER), _call(False, content)], tools=True)
            if text is not None and _VALUE in text and f"'{_ARGUMENT}'" not in text:
                return False
        return any(
            _VALUE in (self.text([_say("user", _USER), _call(True, content)], tools=True) or "")
            for content in ("", None)
        )

    def calls_want_none(self, as_text: bool) -> bool:
        def shown(content: str | None) -> bool:
            return _CALL in (self.text([_say("user", _USER), _call(as_text, content)], tools=True) or "")

        return not shown("") and shown(None)

    def system_inside(self, lead: Sequence[Mapping[str, Any]]) -> SystemInside:
        turns = [*lead, _say("user", _USER), _say("assistant", _ANSWER)]
        if self.in_order([*turns, _say("system", _SYSTEM_2), _say("user", _USER_2)]):
            return SystemInside.IN_PLACE
        if self.in_order([*turns, _say("user", _SYSTEM_2), _say("user", _USER_2)]):
            return SystemInside.USER
        return SystemInside.MERGED

    def generation_prompt(self) -> str:
        without = self.text([_say("user", _USER)])
        with_it = self.text([_say("user", _USER)], generation=True)
        if without is None or with_it is None or not with_it.startswith(without):
            return ""
        return with_it[len(without) :]

    def answer_openers(self, as_text: bool, want_none: bool) -> tuple[str, ...]:
        """See `TemplateProfile`; of a user's turn, and of a result."""
        user = [_say("user", _USER)]
        result = _say("tool", _RESULT, tool_call_id=_CALL_ID, name=_CALL)
        called = [*user, _call(as_text, None if want_none else ""), result]
        found: list[str] = []
        for turns, tools in ((user, False), (called, True)):
            text, prompt = (self.text(turns, tools=tools, generation=opens) for opens in (False, True))
            if text is None or text != prompt:
                continue
            end = _LAST_MARK.search(text)
            found += [end[1]] if end is not None and end.start() > max(text.rfind(_USER), text.rfind(_RESULT)) else []
        return tuple(dict.fromkeys(found))

    def thought_form(self, as_text: bool, want_none: bool) -> tuple[bool, bool]:
        """Whether thinking is shown only in blocks, and whether text beside it is refused in a message with calls."""
        user = _say("user", _USER)
        result = _say("tool", _RESULT, tool_call_id=_CALL_ID, name=_CALL)
        call = {**_call(as_text, None if want_none else ""), THOUGHT: _ANSWER}
        said = _say("assistant", _SYSTEM, **{THOUGHT: _ANSWER})

        def shown(form: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> bool:
            texts = (self.text([user, form(call), result], tools=True), self.text([user, form(said)]))
            return any(_shows(text, _ANSWER) for text in texts)

        if shown(lambda message: message):
            alone, both = (self.text([user, each, result], tools=True) for each in (call, {**call, "content": _SYSTEM}))
            return False, alone is not None and both is None
        return shown(_with_blocks), False

    def openers(self, as_text: bool, want_none: bool, generation_prompt: str) -> dict[str, str]:
        turns = [_say("user", _USER), _say("assistant", _ANSWER), _say("user", _USER_2)]
        talk = self.text(turns)
        system = self.text([*turns[:2], _say("system", _SYSTEM_2), _say("user", _USER_2)])
        user_end = self.end_after(turns[:1], _USER)
        # The last answer of a conversation may end otherwise than one that others follow, which ends as a message does.
        answer_ends = (self.end_after(turns[:2], _ANSWER), user_end)
        assistant = _opener(talk, _USER, (user_end,), _ANSWER)
        # An answer may begin with other marks: of thinking, of none, or of a call.
        shared = _HALF_MARK.sub("", assistant[: common_chars(assistant, generation_prompt)])
        assistant = shared or assistant
        look, other = (self.tool_opener(as_text, want_none, name) for name in _CALLS)
        found = {
            "user": _opener(talk, _ANSWER, answer_ends, _USER_2),
            "assistant": assistant,
            "system": _opener(system, _ANSWER, answer_ends, _SYSTEM_2),
            "tool": look[: common_chars(look, other)],
        }
        return {role: opener for role, opener in found.items() if opener}

    def tool_opener(self, as_text: bool, want_none: bool, name: str) -> str:
        """The text that opens the result of a call to this tool."""
        call = _call(as_text, None if want_none else "", name)
        calls = [_say("user", _USER), call, _say("tool", _RESULT, tool_call_id=_CALL_ID, name=name)]
        return _opener(self.text(calls, tools=True), _VALUE, (self.end_after(calls[:2], _VALUE, tools=True),), _RESULT)

    def end_after(self, messages: Sequence[Mapping[str, Any]], mark: str, *, tools: bool = False) -> str | None:
        """The text after the last message's mark."""
        _, found, end = (self.text(messages, tools=tools) or "").rpartition(mark)
        return end if found else None


def _shows(text: str | None, mark: str) -> bool:
    """Whether the mark is in the text, and not within quotes, as in a list that is written as it is."""
    place = -1 if text is None else text.find(mark)
    return text is not None and place >= 0 and text[place + len(mark) :][:1] not in ("'", '"')


def _opener(text: str | None, before: str, ends: Sequence[str | None], mark: str) -> str:
    """The text between the end of the turn with `before`, which is one of `ends`, and `mark`; empty if that cannot be
    found."""
    if text is None:
        return ""
    start, stop = text.find(before), text.find(mark)
    if start < 0 or stop < start:
        return ""
    gap = text[start + len(before) : stop]
    return next((gap[len(end) :] for end in ends if end is not None and gap.startswith(end)), "")
