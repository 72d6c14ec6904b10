"""Control vectors through the HTTP API: state made under one setting is never used under another (report 10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from parkd import cli
from parkd.config import ModelConfig, load
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig, VectorFile
from parkd.types import SamplingParams
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Messages, Running, running

pytestmark = pytest.mark.anyio
VECTORS = {"calm": 0.0, "terse": 0.0}
PROMPT: Messages = [{"role": "user", "content": "A server holds one conversation in memory. " * 25}]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"steering": {"calm": 8.0}},
    {"steering": {"calm": -8.0}},
    {"steering": {"calm": 8.0, "terse": 6.0}},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    """Two stages of random weights, with two vectors that are off by default."""
    folder = tmp_path_factory.mktemp("steering")
    files = []
    for seed, name in enumerate(VECTORS):
        generator = torch.Generator().manual_seed(seed)
        save_file(
            {f"direction.{layer}": torch.randn(64, generator=generator) for layer in (1, 2, 3)},
            folder / f"{name}.safetensors",
        )
        files.append(VectorFile(name, folder / f"{name}.safetensors", VECTORS[name]))
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=1024, batch_tokens=256)
    config = ModelConfig("random:tiny-qwen3", folder, layout=layout, control_vectors=tuple(files))
    engine = TorchEngine.load(config)
    yield engine
    engine.close()


def never_parked(engine: Any, scales: Any, messages: Messages, count: int) -> str:
    """The answer of an engine that knew nothing before, under the same setting."""
    engine.reset()
    ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
    engine.steer(scales)
    engine.extend(ids[:-1], cancel=threading.Event())
    tokens: list[int] = []
    engine.begin(ids, SamplingParams(temperature=0))
    for step in engine.generate():
        if step[0] in engine.info.end_token_ids:
            break
        tokens += step
        if len(tokens) == count:
            break
    stream = engine.text_stream()
    return str(stream.push(tokens) + stream.flush())


def test_flags_reach_the_engine(tmp_path: Path) -> None:
    save_file({f"direction.{layer}": torch.ones(64) for layer in (1, 2, 3)}, tmp_path / "calm.safetensors")
    flags = {
        "model": "random:tiny-qwen3",
        "devices": "cpu,cpu",
        "ctx-size": "64",
        "kv-cache-dtype": "int8",
        "control-vector-scaled": f"{tmp_path}/calm.safetensors:0.5",
        "control-vector-layer-range": "2 3",
    }
    config = load(flags, {"XDG_CACHE_HOME": str(tmp_path)})
    engine = cli.load_engine(config, flags["model"], cli.MemoryShare(0), lambda _what, _share: None, is_demo=False)
    assert engine.steer(None) == engine.steering_digest({"calm": 0.5}) != engine.steering_digest({"calm": 1.0})
    assert list(engine.session._steered.steering.sums) == [2, 3]
    assert {field.name for field in engine.session.arenas[0].layout.row_fields} == {"key", "value", "scale"}
    engine.close()


async def check_settings_are_apart(server: Running, expected: dict[int, str]) -> None:
    for index, setting in enumerate(SETTINGS):
        answer = await server.chat(PROMPT, **setting)
        assert (answer.cache, answer.reused) == ("cold", 0), setting
        assert answer.text == expected[index], setting
    tokens = len(server.prompt_tokens(PROMPT))
    for index, setting in enumerate(SETTINGS):
        answer = await server.chat(PROMPT, **setting)
        assert (answer.cache, answer.reused) == ("restored-ram", tokens - 1), setting
        assert answer.text == expected[index], setting


async def test_report_10_each_setting_has_its_own_state() -> None:
    aside = FakeEngine(steering=VECTORS)
    expected = {i: never_parked(aside, s.get("steering"), PROMPT, 8) for i, s in enumerate(SETTINGS)}
    assert len(set(expected.values())) == len(SETTINGS)
    async with running(FakeEngine(steering=VECTORS)) as server:
        await check_settings_are_apart(server, expected)


async def test_report_10_on_a_real_model(tiny: TorchEngine) -> None:
    expected = {i: never_parked(tiny, s.get("steering"), PROMPT, 8) for i, s in enumerate(SETTINGS)}
    assert len(set(expected.values())) == len(SETTINGS)
    tiny.reset()
    async with running(tiny) as server:  # type: ignore[arg-type]
        await check_settings_are_apart(server, expected)


async def test_a_change_in_mid_conversation_reads_cold_and_the_old_setting_comes_back() -> None:
    async with running(FakeEngine(steering=VECTORS)) as server:
        first = await server.chat(PROMPT, steering={"calm": 1.0})
        second_turn = [*PROMPT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        changed = await server.chat(second_turn, steering={"calm": 2.0})
        assert (changed.cache, changed.reused) == ("cold", 0)
        back = await server.chat(second_turn, steering={"calm": 1.0})
        assert back.cache == "restored-ram"
        assert back.reused >= len(server.prompt_tokens(PROMPT))
        aside = FakeEngine(steering=VECTORS)
        assert changed.text == never_parked(aside, {"calm": 2.0}, second_turn, 8)
        assert back.text == never_parked(aside, {"calm": 1.0}, second_turn, 8)


async def test_no_vector_no_scale_and_no_field_are_the_same() -> None:
    async with running(FakeEngine(steering=VECTORS)) as server:
        await server.chat(PROMPT)
        for setting in ({}, {"calm": 0}, {"calm": 0.0, "terse": 0}, None):
            assert (await server.chat(PROMPT, steering=setting)).cache == "live", setting


async def test_the_servers_default_steers_who_asks_for_nothing() -> None:
    async with running(FakeEngine(steering={"calm": 0.5, "terse": 0.0})) as server:
        default = await server.chat(PROMPT)
        assert (await server.chat(PROMPT, steering={"calm": 0.5})).cache == "live"
        plain = await server.chat(PROMPT, steering={})
        assert (plain.cache, plain.text != default.text) == ("cold", True)
        assert (await server.chat(PROMPT, steering={"terse": 0.5})).cache == "cold"
        assert (await server.chat(PROMPT)).cache == "restored-ram"


async def test_every_dialect_takes_the_field() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": PROMPT, "max_tokens": 1},
        "/v1/messages": {"messages": PROMPT, "max_tokens": 1},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 1},
        "/v1/completions": {"prompt": "text", "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": PROMPT},
    }
    async with running(FakeEngine(steering=VECTORS, adapters=(0.0, 0.0))) as server:
        for path, body in bodies.items():
            refused = await server.client.post(path, json={**body, "steering": {"happy": 1}})
            assert refused.status_code == 400, path
            assert "calm, terse" in refused.text
            taken = await server.client.post(path, json={**body, "steering": {"calm": 1}})
            assert taken.status_code == 200, taken.text
            refused = await server.client.post(path, json={**body, "lora": [{"id": 2, "scale": 1}]})
            assert refused.status_code == 400, path
            assert "0 to 1" in refused.text
            taken = await server.client.post(path, json={**body, "lora": [{"id": 1, "scale": 1}]})
            assert taken.status_code == 200, taken.text
        keys = {bytes(server.engine.steering_digest(s.get("steering"))) for s in SETTINGS}
        assert len(keys) == len(SETTINGS)


async def test_each_set_of_adapters_has_its_own_state() -> None:
    """A set is its adapters and scales; in whatever order they are named, and whether 0 is said or left out."""
    sets: list[list[dict[str, float]]] = [
        [],
        [{"id": 0, "scale": 1}],
        [{"id": 0, "scale": 0.5}],
        [{"id": 1, "scale": 1}],
        [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}],
    ]
    async with running(FakeEngine(adapters=(0.5, 0.0))) as server:
        cold = [await server.chat(PROMPT, lora=each) for each in sets]
        again = [await server.chat(PROMPT, lora=each) for each in sets]
        turned = await server.chat(PROMPT, lora=list(reversed(sets[4])))
        default = await server.chat(PROMPT)
        half = await server.chat(PROMPT, lora=[{"id": 1, "scale": 0}, {"id": 0, "scale": 0.5}])
        listed = await server.client.get("/lora-adapters")
        refused = await server.client.post("/lora-adapters", json=[])
    assert [answer.reused for answer in cold] == [0] * len(sets)
    assert len({answer.text for answer in cold}) == len(sets)
    tokens = len(server.prompt_tokens(PROMPT))
    assert [(answer.reused, answer.text) for answer in again] == [(tokens - 1, answer.text) for answer in cold]
    assert (turned.reused, turned.text) == (tokens - 1, cold[4].text)
    assert {(answer.reused, answer.text) for answer in (default, half)} == {(tokens - 1, cold[2].text)}
    assert listed.json() == [
        {"id": 0, "path": "0.gguf", "scale": 0.5},
        {"id": 1, "path": "1.gguf", "scale": 0.0},
    ]
    assert refused.status_code == 405
    assert "`lora`" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 0},
        [0],
        [{"id": 0}],
        [{"scale": 1}],
        [{"id": "0", "scale": 1}],
        [{"id": 0, "scale": 1001}],
        [{"id": 0, "scale": True}],
        [{"id": -1, "scale": 1}],
        [{"id": 0, "scale": 1}, {"id": 0, "scale": 1}],
    ],
)
async def test_what_is_no_set_of_adapters_is_refused(wrong: Any) -> None:
    async with running(FakeEngine(adapters=(0.0,))) as server:
        answer = await server.client.post("/v1/chat/completions", json={"messages": PROMPT, "lora": wrong})
        assert answer.status_code == 400
        assert "lora" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong", [["calm"], "calm", {"calm": "much"}, {"calm": None}, {"calm": True}, {"calm": 1001}, {"calm": [1]}]
)
async def test_what_is_no_scale_is_refused(wrong: Any) -> None:
    async with running(FakeEngine(steering=VECTORS)) as server:
        answer = await server.client.post("/v1/chat/completions", json={"messages": PROMPT, "steering": wrong})
        assert answer.status_code == 400
        assert "steering" in answer.json()["error"]["message"]


async def test_an_engine_that_steers_otherwise_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(steering=VECTORS)
    async with running(engine) as server:
        monkeypatch.setattr(engine, "steer", lambda _scales, _adapters: b"another setting!")
        answer = await server.client.post("/v1/chat/completions", json={"messages": PROMPT})
        assert answer.status_code == 500
        monkeypatch.undo()
        assert (await server.chat(PROMPT)).text == never_parked(FakeEngine(), None, PROMPT, 8)
