"""The gate of the people who asked: A1 -> B1 -> A2 on a layer split of a real model, through the OpenAI API.

The uninterrupted run is an engine of its own, driven without the daemon: same extends, nothing ever left its arenas.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import Session

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import BLOCK_TOKENS, EngineConfig
from tests.integration.api.api_harness import MIB, Messages, Running, running

pytestmark = [pytest.mark.anyio, pytest.mark.model, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 6
NEVER = threading.Event()
DOCUMENT = " ".join(
    f"Clause {n}: whoever borrows a boat brings it back dry, with both oars, before bell {n * 7 % 31} rings."
    for n in range(12)
)
A1: Messages = [
    {"role": "system", "content": "You answer questions about a document."},
    {"role": "user", "content": f"{DOCUMENT}\n\nWhat must a borrower bring back?"},
]
B1: Messages = [{"role": "user", "content": "Write one line about the colour of rust, as a worker would report it."}]


@pytest.fixture(scope="module")
def engines(demo_model: Path, model_cache: Path) -> Iterator[tuple[TorchEngine, TorchEngine]]:
    """One for the server, one that is never interrupted."""
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=1024, batch_tokens=128)
    config = ModelConfig(str(demo_model), model_cache, layout=layout)
    served, uninterrupted = TorchEngine.load(config), TorchEngine.load(config)
    yield served, uninterrupted
    served.close()
    uninterrupted.close()


class LogitsRecorder:
    """Keeps the logits of every token an engine decodes."""

    def __init__(self, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        step = Session.step

        def recorded(session: Session, token_id: int) -> torch.Tensor:
            logits = step(session, token_id)
            if session is engine.session:
                self.logits.append(logits.clone())
            return logits

        monkeypatch.setattr(Session, "step", recorded)


class Uninterrupted:
    """One conversation on an engine that runs nothing else."""

    def __init__(self, engine: TorchEngine) -> None:
        engine.reset()
        self.engine = engine
        self.known: list[int] = []
        """Tokens whose state is in the arenas."""

    def turn(self, messages: Messages) -> tuple[int, list[torch.Tensor], list[int]]:
        """The position it resumed at (the oracle), the logits it decoded from and the greedy tokens."""
        session = self.engine.session
        ids = self.engine.tokenizer.encode(self.engine.template.render(messages, (), {}).text)
        common = 0
        while common < min(len(self.known), len(ids) - 1) and self.known[common] == ids[common]:
            common += 1
        session.truncate(common)
        session.extend(ids[common:-1])
        logits, tokens, last = [], [], ids[-1]
        for _ in range(OUTPUT_TOKENS):
            logits.append(session.step(last).clone())
            last = int(logits[-1].argmax())
            tokens.append(last)
            if last in self.engine.info.end_token_ids:
                break
        self.known = [*ids, *tokens[:-1]]
        return common, logits, tokens

    def rows(self) -> list[torch.Tensor]:
        """Of every stage, `[position, row_bytes]`."""
        return valid_rows(self.engine)


def valid_rows(engine: TorchEngine) -> list[torch.Tensor]:
    session = engine.session
    return [arena.rows[: session.position].clone() for arena in session.arenas]


def after(messages: Messages, answer: str) -> Messages:
    question = {"role": "user", "content": "And before what?"}
    return [*messages, {"role": "assistant", "content": answer}, question]


async def ask(server: Running, messages: Messages) -> Any:
    answer = await server.chat(messages, max_tokens=OUTPUT_TOKENS)
    await server.settled()
    return answer


async def test_a_b_a_on_a_real_split_is_the_run_that_was_never_interrupted(
    engines: tuple[TorchEngine, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, twin = engines
    served.reset()
    recorder = LogitsRecorder(served, monkeypatch)
    alone = Uninterrupted(twin)
    _, first_logits, _ = alone.turn(A1)
    a1_tokens = len(twin.tokenizer.encode(twin.template.render(A1, (), {}).text))
    assert a1_tokens > BLOCK_TOKENS
    async with running(served, budget_bytes=256 * MIB) as server:
        first = await ask(server, A1)
        assert all(map(torch.equal, recorder.logits, first_logits))
        assert len(recorder.logits) == len(first_logits)
        worker = await ask(server, B1)
        assert worker.reused < 30
        recorder.logits.clear()
        second = await ask(server, after(A1, first.text))

        oracle, logits, tokens = alone.turn(after(A1, first.text))
        assert second.cache == "restored-ram"
        assert second.reused == oracle >= 0.99 * a1_tokens
        assert len(recorder.logits) == len(logits)
        assert all(map(torch.equal, recorder.logits, logits))
        for stage, (mine, theirs) in enumerate(zip(valid_rows(served), alone.rows(), strict=True)):
            assert torch.equal(mine, theirs), f"stage {stage}"

        cold = Uninterrupted(twin)
        _, _, cold_tokens = cold.turn(after(A1, first.text))
        assert cold_tokens == tokens

        assert server.store is not None
        stats = server.store.stats()
        per_block = BLOCK_TOKENS * sum(stage.row_bytes for stage in served.info.layout.stages)
        assert len(served.info.layout.stages) == 2
        assert stats.row_bytes == stats.blocks * per_block
        assert stats.row_bytes < stats.bytes_in_use <= stats.bytes_allocated <= stats.budget_bytes


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_damaged_stage_reads_cold_and_answers_the_same(
    engines: tuple[TorchEngine, TorchEngine], stage: int
) -> None:
    served, twin = engines
    served.reset()
    async with running(served, budget_bytes=256 * MIB) as server:
        await ask(server, A1)
        await ask(server, B1)
        assert server.store is not None
        key_digest, _ = _identity(server, A1)
        parked = max((each for each, _ in server.store.candidates(key_digest, ())), key=lambda each: each.position)
        with server.store.lease(parked.id, parked.position) as lease:
            buffer = lease.transfer.stages[stage].rows[0].buffer
            buffer.flags.writeable = True
            buffer[len(buffer) // 3] ^= 0x10
        again = await ask(server, A1)
        assert again.cache == "cold"
        assert "restore failed" in again.headers["x-parkd-why"]
        _, _, tokens = Uninterrupted(twin).turn(A1)
        assert again.text == twin.tokenizer.decode(tokens)


async def test_what_is_not_admitted_is_read_cold_and_answers_the_same(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    served, twin = engines
    served.reset()
    async with running(served, budget_bytes=1 * MIB) as server:  # less than one block
        await ask(server, A1)
        await ask(server, B1)
        again = await ask(server, A1)
        assert server.store is not None
        stats = server.store.stats()
        assert stats.conversations == 0
        assert stats.bytes_allocated <= MIB
        assert again.reused < 30
        _, _, tokens = Uninterrupted(twin).turn(A1)
        assert again.text == twin.tokenizer.decode(tokens)


async def test_with_parking_off_one_conversation_is_reused_as_before(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    served, twin = engines
    served.reset()
    alone = Uninterrupted(twin)
    alone.turn(A1)
    async with running(served, budget_bytes=0) as server:
        first = await ask(server, A1)
        second = await ask(server, after(A1, first.text))
        oracle, _, tokens = alone.turn(after(A1, first.text))
        assert (second.cache, second.reused) == ("live", oracle)
        assert second.text == twin.tokenizer.decode(tokens)
        again = await ask(server, after(A1, first.text))
        assert (again.cache, again.usage["prompt_tokens"] - again.reused) == ("live", 1)


def _identity(server: Running, messages: Messages) -> tuple[bytes, np.ndarray]:
    from parkd.types import TurnRequest

    prompt = server.identity.build(TurnRequest(messages=messages))
    return prompt.key.digest, prompt.units
