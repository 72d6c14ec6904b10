"""LoRA adapters and control vectors on llama.cpp: what one set made is never used under another (report 10)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.integration.api import disk_harness
from tests.integration.api.api_harness import MIB, running
from tests.integration.llama import tiny_gguf

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

from parkd.config.llama_settings import LoraAdapter
from parkd.state import VectorFile
from tests.integration.llama.llama_cpp_kit import loaded, opening

pytestmark = pytest.mark.anyio
RANK = 4
ROOM = {"disk_bytes": 256 * MIB, "ram_bytes": 64 * MIB}


def write_lora(path: Path, seed: int) -> Path:
    """An adapter of the tiny hybrid's first feed-forward layer, strong enough to change what it says."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(RANK))
    name = "blk.0.ffn_up.weight"
    writer.add_tensor(f"{name}.lora_a", rng.standard_normal((RANK, tiny_gguf.EMBED)).astype(np.float32))
    writer.add_tensor(f"{name}.lora_b", rng.standard_normal((tiny_gguf.FFN, RANK)).astype(np.float32))
    write(writer)
    return path


def write_vector(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "controlvector")
    for layer in range(1, tiny_gguf.LAYERS):
        writer.add_tensor(f"direction.{layer}", rng.standard_normal(tiny_gguf.EMBED).astype(np.float32))
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def test_report_10_another_set_of_adapters_reuses_nothing(tmp_path: Path) -> None:
    """All servers park in one directory; only that with the same files and scales finds what was left."""
    one, other = (write_lora(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))
    plain, half, others = LoraAdapter(one), LoraAdapter(one, 0.5), LoraAdapter(other)
    sets = [(), (plain,), (half,), (others,), (plain, others)]
    texts, fingerprints = [], []
    for loras in sets:
        with loaded("tiny", tmp_path, loras=loras) as engine:
            async with disk_harness.running_on(tmp_path / "park", engine, **ROOM) as server:
                answer = await server.chat(opening("a"), max_tokens=12)
                assert (answer.cache, answer.reused) == ("cold", 0), loras
            texts.append(answer.text)
            fingerprints.append(engine.info.fingerprint)
    assert len(set(texts)) == len(set(fingerprints)) == len(sets)
    with loaded("tiny", tmp_path, loras=sets[1]) as engine:
        async with disk_harness.running_on(tmp_path / "park", engine, **ROOM) as server:
            again = await server.chat(opening("a"), max_tokens=12)
            assert (again.cache, again.reused) == ("restored-disk", len(server.prompt_tokens(opening("a"))) - 1)
    assert again.text == texts[1]
    # One server that has both answers each request as a server with the request's set does.
    asked = [[], [{"id": 0, "scale": 1}], [{"id": 0, "scale": 0.5}], [{"id": 1, "scale": 1}]]
    asked.append([{"id": 1, "scale": 1}, {"id": 0, "scale": 1}])
    with loaded("tiny", tmp_path, loras=(LoraAdapter(one), LoraAdapter(other, 0.0))) as engine:
        async with running(engine) as server:
            first = [await server.chat(opening("a"), max_tokens=12, lora=each) for each in asked]
            back = [await server.chat(opening("a"), max_tokens=12, lora=each) for each in asked]
            default = await server.chat(opening("a"), max_tokens=12)
            tokens = len(server.prompt_tokens(opening("a")))
        assert engine.info.fingerprint == fingerprints[1]
    assert [(answer.cache, answer.reused, answer.text) for answer in first] == [("cold", 0, text) for text in texts]
    assert [(answer.reused, answer.text) for answer in back] == [(tokens - 1, text) for text in texts]
    assert (default.reused, default.text) == (tokens - 1, texts[1])


async def test_report_10_each_steering_has_its_own_state(tmp_path: Path) -> None:
    vectors = tuple(
        VectorFile(name, write_vector(tmp_path / f"{name}.gguf", seed), 0.0) for seed, name in enumerate("xy")
    )
    settings = [{}, {"steering": {"x": 8.0}}, {"steering": {"x": -8.0}}, {"steering": {"x": 8.0, "y": 8.0}}]
    with loaded("tiny", tmp_path, control_vectors=vectors) as engine:
        async with running(engine) as server:
            first = [await server.chat(opening("a"), max_tokens=12, **setting) for setting in settings]
            again = [await server.chat(opening("a"), max_tokens=12, **setting) for setting in settings]
            tokens = len(server.prompt_tokens(opening("a")))
    assert [(answer.cache, answer.reused) for answer in first] == [("cold", 0)] * len(settings)
    assert len({answer.text for answer in first}) == len(settings)
    assert [(answer.cache, answer.reused) for answer in again] == [("restored-ram", tokens - 1)] * len(settings)
    assert [answer.text for answer in again] == [answer.text for answer in first]


async def test_an_adapter_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    from parkd.errors import ModelError

    wrong = write_vector(tmp_path / "wrong.gguf", 1)
    with pytest.raises(ModelError, match=r"wrong\.gguf"), loaded("tiny", tmp_path, loras=(LoraAdapter(wrong),)):
        pass
