"""The torch engine behind the daemon's seam, on the demo model's real weights and on tiny random ones."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine.loading import gguf_convert
from transformers import AutoModelForCausalLM

from parkd.config import ModelConfig
from parkd.engine_adapter.base import Engine
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.errors import EngineFailure, EngineLost, InvalidRequest, ModelError, RestoreFailed
from parkd.state import BLOCK_TOKENS, EngineConfig, RowRun, StageTransfer, Transfer
from parkd.types import SamplingParams

GREEDY = SamplingParams(temperature=0)
NEVER = threading.Event()
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Which animal says meow, and what does it like to drink?"},
]


@pytest.fixture(scope="module")
def cache(model_cache: Path) -> Path:
    return model_cache


def tiny(cache: Path, devices: int = 2, **layout: Any) -> TorchEngine:
    settings = {"devices": ("cpu",) * devices, "context_tokens": 1024, "batch_tokens": 64, **layout}
    config = ModelConfig("random:tiny-qwen3", cache, layout=EngineConfig(**settings))
    return TorchEngine.load(config, fresh_seed=lambda: 4)


@pytest.fixture
def engine(cache: Path) -> Iterator[TorchEngine]:
    loaded = tiny(cache)
    yield loaded
    loaded.close()


def ids_of(engine: Engine, text: str) -> np.ndarray:
    return np.array(engine.tokenizer.encode(text), dtype=np.int64)


def answer(
    engine: Engine, ids: np.ndarray, count: int, sampling: SamplingParams = GREEDY, mask: Any = None
) -> list[int]:
    """The next tokens after `ids`, of which those below the engine's position are live already."""
    engine.extend(ids[engine.position : -1], cancel=NEVER)
    tokens: list[int] = []
    engine.begin(ids, sampling, mask=mask)
    for step in engine.generate():
        tokens += step
        if len(tokens) >= count or tokens[-1] in engine.info.end_token_ids:
            break
    return tokens


def transfer_of(engine: Engine, stop: int) -> Transfer:
    """Empty buffers for the rows `[0, stop)`."""
    stages = tuple(
        StageTransfer((RowRun(0, stop, np.zeros(stop * stage.row_bytes, dtype=np.uint8)),))
        for stage in engine.info.layout.stages
    )
    return Transfer(engine.info.layout.digest, 0, stop, BLOCK_TOKENS, stages)


def captured(engine: Engine) -> Transfer:
    transfer = transfer_of(engine, engine.position)
    return replace(transfer, checksums=engine.capture(transfer).rows)


def test_logprobs_stand_beside_the_tokens_that_were_sampled(engine: TorchEngine) -> None:
    """Found by use 25: they are the same after the conversation was away."""
    ids = ids_of(engine, "A cat says meow and drinks milk. " * 8)
    asked = replace(GREEDY, top_logprobs=3)
    said = answer(engine, ids, 6, asked)
    before = list(engine.logprobs)
    assert [each.token_id for each in before] == said
    assert all(each.top[0] == (each.token_id, each.logprob) and len(each.top) == 3 for each in before)
    engine.truncate(len(ids) - 1)
    parked = captured(engine)
    engine.reset()
    answer(engine, ids_of(engine, "Something else entirely."), 2)
    assert engine.logprobs == []
    engine.reset()
    engine.restore(parked)
    assert answer(engine, ids, 6, asked) == said
    assert list(engine.logprobs) == before
    assert engine.text_of(ids.tolist()) == "A cat says meow and drinks milk. " * 8


@pytest.mark.model
@pytest.mark.timeout(600)  # The first of them converts the weights, which takes a minute or two.
@pytest.mark.parametrize("stages", [1, 2])
def test_greedy_answers_are_those_of_the_library(
    stages: int, demo_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = EngineConfig(devices=("cpu",) * stages, context_tokens=512, batch_tokens=32)
    config = ModelConfig(str(demo_model), cache, layout=layout)
    TorchEngine.load(config).close()
    # From here on the converted folder must do.
    monkeypatch.setattr(gguf_convert, "convert", lambda *_: pytest.fail("converted again"))
    engine = TorchEngine.load(config)
    ids = ids_of(engine, engine.template.render(MESSAGES, [], {}).text)
    tokens = answer(engine, ids, 24)
    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = library.generate(torch.from_numpy(ids)[None], max_new_tokens=24, do_sample=False)
    assert tokens == expected[0, len(ids) :].tolist()
    stream = engine.text_stream()
    text = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert "cat" in text.lower()
    engine.close()


@pytest.mark.model
@pytest.mark.timeout(600)  # The first of them converts the weights, which takes a minute or two.
def test_text_of_the_demo_tokenizer_comes_back_whole(demo_model: Path, cache: Path) -> None:
    engine = TorchEngine.load(ModelConfig(str(demo_model), cache, layout=EngineConfig(context_tokens=64)))
    rng = np.random.default_rng(1)
    for _ in range(50):
        points = rng.integers(1, 0xD800, 20).tolist() + rng.integers(0x1F300, 0x1F700, 3).tolist()
        text = "".join(map(chr, points))
        ids = engine.tokenizer.encode(text)
        stream = engine.text_stream()
        pieces = [stream.push([token]) for token in ids] + [stream.flush()]
        assert "".join(pieces) == engine.tokenizer.decode(ids)
    info = engine.info
    assert (info.architecture, info.end_token_ids, info.vocab_size) == ("LlamaForCausalLM", {0, 2}, 49152)
    assert info.weights_bytes == 4 * 134_515_008
    engine.close()


def test_it_is_an_engine_of_rows(engine: TorchEngine) -> None:
    checked: Engine = engine
    assert checked.info.devices == ("cpu", "cpu")
    assert [(stage.first_layer, stage.end_layer) for stage in checked.info.layout.stages] == [(0, 2), (2, 4)]
    # Keys and values of 2 layers, 2 heads of 16 numbers of 4 bytes.
    assert [stage.row_bytes for stage in checked.info.layout.stages] == [2 * 2 * 2 * 16 * 4] * 2
    assert checked.info.arena_bytes == 1024 * checked.info.layout.row_bytes
    assert checked.info.layout.digest == engine.session.layout.digest


def test_the_fingerprint_knows_state_and_nothing_else(engine: TorchEngine, cache: Path) -> None:
    assert tiny(cache, 1, context_tokens=512, batch_tokens=32).info.fingerprint == engine.info.fingerprint
    assert tiny(cache, 2, kv_format="bf16").info.fingerprint != engine.info.fingerprint
    assert tiny(cache, 2, dtype="bf16").info.fingerprint != engine.info.fingerprint


def test_a_conversation_that_was_parked_goes_on_as_if_it_had_stayed(engine: TorchEngine) -> None:
    first = ids_of(engine, "A server holds one conversation in memory. " * 12)
    other = ids_of(engine, "The quick brown fox jumps over the lazy dog. " * 14)
    engine.extend(first[:-1], cancel=NEVER)
    parked = captured(engine)
    stayed = answer(engine, first, 12)
    engine.reset()
    moved = answer(engine, other, 12)
    engine.restore(parked)
    assert engine.position == len(first) - 1
    assert answer(engine, first, 12) == stayed
    assert moved != stayed


def test_damage_leaves_an_empty_engine_that_reads_cold(engine: TorchEngine) -> None:
    ids = ids_of(engine, "A server holds one conversation in memory. " * 12)
    expected = answer(engine, ids, 8)
    parked = captured(engine)
    parked.stages[1].rows[0].buffer[-5] ^= 1
    with pytest.raises(RestoreFailed, match="checksum"):
        engine.restore(parked)
    assert engine.position == 0
    assert answer(engine, ids, 8) == expected


def test_damage_found_while_reading_on_is_a_failed_restore_not_a_failed_turn(engine: TorchEngine) -> None:
    """A failed turn would reach the client; after a failed restore the prompt is read cold."""
    ids = ids_of(engine, "A server holds one conversation in memory. " * 12)
    expected = answer(engine, ids, 8)
    parked = captured(engine)
    parked.stages[1].rows[0].buffer[-5] ^= 1
    with pytest.raises(RestoreFailed, match="checksum"):
        engine.restore_and_read(parked, ids[:20])
    assert engine.position == 0
    assert answer(engine, ids, 8) == expected


def test_a_foreign_snapshot_leaves_an_empty_engine(engine: TorchEngine, cache: Path) -> None:
    engine.extend(ids_of(engine, "some text"), cancel=NEVER)
    parked = captured(engine)
    with pytest.raises(RestoreFailed, match="layout"):
        engine.restore(replace(parked, layout_digest=b"x" * 16))
    assert engine.position == 0


def test_the_end_of_the_context_ends_the_answer(engine: TorchEngine) -> None:
    ids = np.arange(5, 5 + 300, dtype=np.int64) % 500
    ids = np.concatenate([ids, ids, ids, ids])[: engine.info.context_tokens - 2]
    engine.extend(ids[:-1], cancel=NEVER)
    engine.begin(ids, GREEDY)
    steps = list(engine.generate())
    assert len(steps) == 3
    assert engine.position == engine.info.context_tokens
    with pytest.raises(EngineFailure):
        engine.extend(ids[:1], cancel=NEVER)
    assert engine.position == engine.info.context_tokens


def test_a_yielded_token_is_not_yet_in_the_arenas(engine: TorchEngine) -> None:
    ids = ids_of(engine, "hello there")
    engine.extend(ids[:-1], cancel=NEVER)
    engine.begin(ids, GREEDY)
    for count, _ in enumerate(engine.generate()):
        assert engine.position == len(ids) + count
        if count == 3:
            break


class EvenOnly:
    """A mask that lets even ids through and notes what it is told."""

    def __init__(self, vocab: int) -> None:
        self._allowed = np.arange(vocab) % 2 == 0
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray:
        return self._allowed

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def test_the_mask_is_asked_and_told_of_every_token(engine: TorchEngine) -> None:
    mask = EvenOnly(engine.info.vocab_size)
    tokens = answer(engine, ids_of(engine, "hello there"), 10, SamplingParams(seed=3), mask)
    assert mask.accepted == tokens
    assert all(token % 2 == 0 for token in tokens)


def test_a_seed_repeats_an_answer_and_penalties_reach_the_prompt(engine: TorchEngine) -> None:
    ids = ids_of(engine, "hello there, hello there")

    def again(sampling: SamplingParams) -> list[int]:
        engine.reset()
        return answer(engine, ids, 12, sampling)

    assert again(SamplingParams(seed=1)) == again(SamplingParams(seed=1))
    assert again(SamplingParams(seed=1)) != again(SamplingParams(seed=2))
    assert again(SamplingParams()) == again(SamplingParams(seed=4))  # `fresh_seed` gives 4 here.
    strict = again(SamplingParams(temperature=0, repetition_penalty=1e6))
    assert len(set(strict)) == len(strict)
    assert not set(strict) & set(ids.tolist())


def test_a_broken_forward_is_an_engine_failure_and_is_survived(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(engine, "A server holds one conversation in memory. " * 12)
    expected = answer(engine, ids, 6)
    engine.reset()
    whole = engine.session.stages[1].forward

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.session.stages[1], "forward", fail)
    with pytest.raises(EngineFailure, match="out of luck") as caught:
        engine.extend(ids[:-1], cancel=NEVER)
    assert not isinstance(caught.value, EngineLost)
    monkeypatch.setattr(engine.session.stages[1], "forward", whole)
    assert answer(engine, ids, 6) == expected


def test_a_poisoned_device_is_lost(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.session.stages[0], "forward", fail)
    with pytest.raises(EngineLost, match="must be restarted"):
        engine.extend(ids_of(engine, "hello"), cancel=NEVER)


def test_a_template_refusal_is_an_invalid_request(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no system messages here') }}")
    engine = TorchEngine.load(
        ModelConfig(
            "random:tiny-llama",
            cache,
            chat_template_file=tmp_path / "t.jinja",
            layout=EngineConfig(context_tokens=64),
        )
    )
    with pytest.raises(InvalidRequest, match="no system messages here"):
        engine.template.render(MESSAGES, [], {})


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("random:unknown", {}, "tiny-qwen3"),
        ("random:tiny-qwen3", {"devices": ("cpu",) * 9}, "9"),
        ("random:tiny-qwen3", {"context_tokens": 5000}, "4096"),
    ],
)
def test_what_cannot_be_loaded_is_a_model_error(model: str, layout: dict[str, Any], message: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=message):
        TorchEngine.load(ModelConfig(model, cache, layout=EngineConfig(**layout)))


def test_a_context_that_does_not_fit_is_a_model_error_with_numbers(cache: Path) -> None:
    config = ModelConfig("random:tiny-qwen3", cache, layout=EngineConfig(context_tokens=4096))
    with pytest.raises(ModelError, match=r"4096 tokens needs 14 MiB on cpu beside the weights"):
        TorchEngine.load(config, free=lambda _: 257 << 20)


def test_closing_gives_the_memory_back(cache: Path) -> None:
    engine = tiny(cache)
    answer(engine, ids_of(engine, "hello there"), 3)
    held = [weakref.ref(arena.rows) for arena in engine.session.arenas]
    held += [weakref.ref(parameter) for parameter in engine.session.stages[0].inner.parameters()]
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    with pytest.raises(EngineFailure, match="closed"):
        engine.extend(np.array([1]), cancel=NEVER)
