"""A -> B -> A over int8 rows through the HTTP API, on a tiny real model."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig
from parkd.types import SamplingParams
from tests.integration.api.api_harness import Messages, running

pytestmark = pytest.mark.anyio
A1: Messages = [{"role": "user", "content": "A server holds one conversation in memory. " * 22}]
B1: Messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]


def tiny(folder: Path, stages: int, kv_format: str | None) -> TorchEngine:
    layout = EngineConfig(devices=("cpu",) * stages, context_tokens=1024, batch_tokens=128, kv_format=kv_format)
    return TorchEngine.load(ModelConfig("random:tiny-qwen3", folder, layout=layout))


def never_left(engine: TorchEngine, turns: list[Messages]) -> list[str]:
    """The conversation's answers when nothing else is ever read, each turn on the state of the one before."""
    answers = []
    engine.reset()
    known = np.zeros(0, dtype=np.int64)
    for messages in turns:
        ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
        shared = min(len(known), len(ids) - 1)
        different = np.flatnonzero(known[:shared] != ids[:shared])
        engine.truncate(int(different[0]) if len(different) else shared)
        engine.extend(ids[engine.position : -1], cancel=threading.Event())
        tokens: list[int] = []
        engine.begin(ids, SamplingParams(temperature=0))
        for step in engine.generate():
            if step[0] in engine.info.end_token_ids:
                break
            tokens += step
            if len(tokens) == 8:
                break
        known = np.concatenate([ids, tokens])[: engine.position]
        stream = engine.text_stream()
        answers.append(stream.push(tokens) + stream.flush())
    return answers


@pytest.mark.parametrize("stages", [1, 3])
async def test_a_b_a_over_eight_bit_rows(stages: int, tmp_path: Path) -> None:
    engine = tiny(tmp_path, stages, "int8")
    # No memory of answers: what is sent back is tokenised again, as the twin below does.
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        first = await server.chat(A1)
        await server.chat(B1)
        a2 = [*A1, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = await server.chat(a2)
        assert second.cache == "restored-ram"
        assert second.reused >= len(server.prompt_tokens(A1)) - 1
    assert [first.text, second.text] == never_left(engine, [A1, a2])
    engine.close()


def test_the_engine_is_told_apart_by_its_format(tmp_path: Path) -> None:
    full, codes = tiny(tmp_path, 2, None), tiny(tmp_path, 2, "int8")
    assert full.info.fingerprint != codes.info.fingerprint
    assert full.info.layout.digest != codes.info.layout.digest
    # 2 layers a stage, 2 heads of 16: 4 bytes a number against 1 and two padded scales a head.
    assert [stage.row_bytes for stage in full.info.layout.stages] == [2 * 2 * 2 * 16 * 4] * 2
    assert [stage.row_bytes for stage in codes.info.layout.stages] == [2 * (2 * 2 * 16 + 16)] * 2
