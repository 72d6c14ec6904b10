"""A -> B -> A through the HTTP API on tiny models of every family."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parkd_engine.families.presets.shapes import ECHO, PRESETS, WITH_HEAD

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig
from parkd.types import SamplingParams
from tests.integration.api.api_harness import Messages, running

pytestmark = pytest.mark.anyio
A1: Messages = [
    {"role": "system", "content": "You park conversations."},
    {"role": "user", "content": "A server holds one conversation in memory. " * 18},
]
B1: Messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 16}]
DENSE = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-long")
PLAIN = [
    name for name in PRESETS if name.startswith("tiny") and "-vl" not in name and not name.endswith((WITH_HEAD, ECHO))
]
FAMILIES = [*(name for name in PLAIN if name not in DENSE), "tiny-qwen3.5-mtp"]

REWINDS = (
    *("tiny-deepseek-v2", "tiny-deepseek-v3", "tiny-gemma3", "tiny-gemma4", "tiny-glm4-lite", "tiny-glm4-moe"),
    *("tiny-gpt-oss", "tiny-minimax-m2", "tiny-ministral3", "tiny-mistral", "tiny-qwen3-moe"),
)
"""Families without recurrent state."""


def tiny(folder: Path, family: str, **layout: Any) -> TorchEngine:
    settings = {"devices": ("cpu", "cpu"), "context_tokens": 1024, "batch_tokens": 128, "draft_tokens": 2, **layout}
    return TorchEngine.load(ModelConfig(f"random:{family}", folder, layout=EngineConfig(**settings)))


def read_cold(engine: TorchEngine, messages: Messages) -> str:
    """The answer of an engine that never read anything else, in float32: greedy tokens do not depend on chunks."""
    engine.reset()
    ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
    engine.extend(ids[:-1], cancel=threading.Event())
    tokens: list[int] = []
    engine.begin(ids, SamplingParams(temperature=0))
    for step in engine.generate():
        if step[0] in engine.info.end_token_ids:
            break
        tokens += step
        if len(tokens) == 8:
            break
    stream = engine.text_stream()
    return stream.push(tokens) + stream.flush()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_b_a(family: str, tmp_path: Path) -> None:
    engine = tiny(tmp_path, family)
    # Without the memory of answers, so that prompts are what the tokenizer alone makes of them.
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        first = await server.chat(A1)
        prompt = len(server.prompt_tokens(A1))
        await server.chat(B1)
        again = await server.chat(A1)
        assert (again.cache, again.reused, again.text) == ("restored-ram", prompt - 1, first.text)
        await server.chat(B1)
        a2 = [*A1, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = await server.chat(a2)
        assert second.cache == "restored-ram"
        assert second.reused >= prompt - 1
        edited = [*a2[:-1], {"role": "user", "content": "And before that?"}]
        third = await server.chat(edited)
        kept = len(engine.tokenizer.encode(engine.template.render(a2[:-1], (), {}, add_generation_prompt=False).text))
        # Rows, and a window not yet left, are cut inside the message; other state at the message's start.
        assert third.cache == "live"
        assert third.reused > kept if family in REWINDS else third.reused == kept
    assert [first.text, second.text, third.text] == [read_cold(engine, turns) for turns in (A1, a2, edited)]
    engine.close()


def test_the_format_of_rows_does_not_touch_fixed_state(tmp_path: Path) -> None:
    full, codes = (tiny(tmp_path, "tiny-qwen3.5", kv_format=kv_format) for kv_format in (None, "int8"))
    assert full.info.layout.row_bytes > codes.info.layout.row_bytes
    assert full.info.layout.fixed_bytes == codes.info.layout.fixed_bytes > 0
