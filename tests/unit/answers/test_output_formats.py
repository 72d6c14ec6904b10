"""Formats are told by what each family's template writes. The templates here are ours, with their markers."""

from __future__ import annotations

import pytest

from parkd.answers.base import ReasoningMarks, ToolFormat
from parkd.answers.formats import GEMMA_THOUGHT, THINK, call_ids, opens_reasoning, output_format, pick_format
from parkd.answers.harmony import ANALYSIS_MARKS
from parkd.answers.readers.deepseek_calls import CALL_BEGIN, CALLS_BEGIN, FENCE

SEED_THINK = ReasoningMarks("<seed:think>", "</seed:think>")
MISTRAL_THINK = ReasoningMarks("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, ToolFormat.NONE, None),
        ("{{ '<|im_start|>' + message.role }}", ToolFormat.NONE, None),
        ("'<tool_call>\\n{\"name\": ' + '</think>'", ToolFormat.HERMES, THINK),
        ("'<tool_call>\\n<function=' + name + '>\\n<parameter='", ToolFormat.QWEN_XML, None),
        ("'[TOOL_CALLS]' + name + '[ARGS]' '[THINK]' '[/THINK]'", ToolFormat.MISTRAL, MISTRAL_THINK),
        ("'<|start_header_id|>' '{\"name\": ' + '\"parameters\": '", ToolFormat.LLAMA, None),
        ("'<|python_tag|>' + call", ToolFormat.LLAMA, None),
        (f"'{CALLS_BEGIN}' + '{CALL_BEGIN}function'\n{FENCE}", ToolFormat.DEEPSEEK_FENCED, None),
        (f"'{CALLS_BEGIN}' + '{CALL_BEGIN}' + name + '</think>'", ToolFormat.DEEPSEEK, THINK),
        ("'<tool_call>' + name + '<arg_key>' + '</think>'", ToolFormat.GLM, THINK),
        ("'<minimax:tool_call>' '<invoke name=' '</think>'", ToolFormat.MINIMAX, THINK),
        ("'<TOOLCALL>[' '{\"name\": \"' '</think>'", ToolFormat.NEMOTRON, THINK),
        ("'<|tool_calls_section_begin|>' '<tool_call>'", ToolFormat.KIMI, None),
        ("'<seed:tool_call>\n<function=' '</seed:think>'", ToolFormat.SEED, SEED_THINK),
        ("'<|tool_call_start|>[' + name", ToolFormat.PYTHON, None),
        ("'<|tool_list_start|>['", ToolFormat.PYTHON, None),
        ("'<|start|>assistant<|channel|>analysis<|message|>' + thinking", ToolFormat.HARMONY, ANALYSIS_MARKS),
        ("'<|tool_call>call:' + name '<|channel>thought\\n'", ToolFormat.GEMMA, GEMMA_THOUGHT),
    ],
)  # fmt: skip
def test_a_template_tells_its_format(template: str | None, tools: ToolFormat, reasoning: ReasoningMarks | None) -> None:
    assert pick_format(template) is tools
    assert output_format(template).reasoning == reasoning


def test_a_prompt_that_ends_inside_thinking() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", THINK)
    assert opens_reasoning("<|turn>model\n<|channel>thought\n", GEMMA_THOUGHT)
    assert not opens_reasoning("<think>\n\n</think>\n\n", THINK)
    assert not opens_reasoning("<think>\n", None)


def test_call_ids_suit_the_template_that_takes_them_back() -> None:
    digits = "0123456789abcdef0123456789abcdef"
    assert call_ids(ToolFormat.MISTRAL, lambda: digits)() == digits[:9]
    assert call_ids(ToolFormat.HERMES, lambda: digits)() == "call_" + digits[:24]
