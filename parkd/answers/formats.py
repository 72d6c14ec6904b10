"""Finds the format of a model's answers from its chat template."""

from __future__ import annotations

from parkd.answers.base import CallIds, OutputFormat, ReasoningMarks, ToolFormat
from parkd.answers.harmony import ANALYSIS_MARKS
from parkd.answers.readers.deepseek_calls import CALLS_BEGIN, FENCE, KIMI_BEGIN
from parkd.answers.readers.json_calls import TOOLCALL
from parkd.answers.readers.python_calls import CALLS_START, TOOLS_START
from parkd.answers.readers.tag_calls import KEY, MINIMAX_CALL
from parkd.answers.readers.xml_calls import SEED_CALL

THINK = ReasoningMarks("<think>", "</think>")
GEMMA_THOUGHT = ReasoningMarks("<|channel>thought\n", "<channel|>")

REASONING_STYLES = (
    THINK,
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)

_MARKS = {
    TOOLCALL: ToolFormat.NEMOTRON,
    KIMI_BEGIN: ToolFormat.KIMI,
    SEED_CALL: ToolFormat.SEED,
    CALLS_START: ToolFormat.PYTHON,
    TOOLS_START: ToolFormat.PYTHON,
}
"""Marks that no other family's templates contain."""
MISTRAL_ID_LENGTH = 9
"""Mistral's templates refuse call ids of any other length."""


def pick_format(template_source: str | None) -> ToolFormat:
    """The format of tool calls, recognised by the markers in the template's text.

    The order matters: Qwen's XML template also contains `<tool_call>`, and Llama's is known only by its wording.
    """
    source = template_source or ""
    if CALLS_BEGIN in source:
        return ToolFormat.DEEPSEEK_FENCED if FENCE in source else ToolFormat.DEEPSEEK
    if ANALYSIS_MARKS.open in source:
        return ToolFormat.HARMONY
    if "<|tool_call>" in source or "<start_function_call>" in source:
        return ToolFormat.GEMMA
    for mark, tools in _MARKS.items():
        if mark in source:
            return tools
    if MINIMAX_CALL in source:
        return ToolFormat.MINIMAX
    if KEY in source:
        return ToolFormat.GLM
    if "<function=" in source:
        return ToolFormat.QWEN_XML
    if "<tool_call>" in source:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in source:
        return ToolFormat.MISTRAL
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return ToolFormat.LLAMA
    return ToolFormat.NONE


def pick_reasoning(template_source: str | None) -> ReasoningMarks | None:
    """The markers around thinking; None if the model does not write any."""
    source = template_source or ""
    if ANALYSIS_MARKS.open in source:
        return ANALYSIS_MARKS
    if "<|channel>" in source:
        return GEMMA_THOUGHT
    return next((marks for marks in REASONING_STYLES if marks.close in source), None)


def output_format(template_source: str | None) -> OutputFormat:
    return OutputFormat(pick_format(template_source), pick_reasoning(template_source))


def opens_reasoning(prompt_tail: str, marks: ReasoningMarks | None) -> bool:
    """Whether the rendered prompt ends within thinking, so that the answer begins with it.

    `prompt_tail` is the end of the rendered prompt; 64 characters are enough.
    """
    return marks is not None and prompt_tail.rstrip().endswith(marks.open.rstrip())


def call_ids(tools: ToolFormat, random_hex: CallIds) -> CallIds:
    """A factory of call ids that the model's template accepts. `random_hex` returns at least 24 hex digits."""
    if tools is ToolFormat.MISTRAL:
        return lambda: random_hex()[:MISTRAL_ID_LENGTH]
    return lambda: "call_" + random_hex()[:24]
