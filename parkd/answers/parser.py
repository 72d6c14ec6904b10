"""The parser of answers: thinking first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping

from parkd.answers.base import CallIds, OutputEvent, OutputFormat, Parser, ToolFormat
from parkd.answers.calls import CallParser, Section
from parkd.answers.declared import DeclaredParser
from parkd.answers.formats import opens_reasoning
from parkd.answers.harmony import CHANNEL, HarmonyCall, HarmonySplitter
from parkd.answers.readers.deepseek_calls import CALLS_BEGIN, KIMI_BEGIN, DeepSeekCalls, KimiCalls
from parkd.answers.readers.gemma_calls import gemma_section
from parkd.answers.readers.json_calls import TOOLCALL, JsonCalls, LlamaBare, mistral_section, nemotron_section
from parkd.answers.readers.python_calls import CALLS_START, python_section
from parkd.answers.readers.signals import Names
from parkd.answers.readers.tag_calls import MINIMAX_CALL, GlmCall, MiniMaxCalls
from parkd.answers.readers.xml_calls import SEED_CALL, bare_function_section, seed_section, tagged_section, tool_schemas
from parkd.answers.reasoning import Piece, ReasoningSplitter, Splitter
from parkd.types import FinishReason, ReasoningDelta, ToolCallDelta, ToolChoiceMode, TurnRequest


class AnswerParser:
    """Implements `Parser`. The splitter separates the thinking; the call parser parses everything after it."""

    def __init__(self, splitter: Splitter, calls: CallParser, *, must_call: bool, must_be_json: bool) -> None:
        """With `must_call` the answer has no text, and with `must_be_json` none that begins as a marker does: what the
        limit leaves of a marker is no text then."""
        self._splitter = splitter
        self._calls = calls
        self._must_call = must_call
        self._must_be_json = must_be_json

    @property
    def in_reasoning(self) -> bool:
        return self._splitter.thinking

    @property
    def satisfied(self) -> bool:
        return self._calls.satisfied

    def push(self, text: str) -> list[OutputEvent]:
        return merged(self._take(self._splitter.push(text)))

    def finish(self, reason: FinishReason) -> tuple[list[OutputEvent], FinishReason]:
        cut = reason.is_cut
        held = self._splitter.finish()
        if cut and (self._must_call or self._must_be_json):
            held = Piece(held.reasoning, "")
        events = self._take(held) + self._calls.finish(cut=cut, no_text=cut and self._must_call)
        if reason is FinishReason.STOP and self._calls.calls_made:
            reason = FinishReason.TOOL_CALLS
        return merged(events), reason

    def _take(self, piece: Piece) -> list[OutputEvent]:
        events: list[OutputEvent] = [ReasoningDelta(piece.reasoning)] if piece.reasoning else []
        return events + (self._calls.push(piece.body) if piece.body else [])


def merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """The same events, with adjacent argument pieces of one call joined."""
    joined: list[OutputEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            isinstance(event, ToolCallDelta)
            and isinstance(last, ToolCallDelta)
            and event.index == last.index
            and event.call_id is None
        ):
            arguments = last.arguments + event.arguments
            joined[-1] = ToolCallDelta(last.index, last.call_id, last.name, arguments)
        else:
            joined.append(event)
    return joined


def make_parser(output: OutputFormat, request: TurnRequest, prompt_tail: str, call_ids: CallIds) -> Parser:
    """The parser for one answer.

    `prompt_tail` is the end of the rendered prompt (64 characters are enough); it shows whether thinking is open. For
    a request without tools, or with `tool_choice: none`, calls are text. For a raw prompt, everything is text.
    """
    if output.parser is not None:
        return output.parser(request, call_ids)
    marks = output.reasoning if request.prompt is None else None
    if output.reader is not None and request.prompt is None:
        return DeclaredParser(output.reader(prompt_tail, request.tools), request, call_ids)
    splitter: Splitter = ReasoningSplitter(marks, opened=opens_reasoning(prompt_tail, marks))
    if output.tools is ToolFormat.HARMONY and request.prompt is None:
        splitter = HarmonySplitter(Names(tool_schemas(request.tools)).limit)
    wants_calls = bool(request.tools) and request.tool_choice.mode is not ToolChoiceMode.NONE
    sections, bare = _sections(output.tools, request) if wants_calls else ({}, None)
    calls = CallParser(
        sections,
        call_ids,
        bare=bare,
        max_calls=None if request.parallel_tool_calls else 1,
    )
    must_call = wants_calls and request.tool_choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    return AnswerParser(splitter, calls, must_call=must_call, must_be_json=request.response_schema is not None)


def _sections(tools: ToolFormat, request: TurnRequest) -> tuple[Mapping[str, Section], Section | None]:
    """Markers with the readers for the text after them, and the reader for an answer that is a call (or None)."""
    schemas = tool_schemas(request.tools)
    names = Names(schemas)
    match tools:
        case ToolFormat.NONE:
            return {}, None
        case ToolFormat.HERMES | ToolFormat.QWEN_XML:
            sections: dict[str, Section] = {"<tool_call>": lambda: tagged_section(schemas)}
            if tools is ToolFormat.QWEN_XML:
                sections["<function="] = lambda: bare_function_section(schemas)
            return sections, None
        case ToolFormat.SEED:
            return {SEED_CALL: lambda: seed_section(schemas)}, None
        case ToolFormat.NEMOTRON:
            return {TOOLCALL: lambda: nemotron_section(names)}, None
        case ToolFormat.KIMI:
            return {KIMI_BEGIN: lambda: KimiCalls(names)}, None
        case ToolFormat.PYTHON:
            return {CALLS_START: lambda: python_section(schemas)}, None
        case ToolFormat.HARMONY:
            return {CHANNEL: lambda: HarmonyCall(names)}, None
        case ToolFormat.GLM:
            return {"<tool_call>": lambda: GlmCall(schemas)}, None
        case ToolFormat.MINIMAX:
            return {MINIMAX_CALL: lambda: MiniMaxCalls(schemas)}, None
        case ToolFormat.LLAMA:
            tagged = {"<|python_tag|>": lambda: JsonCalls(";", None, names.accepts, strict=False)}
            return tagged, lambda: LlamaBare(frozenset(schemas))
        case ToolFormat.MISTRAL:
            return {"[TOOL_CALLS]": lambda: mistral_section(names)}, None
        case ToolFormat.DEEPSEEK | ToolFormat.DEEPSEEK_FENCED:
            return {CALLS_BEGIN: lambda: DeepSeekCalls(names)}, None
        case ToolFormat.GEMMA:
            return {
                "<|tool_call>": lambda: gemma_section('<|"|>', "<tool_call|>", schemas),
                "<start_function_call>": lambda: gemma_section("<escape>", "<end_function_call>", schemas),
            }, None
