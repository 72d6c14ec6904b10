"""An agent's conversation under a published template: what its client sends, and what the model writes by it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import output_format
from parkd.answers.parser import make_parser
from parkd.answers.transcript import Transcript
from parkd.engine_adapter.base import Rendered
from parkd.errors import InvalidRequest
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory
from parkd.types import FinishReason, TurnRequest
from parkd.words.jinja_templates import render
from tests.unit.identity.identity_fakes import WordTokenizer

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
BLOCK = 256
BOS = "<|bos|>"
_MARK = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>|<SPECIAL_\d+>"
    r'|</?(?:think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call|seed:[a-z_]+|TOOLCALL)>|<\|"\|>'
    r"|\]~!?b[\]\[]|\[e~\["
)
"""What is a token in these families' vocabularies."""


def _tool(name: str, **properties: str) -> Message:
    of = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": of, "required": list(of)}
    return {"type": "function", "function": {"name": name, "description": f"Will {name}.", "parameters": parameters}}


TOOLS = [
    _tool("read_file", path="string", line="integer"),
    _tool("run", command="string", deep="boolean"),
    _tool("write_file", path="string", content="string"),
]
SYSTEM = "You are an agent. " + " ".join(f"Rule {number}: do what step {number * 7} asks." for number in range(400))


@dataclass(frozen=True)
class Step:
    """One answer."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()


STEPS = (
    Step("I think of the file.", "I read it.", (("read_file", {"path": "/a/b.py", "line": 12}),)),
    Step("Now run it.", "", (("run", {"command": "ls -la | grep \"x\" && echo 'y'", "deep": True}),)),
    Step("It works.", "", (("write_file", {"path": "c.txt", "content": "one\n  two <three>"}),)),
    Step("All done, I say so.", "It is done."),
    Step("They want more.", "", (("read_file", {"path": "d", "line": 1}),)),
    Step("That was it.", "Finished."),
)
QUESTION = 4
"""The step that answers a new question; before the others the client sends results."""


@dataclass(frozen=True)
class Published:
    """One template, and what its text does not say of the model."""

    file: str
    family: str
    ends: tuple[str, ...]
    thinks: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class PublishedTemplate:
    def __init__(self, source: str, end: str) -> None:
        self._source, self._end = source, end

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        try:
            text = render(
                self._source,
                [dict(message) for message in messages],
                [dict(tool) for tool in tools] or None,
                {"bos_token": BOS, "eos_token": self._end, **kwargs},
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            raise InvalidRequest(f"{type(error).__name__}: {error}") from error
        return Rendered(text)


@dataclass(frozen=True)
class Heard:
    """What a client got of one answer."""

    thought: str
    text: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Turn:
    """One later prompt, compared with what was known before it."""

    tokens: int
    known: int
    shared: int
    """Of the tokens known, those that the prompt begins with."""

    @property
    def reuse(self) -> float:
        return self.shared / self.tokens

    @property
    def is_whole(self) -> bool:
        return self.shared == self.known


class AgentTalk:
    """The conversation of `STEPS`; the answers are those of a model that writes as its template shows them."""

    def __init__(self, published: Published, folder: Path) -> None:
        self._published = published
        self.source = (folder / published.file).read_text(encoding="utf-8")
        self._template = PublishedTemplate(self.source, published.ends[0])
        marks = sorted({*_MARK.findall(self.source), BOS, *published.ends}, key=len, reverse=True)
        self._words = WordTokenizer(marks)
        self._memory = OutputMemory(1 << 20, published.ends)
        self.builder = IdentityBuilder(self._words, self._template, bytes(16), BLOCK, 1 << 22, answers=self._memory)
        self.output: OutputFormat = output_format(self.source)

    def run(self, *, thoughts_come_back: bool) -> tuple[list[Turn], list[tuple[str, Heard, Heard]]]:
        """The later prompts; and of each answer how it was cut, what was to be heard, and what was."""
        talk: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Look, and do it."}]
        known: list[int] = []
        turns: list[Turn] = []
        heard: list[tuple[str, Heard, Heard]] = []
        for number, step in enumerate(STEPS):
            request = TurnRequest(messages=talk, tools=TOOLS, template_kwargs=self._published.kwargs)
            prompt = self.builder.build(request)
            ids = prompt.token_ids.tolist()
            if known:
                turns.append(Turn(len(ids), len(known), _shared(known, ids)))
            thought = step.thought if self._published.thinks else ""
            message, results = self._message(number, step, thought), self._results(number, step)
            written, text = self._written(talk, step, thought, message, results)
            answer = self._words.encode(written)
            expected = Heard(thought, text, step.calls)
            transcript = Transcript()
            opening = self.builder.render(request)[-64:]
            for how, pieces in (
                ("whole", [written]),
                ("at every character", list(written)),
                ("at every token", [self._words.decode([token]) for token in answer]),
            ):
                transcript, told = self._heard(request, opening, pieces)
                heard.append((f"answer {number}, {how}: {written!r}", expected, told))
            said = transcript.said()
            assert said is not None
            self._memory.remember(prompt, answer, said)
            known = [*ids, *answer]
            back = self._message(number, step, thought if thoughts_come_back else "", resorted=True)
            talk = [*talk, back, *results]
        return turns, heard

    def _heard(self, request: TurnRequest, opening: str, pieces: Sequence[str]) -> tuple[Transcript, Heard]:
        parser, transcript = make_parser(self.output, request, opening, lambda: "id"), Transcript()
        events = [event for piece in pieces for event in parser.push(piece)]
        last, _ = parser.finish(FinishReason.STOP)
        for event in (*events, *last):
            transcript.feed(event)
        said = transcript.said()
        assert said is not None, "the arguments of a call are whole"
        calls = tuple((name, json.loads(arguments)) for name, arguments in said.calls)
        return transcript, Heard(said.reasoning.strip(), "".join(said.runs).strip(), calls)

    def _message(self, number: int, step: Step, thought: str, *, resorted: bool = False) -> Message:
        """As a client sends it: keys of arguments may come back in another order."""
        message: Message = {"role": "assistant", "content": step.text}
        if step.calls:
            message["tool_calls"] = [
                {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(
                    dict(reversed(arguments.items())) if resorted else arguments)}}
                for name, arguments in step.calls
            ]  # fmt: skip
        return {**message, "reasoning_content": thought} if thought else message

    def _results(self, number: int, step: Step) -> list[Message]:
        if not step.calls:
            return [{"role": "user", "content": f"And what then, {number}?"}]
        return [
            {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": f"result {number}"}
            for name, _ in step.calls
        ]

    def _rendered(self, talk: Sequence[Message], *, opens: bool) -> str:
        request = TurnRequest(messages=talk, tools=TOOLS, template_kwargs=self._published.kwargs, opens_answer=opens)
        return self.builder.render(request)

    def _written(
        self, talk: list[Message], step: Step, thought: str, message: Message, results: list[Message]
    ) -> tuple[str, str]:
        """What the model writes for this step, and the text in it: some templates drop text beside calls, and so does
        this model."""
        base, prompt = self._rendered(talk, opens=False), self._rendered(talk, opens=True)
        opening = prompt[_common(base, prompt) :]
        if self.output.tools is ToolFormat.HARMONY:
            return _harmony(step, thought), step.text
        body = step.text
        if step.calls:
            whole = self._rendered([*talk, message, *results], opens=False)
            body = self._body(whole[_common(base, whole) :], opening)
        marks = self.output.reasoning
        if marks is not None and thought and thought not in body:
            body = f"{'' if _opens(opening, marks.open) else marks.open}\n{thought}\n{marks.close}\n\n{body}"
        elif marks is not None and not thought and _opens(opening, marks.open) and marks.close not in body:
            body = f"{marks.close}\n\n{body}"
        return body, step.text if step.text in body else ""

    def _body(self, tail: str, opening: str) -> str:
        """Of what the template writes behind a prompt, what the model wrote: to its end, without the answer's opening,
        which may differ in a prompt and in an earlier answer."""
        head = _MARK.match(opening.lstrip())
        if head is not None and head[0] in tail and not tail.startswith(opening):
            tail = tail[tail.index(head[0]) :]
        if not tail.startswith(opening):
            same = _common(tail, opening)
            while same and tail[same - 1] not in "\n>]":
                same -= 1
            tail = tail[same:]
        else:
            tail = tail.removeprefix(opening)
        stops = [place for end in self._published.ends if (place := tail.find(end)) > 0]
        return tail[: min(stops, default=len(tail))].rstrip("\n")


def _harmony(step: Step, thought: str) -> str:
    """Of our own: its template has one place for thinking and for text beside calls."""
    messages = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
    if step.text:
        channel = "commentary" if step.calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{step.text}")
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
        for name, arguments in step.calls
    ]
    return "<|end|><|start|>assistant".join(messages)


def _opens(opening: str, mark: str) -> bool:
    return opening.rstrip().endswith(mark.strip())


def _common(one: str, other: str) -> int:
    """Length of their common beginning."""
    short = min(len(one), len(other))
    return next((place for place in range(short) if one[place] != other[place]), short)


def _shared(known: Sequence[int], ids: Sequence[int]) -> int:
    short = min(len(known), len(ids))
    return next((place for place in range(short) if known[place] != ids[place]), short)
