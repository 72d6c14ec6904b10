"""Published templates of the families that the engine runs: calls come back as calls and thinking as thinking, however
an answer is cut, and an agent's next prompts begin with what is known. docs/MODELS.md has what is measured here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.templates.agent_talk import QUESTION, AgentTalk, Published, Turn
from tests.published_templates import templates_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODELS = Path(__file__).parents[3] / "docs" / "MODELS.md"
IM, EOT, EOS, TEXT = ("<|im_end|>",), ("<|eot_id|>",), ("</s>",), ("<|end_of_text|>",)
GLM, TURN = ("<|user|>", "<|observation|>"), ("<turn|>", "<|tool_response>")
DEEPSEEK = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
LEAST_REUSE = 0.95
"""Of a prompt that an agent sends behind a call, whether or not thinking comes back."""
TEMPLATES = (
    Published("meta-llama-Llama-3.1-8B-Instruct.jinja", "Llama 3.1", EOT),
    Published("meta-llama-Llama-3.2-3B-Instruct.jinja", "Llama 3.2", EOT),
    Published("meta-llama-Llama-3.3-70B-Instruct.jinja", "Llama 3.3", EOT),
    Published("NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", "Hermes 3", IM),
    Published("Qwen-Qwen2.5-7B-Instruct.jinja", "Qwen2.5", IM),
    Published("Qwen-QwQ-32B.jinja", "QwQ", IM, thinks=True, kwargs=ON),
    Published("Qwen-Qwen3-0.6B.jinja", "Qwen3", IM, thinks=True),
    Published("Qwen-Qwen3-0.6B.jinja", "Qwen3, thinking off", IM, kwargs=OFF),
    Published("Qwen3-Coder.jinja", "Qwen3-Coder", IM),
    Published("Qwen3.5-4B.jinja", "Qwen3.5", IM, thinks=True),
    Published("Qwen3.5-4B.jinja", "Qwen3.5, thinking off", IM, kwargs=OFF),
    Published("deepseek-ai-DeepSeek-V3.1.jinja", "DeepSeek-V3.1", DEEPSEEK),
    Published("moonshotai-Kimi-K2.jinja", "Kimi-K2", IM),
    Published("GLM-4.6.jinja", "GLM-4.6", GLM, thinks=True),
    Published("GLM-4.7-Flash.jinja", "GLM-4.7-Flash", GLM, thinks=True),
    Published("MiniMax-M2.jinja", "MiniMax-M2", ("[e~[",), thinks=True),
    Published("Mistral-Small-3.2-24B-Instruct-2506.jinja", "Mistral Small 3.2", EOS),
    Published("unsloth-mistral-Devstral-Small-2507.jinja", "Devstral", EOS),
    Published("mistralai-Ministral-3-14B-Reasoning-2512.jinja", "Ministral 3 Reasoning", EOS, thinks=True),
    Published("openai-gpt-oss-120b.jinja", "gpt-oss", ("<|return|>", "<|call|>"), thinks=True),
    Published("google-gemma-4-31B-it.jinja", "Gemma 4", TURN, thinks=True, kwargs=ON),
    Published("google-gemma-4-31B-it-interleaved.jinja", "Gemma 4, interleaved", TURN, thinks=True, kwargs=ON),
    Published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja", "Nemotron 3 Nano", IM, thinks=True),
    Published("NVIDIA-Nemotron-Nano-v2.jinja", "Nemotron Nano v2", ("<SPECIAL_12>",), thinks=True),
    Published("LFM2.5-8B-A1B.jinja", "LFM2.5", IM, thinks=True),
    Published("ibm-granite-granite-4.0.jinja", "Granite 4.0", TEXT),
    Published("ibm-granite-granite-4.1.jinja", "Granite 4.1", TEXT),
    Published("ByteDance-Seed-OSS.jinja", "Seed-OSS", ("<seed:eos>",), thinks=True),
)
EVERY_TEMPLATE = pytest.mark.parametrize("published", TEMPLATES, ids=lambda each: each.family)


@EVERY_TEMPLATE
def test_answers_are_understood_and_the_next_prompts_are_known(published: Published) -> None:
    """The table's line has the least share of a prompt that is known: behind calls, with thinking sent back and
    without, and at the next question."""
    folder = templates_folder()
    behind_calls, at_question = [], []
    for come_back in (True, False) if published.thinks else (False,):
        turns, heard = AgentTalk(published, folder).run(thoughts_come_back=come_back)
        for how, expected, told in heard:
            assert told == expected, how
        results = [turn for place, turn in enumerate(turns, start=1) if place != QUESTION]
        behind_calls.append(_least(results))
        at_question.append(_least([turns[QUESTION - 1]]))
        assert _least(results) >= LEAST_REUSE
    row = [published.family, *map(_percent, behind_calls)]
    row += [""] * (3 - len(row)) + [_percent(min(at_question))]
    assert [*row[:1], *_row(published.family)[1:]] == row


def _least(turns: Sequence[Turn]) -> float:
    return min(turn.reuse for turn in turns)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _row(family: str) -> list[str]:
    """The family's line of the table, without its format of calls."""
    for line in MODELS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == family and len(cells) == 5 and re.search(r"\d%", line):
            return [cells[0], *cells[2:]]
    return [f"no line of {family}"]
