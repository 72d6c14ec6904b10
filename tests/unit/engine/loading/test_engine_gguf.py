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
from parkd_engine.families.presets.shapes import PRESETS, preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import CHATML, SPECIAL_TOKENS, tiny_tokenizer
from parkd_engine.loading import gguf_convert
from parkd_engine.loading.gguf_tokenizer import save_tokenizer
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from tokenizers import Tokenizer
from transformers.utils import logging as library_logging

from parkd.errors import ModelError, UnsupportedModel
from parkd.model_files.gguf_metadata import GgufMetadata


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
    packing: gguf.GGMLQuantizationType | None = None,
    left_out: str | None = None,
    theta: float = 10000.0,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The tiny preset as llama.cpp's converter would write it; returns the weights by the library's names.

    With `packing`, matrices are stored so, and returned as they are once unpacked.
    """
    config = preset_config(f"random:{name}")
    config.tie_word_embeddings = False
    weights = dict(random_model(config, torch.float32, torch.device("cpu")).state_dict())
    writer = gguf.GGUFWriter(str(path), kind or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    write_tokenizer(writer, config.vocab_size)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for source, tensor in list(weights.items()):
        values = tensor.numpy()
        if packing is not None and values.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, packing), packing)
            weights[source] = torch.from_numpy(values.copy())
        if config.model_type == "llama" and ("q_proj" in source or "k_proj" in source):
            heads = config.num_attention_heads if "q_proj" in source else config.num_key_value_heads
            apart = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(values.shape)
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target is not None
        if target == left_out:
            continue
        if packing is not None and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(values, packing), raw_dtype=packing)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def write_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """The tiny tokenizer; as llama.cpp's converter does, rows of no token get a name and are marked unused."""
    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    unused = [f"[PAD{number}]" for number in range(len(tokens), vocabulary)]
    writer.add_token_list(tokens + unused)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens] + [5] * len(unused))
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(CHATML)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_a_gguf_file_becomes_the_model_it_was_made_of(name: str, tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", name)
    loaded = load(tmp_path / "m.gguf", cache)
    found = loaded.model.state_dict()
    assert set(found) == set(weights)
    for key, values in weights.items():
        assert torch.equal(found[key], values), key
    text = "<|im_start|>user\nSome t\u00e9xt 123<|im_end|>"
    assert loaded.tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert loaded.template.render([{"role": "user", "content": "a"}], [], {}).startswith("<|im_start|>user\na")
    assert loaded.end_token_ids == {0, 2}


def test_the_second_load_converts_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    first = load(tmp_path / "m.gguf", cache)

    def refuse(*_: object) -> None:
        raise AssertionError("converted or hashed again")

    monkeypatch.setattr(gguf_convert, "convert", refuse)
    monkeypatch.setattr("parkd.model_files.cache._content_digest", refuse)
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


def test_progress_tells_of_the_conversion_and_the_library_keeps_silent(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library_logging.enable_progress_bar()  # other tests start the command, which switches it off for the process
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    told: list[tuple[str, float]] = []
    load_model(LoadConfig(str(tmp_path / "m.gguf"), cache), lambda what, share: told.append((what, share)))
    shares = [share for what, share in told if what == "Converting m.gguf"]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(shares) > 3
    assert "Loading weights" not in capfd.readouterr().err
    assert library_logging.is_progress_bar_enabled()


@pytest.mark.parametrize("kind", ["falcon", "gemma2"])
def test_an_unknown_gguf_kind_is_refused_before_any_tensor(
    kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama", kind=kind)
    monkeypatch.setattr(gguf_convert.AutoModelForCausalLM, "from_pretrained", lambda *_: pytest.fail("weights read"))
    with pytest.raises(UnsupportedModel, match=kind):
        load(tmp_path / "m.gguf", cache)


def test_a_configuration_the_engine_does_not_run_is_refused_before_any_tensor(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    monkeypatch.setattr(gguf_convert.AutoModelForCausalLM, "from_pretrained", lambda *_: pytest.fail("weights read"))

    def refuse(_: object) -> None:
        raise UnsupportedModel("not this one")

    monkeypatch.setattr(gguf_convert, "check_config", refuse)
    with pytest.raises(UnsupportedModel, match="not this one"):
        load(tmp_path / "m.gguf", cache)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path, cache: Path) -> None:
    """The library would leave it out and run another model."""
    bias = np.ones(64, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", "tiny-llama", change=lambda writer: writer.add_tensor("blk.0.attn_q.bias", bias))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        load(tmp_path / "m.gguf", cache)


def test_a_missing_tensor_is_refused(tmp_path: Path, cache: Path) -> None:
    """The library would draw it at random."""
    write_gguf(tmp_path / "m.gguf", "tiny-qwen3", left_out="blk.1.attn_q_norm.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_norm"):
        load(tmp_path / "m.gguf", cache)


def test_an_unknown_way_to_cut_text_is_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "tiny-llama", change=lambda writer: writer.add_tokenizer_pre("mystery"))
    with pytest.raises(ModelError, match="mystery"):
        load(tmp_path / "m.gguf", cache)


def test_smollm_cuts_digits_apart(tmp_path: Path) -> None:
    tokens = ["1", "2", "\u0120", "12", "\u01201"]
    entries = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": ["1 2", "\u0120 1"]}
    file = GgufMetadata(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in entries.items()})
    save_tokenizer(file, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(" 12").ids == [2, 0, 1]


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


@pytest.mark.parametrize(("kind", "entries"), [("linear", {}), ("yarn", {"original_max_position_embeddings": 1024})])
def test_a_stated_scaling_of_the_rope_is_kept(kind: str, entries: dict[str, int], tmp_path: Path, cache: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    write_gguf(tmp_path / "m.gguf", "tiny-qwen2", change=scaled)
    rope = load(tmp_path / "m.gguf", cache).config.rope_parameters
    assert rope.items() >= {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **entries}.items()


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 4000, -100])
def test_a_cut_gguf_file_is_an_error_of_its_own(kept: int, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "tiny-llama")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError):
        load(path, cache)


@pytest.mark.parametrize("packing", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_packed_tensors_are_unpacked(packing: gguf.GGMLQuantizationType, tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", "tiny-qwen3", packing=packing)
    found = load(tmp_path / "m.gguf", cache).model.state_dict()
    for key, values in weights.items():
        assert torch.equal(found[key], values), key


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_of_a_gguf_file_is_read(prefix: bool, tmp_path: Path, cache: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0]

    def sentencepiece(writer: gguf.GGUFWriter) -> None:
        for name in ("merges", "pre"):
            for part in writer.kv_data:
                part.pop(f"tokenizer.ggml.{name}", None)
        writer.add_tokenizer_model("llama")
        unused = PRESETS["tiny-llama"].settings["vocab_size"] - len(words)
        writer.add_token_list(words + [f"[PAD{number}]" for number in range(unused)])
        writer.add_token_scores(scores + [-1000.0] * unused)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5 + [5] * unused)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    write_gguf(tmp_path / "m.gguf", "tiny-llama", change=sentencepiece)
    tokenizer = load(tmp_path / "m.gguf", cache).tokenizer
    ids = tokenizer.encode("ab ab\u00e9")
    assert ids == [263 if prefix else 262, 263, 3 + 0xC3, 3 + 0xA9]
    stream = tokenizer.text()
    assert "".join([stream.push([token]) for token in ids] + [stream.flush()]).lstrip() == "ab ab\u00e9"
