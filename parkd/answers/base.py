"""The protocol of output parsers, which split a model's text into thinking, answer and tool calls.

generated text --Parser.push--> TextDelta | ReasoningDelta | ToolCallDelta --turn--> encoder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from parkd.engine_adapter.base import ResponseReader
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, TurnRequest

OutputEvent = TextDelta | ReasoningDelta | ToolCallDelta

MakeReader = Callable[[str, Sequence[Mapping[str, Any]]], ResponseReader]
"""(end of the rendered prompt, tools) -> the reader of one answer."""

CallIds = Callable[[], str]
"""Returns an id for the next tool call."""


class ToolFormat(StrEnum):
    """How a model writes a tool call."""

    NONE = "none"
    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    QWEN_XML = "qwen-xml"
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`"""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`"""
    GEMMA = "gemma"
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`"""
    DEEPSEEK = "deepseek"
    """A name, a separator token and the arguments as JSON, between begin and end tokens."""
    GLM = "glm"
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`"""
    MINIMAX = "minimax"
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>` in `<minimax:tool_call>`"""
    HARMONY = "harmony"
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`, a message of its own"""
    NEMOTRON = "nemotron"
    """`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`"""
    KIMI = "kimi"
    """`functions.name:0`, a token and the arguments as JSON, between begin and end tokens."""
    SEED = "seed"
    """As QWEN_XML in `<seed:tool_call>`, without newlines around values."""
    PYTHON = "python"
    """`<|tool_call_start|>[name(key='text', other=3)]<|tool_call_end|>`"""
    DEEPSEEK_FENCED = "deepseek-fenced"
    """The same with `function` before the separator token, and the arguments in a code fence after the name."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers around a model's thinking."""

    open: str
    close: str


MakeParser = Callable[[TurnRequest, CallIds], "Parser"]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of a model's answers, as its chat template or its own files tell."""

    tools: ToolFormat = ToolFormat.NONE
    reasoning: ReasoningMarks | None = None
    reader: MakeReader | None = None
    """From the model's own response template, if it has one; takes precedence over `tools`."""
    parser: MakeParser | None = None
    """Of an engine whose answers another server has parsed already; takes precedence over all."""

    @property
    def calls_tools(self) -> bool:
        return self.tools is not ToolFormat.NONE or self.reader is not None or self.parser is not None


class Parser(Protocol):
    """Splits the text of one answer. Never raises because of the model's text: malformed output becomes plain text."""

    @property
    def in_reasoning(self) -> bool:
        """True while pushed text counts as thinking."""

    @property
    def satisfied(self) -> bool:
        """True once the only call that the client allows (`parallel_tool_calls: false`) is complete. Generation may
        end; text pushed after it is dropped."""

    def push(self, text: str) -> list[OutputEvent]: ...

    def finish(self, reason: FinishReason) -> tuple[list[OutputEvent], FinishReason]:
        """The events held back so far, and the reason for clients: `TOOL_CALLS` instead of `STOP` after tool calls."""
