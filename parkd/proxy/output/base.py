"""What turns generated text into a dialect's events: the seam between the turn and the model's habits.

generated text --Parser.push--> TextDelta | ReasoningDelta | ToolCallDelta --turn--> encoder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from parkd.engine_adapter.base import ResponseReader
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta

OutputEvent = TextDelta | ReasoningDelta | ToolCallDelta

MakeReader = Callable[[str, Sequence[Mapping[str, Any]]], ResponseReader]
"""From the end of the rendered prompt and the tools to the reader of one answer."""

CallIds = Callable[[], str]
"""Makes the id of the next tool call."""


class ToolFormat(StrEnum):
    """How a model writes a tool call."""

    NONE = "none"
    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    QWEN_XML = "qwen-xml"
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`"""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}` as the whole answer, or behind `<|python_tag|>`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`"""
    GEMMA = "gemma"
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`"""
    DEEPSEEK = "deepseek"
    """A name, a separating token and the arguments as JSON, between tokens of their own."""
    DEEPSEEK_FENCED = "deepseek-fenced"
    """The same with `function` before the separating token, and the arguments in a fence behind the name."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around a model's thinking."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a model's answers look like, read off its chat template."""

    tools: ToolFormat = ToolFormat.NONE
    reasoning: ReasoningMarks | None = None
    reader: MakeReader | None = None
    """From the model's own files, where they say how answers are read; it goes before `tools`."""


class Parser(Protocol):
    """One answer's text, split. Never raises on what a model wrote: what it got wrong comes out as text."""

    @property
    def in_reasoning(self) -> bool:
        """True while what is pushed counts as thinking."""

    @property
    def satisfied(self) -> bool:
        """True once the one call a client allows (`parallel_tool_calls: false`) is complete: generation may end, and
        what is pushed after it is dropped."""

    def push(self, text: str) -> list[OutputEvent]: ...

    def finish(self, reason: FinishReason) -> tuple[list[OutputEvent], FinishReason]:
        """What was still held, and the reason as clients name it: `TOOL_CALLS` instead of `STOP` if calls were made."""
