"""Where messages are in a rendered prompt: labels for people, and the positions at which a later prompt may fork.

    text    |<|im_start|>system\\nYou ...|<|im_end|>\\n|<|im_start|>user\\nHi ...|...|<|im_start|>assistant\\n
    cuts    ^                          ^            ^                         ...   ^
            opener of `system`                      opener of `user`                generation prompt

A message is found at a cut where the text opens a turn of its role and contains the beginning of its content before the
next opener. Messages that are not found are left out: a missing or wrong boundary costs a checkpoint, never a wrong
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parkd.identity.canonical import CanonicalMessage
from parkd.identity.profile import TemplateProfile
from parkd.identity.render import RenderedPrompt
from parkd.identity.tokens import MARK_CHARS, SegmentTokenizer, TokenisedText
from parkd.types import SegmentSpan

_LOOK_AHEAD = 8
"""Most openers of a role that are tried for one message, which bounds the cost of text that imitates openers."""

_HEAD_CHARS = 48
"""Leading characters of a message's content by which it is recognised."""

_THOUGHT_END = "</think>"


@dataclass(frozen=True, slots=True)
class PromptMap:
    segments: tuple[SegmentSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    generation_stays: bool = False
    template_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """Where turns begin in a text."""

    openers: Sequence[tuple[int, frozenset[str]]]
    """`(char, roles)` of every cut that opens a turn."""
    starts: dict[int, int]
    """Turn index to the character at which the turn begins, for turns that were found."""


class OpenerMarks:
    """The `mark` of a `SegmentTokenizer`: the roles whose turns open at a cut."""

    def __init__(self, profile: TemplateProfile) -> None:
        openers = {role: opener for role, opener in profile.openers.items() if len(opener) <= MARK_CHARS}
        self._openers = tuple(dict.fromkeys(openers.values()))
        self._roles = {
            opener: frozenset(role for role, other in openers.items() if other == opener) for opener in self._openers
        }
        self._ends = tuple(end for end in profile.answer_openers if end not in self._roles)
        """Of other turns, behind which an answer begins unless another turn does."""

    def __call__(self, text: str, cut: int) -> frozenset[str]:
        if self._ends and text.startswith(self._ends, cut):
            behind = cut + max(len(end) for end in self._ends if text.startswith(end, cut))
            return frozenset() if text.startswith(self._openers, behind) else frozenset({"assistant"})
        if not text.startswith(self._openers, cut):
            return frozenset()
        return frozenset().union(*[self._roles[opener] for opener in self._openers if text.startswith(opener, cut)])


def locate(prompt: RenderedPrompt, tokenised: TokenisedText, plain: str) -> Located:
    """Finds the turns of a prompt in its text, whose marks are those of `OpenerMarks`. `plain` is the same text
    without stand-ins."""
    if not prompt.turns:
        return Located((), {})
    openers = _find_openers(tokenised)
    return Located(openers, _find_turns(prompt.turns, plain, openers))


def map_prompt(
    prompt: RenderedPrompt,
    tokenised: TokenisedText,
    plain: str,
    tokenizer: SegmentTokenizer,
    profile: TemplateProfile,
    located: Located,
) -> PromptMap:
    """Segments cover the whole prompt without gaps; boundaries are ascending, inside `(0, n)`."""
    length = len(tokenised.ids)
    if not prompt.turns:
        return PromptMap((SegmentSpan(0, length, "prompt"),) if length else ())
    openers, starts = located.openers, located.starts
    generation = _find_generation(tokenised.text, openers, starts, profile)
    lead = next((i for i, turn in enumerate(prompt.turns) if turn.role != "system"), len(prompt.turns))
    head_end = _head_end(prompt.turns, lead, starts, plain)
    head_position = tokenizer.position_of(tokenised, head_end) if head_end is not None else None
    positions = {index: tokenizer.position_of(tokenised, char) for index, char in starts.items()}
    if head_position is not None:
        # Where the system text lies inside the first turn, that turn's own part begins where the system text ends.
        positions[lead] = head_position
    marks = {positions[index]: _label(prompt.turns, index, starts) for index in starts if index >= lead}
    boundaries = {position for position in (head_position,) if position is not None}
    users = [index for index in starts if prompt.turns[index].message["role"] == "user"]
    if users:
        boundaries.add(positions[users[-1]])
    boundaries |= {positions[index] for index in starts if prompt.turns[index].role == "assistant"}
    stays = False
    if generation is not None:
        opened = tokenised.text[generation:]
        stays = profile.openers.get("assistant", "").startswith(opened) or opened.startswith(profile.answer_openers)
        position = tokenizer.position_of(tokenised, generation)
        marks[position] = "generation prompt"
        boundaries.add(position)
    head_label = _head_label(bool(lead), prompt.has_tools)
    return PromptMap(
        _spans(marks, head_label, length),
        tuple(sorted(position for position in boundaries if 0 < position < length)),
        stays,
        _template_tokens(prompt, tokenised, tokenizer, profile, starts),
    )


def _template_tokens(
    prompt: RenderedPrompt,
    tokenised: TokenisedText,
    tokenizer: SegmentTokenizer,
    profile: TemplateProfile,
    starts: Mapping[int, int],
) -> int:
    """Tokens before the first message's content. 0 with tools, which are the client's own and may stand there."""
    if prompt.has_tools or 0 not in starts:
        return 0
    opener = profile.openers.get(prompt.turns[0].message["role"], "")
    end = starts[0] + len(opener) if tokenised.text.startswith(opener, starts[0]) else starts[0]
    return tokenizer.position_of(tokenised, end)


def _find_openers(tokenised: TokenisedText) -> list[tuple[int, frozenset[str]]]:
    """`(char, roles)` of every cut that opens a turn; roles may share the start of their openers."""
    return [(cut, roles) for cut, roles in zip(tokenised.cuts, tokenised.marks, strict=False) if roles]


def _find_turns(
    turns: Sequence[CanonicalMessage], text: str, openers: Sequence[tuple[int, frozenset[str]]]
) -> dict[int, int]:
    """Turn index to the character its turn starts at, ascending in both, for those that are found.

    A turn without an opener of its own, as a second tool result has in some templates, is not looked for beyond the
    next answer: turns are written in order, so what contains its text there is another turn.
    """
    starts: dict[int, int] = {}
    ends = [char for char, _ in openers[1:]] + [len(text)]
    reached = answers_before = 0
    for index, turn in enumerate(turns):
        heads = _heads(turn.message)
        tried = answers_passed = 0
        for place in range(reached, len(openers)):
            char, roles = openers[place]
            if turn.message["role"] not in roles:
                # One answer may have several openers in a row: of its thought, and of its call.
                answers_passed += "assistant" in roles and not (place and "assistant" in openers[place - 1][1])
                if answers_passed > answers_before and turn.message["role"] != "assistant":
                    break
                continue
            if any(text.find(head, char, ends[place]) >= 0 for head in heads):
                first = place
                while turn.message["role"] == "assistant" and first > reached and "assistant" in openers[first - 1][1]:
                    first -= 1  # One answer may have several openers in a row, and this text is behind a later one.
                starts[index] = openers[first][0]
                reached, answers_before = place + 1, 0
                break
            tried += 1
            if tried == _LOOK_AHEAD:
                break
        if index not in starts:
            answers_before += turn.message["role"] == "assistant"
    return starts


def _heads(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts of which one is in the rendered message. Some templates drop the text beside calls."""
    head, calls = _head(message["content"]), message.get("tool_calls")
    if not calls or not isinstance(calls, Sequence) or not isinstance(calls[0], Mapping):
        return (head,)
    function = calls[0].get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        return (head,)
    return (head, name) if head else (name,)


def _head(content: object) -> str:
    if isinstance(content, list):
        content = next((part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text"), "")
    if not isinstance(content, str):
        return ""
    # A template may move a thought out of the content; what follows it stays.
    start = content.rfind(_THOUGHT_END) + len(_THOUGHT_END) if _THOUGHT_END in content else 0
    head = content[start : start + 2 * _HEAD_CHARS].strip()[:_HEAD_CHARS]
    return head if len(head) == _HEAD_CHARS else content[start:].strip()[:_HEAD_CHARS]


def _find_generation(
    text: str, openers: Sequence[tuple[int, frozenset[str]]], starts: dict[int, int], profile: TemplateProfile
) -> int | None:
    """The last opener, if it opens an answer and no message begins there or later."""
    if not openers or not (profile.generation_prompt or profile.answer_openers):
        return None
    char, roles = openers[-1]
    prompt = profile.generation_prompt
    opens = "assistant" in roles or (bool(prompt) and text.startswith(prompt, char))
    return char if opens and char > max(starts.values(), default=-1) else None


def _head_end(turns: Sequence[CanonicalMessage], lead: int, starts: dict[int, int], text: str) -> int | None:
    """The character at which system and tools end: the first other message, or the end of the system text in it."""
    first = starts.get(lead)
    if first is None:
        return None
    if lead:
        content = turns[lead - 1].message["content"]
        system = content.strip() if isinstance(content, str) else ""
        found = text.find(system) if system else -1
        if found > first:
            return found + len(system)
    return first


def _head_label(has_system: bool, has_tools: bool) -> str:
    if has_system and has_tools:
        return "system and tools"
    return "system" if has_system else "tools" if has_tools else "template"


def _label(turns: Sequence[CanonicalMessage], index: int, starts: dict[int, int]) -> str:
    """Names a message as the client counts, from 1; with it those that follow unfound."""
    stop = index + 1
    while stop < len(turns) and stop not in starts:
        stop += 1
    first, last = turns[index].origin, turns[stop - 1].last_origin
    if last > first:
        return f"messages {first + 1} to {last + 1}"
    return f"message {first + 1} ({turns[index].role})"


def _spans(marks: dict[int, str], head_label: str, length: int) -> tuple[SegmentSpan, ...]:
    if marks and 0 not in marks:
        marks = {0: head_label, **marks}
    elif not marks:
        marks = {0: head_label}
    positions = sorted(marks)
    return tuple(
        SegmentSpan(start, stop, marks[start])
        for start, stop in zip(positions, [*positions[1:], length], strict=True)
        if start < stop
    )
