"""GGUF files become the models they were made of, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import gguf_convert, presets
from engine.errors import UnsupportedModel
from engine.gguf import GgufFile
from engine.load_errors import ModelLoadError
from engine.loader import LoadConfig, LoadedModel, load_model
from engine.weight_file import PlannedTensor, WeightFileWriter


def load(model: str | Path, cache: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(model), cache, **settings))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_gguf(
    path: Path,
    name: str,
    *,
    kind: str | None = None,
    theta: float = 10000.0,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The tiny preset as llama.cpp's converter would write it; returns the weights by the library's names."""
    config = presets.preset_config(f"random:{name}")
    config.tie_word_embeddings = False
    weights = presets.random_model(config, torch.float32, torch.device("cpu")).state_dict()
    writer = gguf.GGUFWriter(str(path), kind or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    write_tokenizer(writer)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for source, tensor in weights.items():
        values = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in source or "k_proj" in source):
            heads = config.num_attention_heads if "q_proj" in source else config.num_key_value_heads
            apart = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(values.shape)
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target is not None
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(weights)


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    content = json.loads(presets.tiny_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in presets.SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(presets.CHATML)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_a_gguf_file_becomes_the_model_it_was_made_of(name: str, tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", name)
    loaded = load(tmp_path / "m.gguf", cache)
    found = loaded.model.state_dict()
    assert set(found) == set(weights)
    for key, values in weights.items():
        assert torch.equal(found[key], values), key
    text = "<|im_start|>user\nSome t\u00e9xt 123<|im_end|>"
    assert loaded.tokenizer.encode(text) == presets.tiny_tokenizer().encode(text)
    assert loaded.template.render([{"role": "user", "content": "a"}], [], {}).startswith("<|im_start|>user\na")
    assert loaded.end_token_ids == {0, 2}


def test_the_second_load_converts_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    first = load(tmp_path / "m.gguf", cache)

    def refuse(*_: object) -> None:
        raise AssertionError("converted or hashed again")

    monkeypatch.setattr(gguf_convert, "convert", refuse)
    monkeypatch.setattr("engine.model_cache._content_digest", refuse)
    second = load(tmp_path / "m.gguf", cache)
    assert second.weights_digest == first.weights_digest


def test_a_torn_conversion_is_made_again(tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", "tiny-llama")
    load(tmp_path / "m.gguf", cache)
    (made,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    part = made.with_suffix(".part")  # What a killed process leaves.
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    found = load(tmp_path / "m.gguf", cache).model.state_dict()
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
    assert not part.exists()


def test_progress_tells_of_the_conversion(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    told: list[tuple[str, float]] = []
    load_model(LoadConfig(str(tmp_path / "m.gguf"), cache), lambda what, share: told.append((what, share)))
    shares = [share for what, share in told if what == "Converting m.gguf"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


def test_an_unknown_gguf_kind_is_refused_before_any_tensor(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama", kind="gemma3")
    monkeypatch.setattr(GgufFile, "dequantized", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UnsupportedModel, match="gemma3"):
        load(tmp_path / "m.gguf", cache)


def test_an_unknown_way_to_cut_text_is_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama", change=lambda writer: writer.add_tokenizer_pre("mystery"))
    with pytest.raises(ModelLoadError, match="mystery"):
        load(tmp_path / "m.gguf", cache)


def test_divisors_of_the_rope_become_the_scaling_that_made_them(tmp_path: Path, cache: Path) -> None:
    theta, factor, dimensions = 500_000.0, 32.0, 16
    wavelengths = 2 * np.pi * theta ** (2 * np.arange(dimensions // 2) / dimensions)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    assert divisors[-1] == factor

    def scaled(values: np.ndarray) -> Callable[[gguf.GGUFWriter], None]:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_dimension_count(dimensions)
            writer.add_tensor("rope_freqs.weight", values)

        return change

    write_gguf(tmp_path / "m.gguf", "tiny-llama", theta=theta, change=scaled(divisors))
    loaded = load(tmp_path / "m.gguf", cache)
    assert loaded.config.rope_parameters["factor"] == factor
    unscaled = 1 / theta ** (np.arange(0, dimensions, 2) / dimensions)
    found = loaded.model.base_model.rotary_emb.inv_freq.numpy()
    assert np.allclose(found, unscaled / divisors, rtol=1e-5)
    write_gguf(tmp_path / "odd.gguf", "tiny-llama", theta=theta, change=scaled(divisors[::-1].copy()))
    with pytest.raises(UnsupportedModel, match="divisors"):
        load(tmp_path / "odd.gguf", cache)


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 4000, -100])
def test_a_cut_gguf_file_is_an_error_of_its_own(kept: int, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "tiny-llama")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelLoadError):
        load(path, cache)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_tensors_are_near_what_they_were(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("t.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "q.gguf") as file:
        found = file.dequantized("t.weight")
    assert found.shape == values.shape
    assert np.abs(found - values).max() < (0.02 if kind.name == "Q8_0" else 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_weights_are_read_by_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype),
        "b": torch.ones(7).to(dtype),
    }
    plan = [PlannedTensor(name, tuple(values.shape)) for name, values in tensors.items()]
    with WeightFileWriter(tmp_path / "w.safetensors", plan, dtype) as writer:
        for values in tensors.values():
            writer.write(values)
        writer.finish()
    found = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], values) for name, values in tensors.items())


def test_a_sentencepiece_vocabulary_of_a_gguf_file_is_read(tmp_path: Path, cache: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0]

    def sentencepiece(writer: gguf.GGUFWriter) -> None:
        for name in ("merges", "pre"):
            for part in writer.kv_data:
                part.pop(f"tokenizer.ggml.{name}", None)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    write_gguf(tmp_path / "m.gguf", "tiny-llama", change=sentencepiece)
    tokenizer = load(tmp_path / "m.gguf", cache).tokenizer
    ids = tokenizer.encode("ab ab\u00e9")
    assert ids[-3:] == [263, 3 + 0xC3, 3 + 0xA9]
    stream = tokenizer.text(())
    assert "".join([stream.push([token]).text for token in ids] + [stream.flush().text]).lstrip() == "ab ab\u00e9"
