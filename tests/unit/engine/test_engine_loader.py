"""Where models come from, what is refused and when, and what is kept between starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine import gguf_convert, presets
from engine.chat import ChatTemplate
from engine.errors import UnsupportedModel
from engine.gguf import GgufFile
from engine.load_errors import ModelLoadError, TemplateRefused
from engine.loader import LoadConfig, LoadedModel, load_model
from engine.memory import StageNeed, choose_context
from engine.model_cache import ModelCache
from engine.weight_file import PlannedTensor, WeightFileWriter

GIB = 1 << 30


def load(model: str | Path, cache: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(model), cache, **settings))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory of the tiny Llama."""
    return save_directory("tiny-llama", tmp_path / "model")


def save_directory(name: str, path: Path) -> Path:
    config = presets.preset_config(f"random:{name}")
    presets.random_model(config, torch.float32, torch.device("cpu")).save_pretrained(path)
    presets.tiny_tokenizer().save_pretrained(path)
    return path


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
def test_random_presets_are_seeded_and_speak_chatml(name: str, cache: Path) -> None:
    first, second = load(f"random:{name}", cache), load(f"random:{name}", cache)
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    text = first.template.render([{"role": "user", "content": "hi"}], [], {})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = first.tokenizer.encode(text)
    assert first.tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert first.end_token_ids == {2}
    assert first.weights_digest == second.weights_digest


def test_random_rotary_frequencies_are_those_of_the_configuration(cache: Path) -> None:
    """Weights are drawn into empty memory; what is computed must not be left empty."""
    loaded = load("random:tiny-qwen3", cache)
    usual = AutoModelForCausalLM.from_config(loaded.config)
    assert torch.equal(loaded.model.base_model.rotary_emb.inv_freq, usual.base_model.rotary_emb.inv_freq)


def test_an_unknown_preset_names_the_known_ones(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="tiny-qwen3"):
        load("random:huge", cache)


def test_a_directory_loads_in_float32_with_a_digest_of_its_weights(folder: Path, cache: Path) -> None:
    first = load(folder, cache)
    assert {parameter.dtype for parameter in first.model.parameters()} == {torch.float32}
    assert first.name == "model"
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load(folder, cache).weights_digest != first.weights_digest


def test_pickled_weights_are_refused(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*safetensors"):
        load(folder, cache)


def test_a_wrong_architecture_is_refused_before_weights_are_read(folder: Path, cache: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"not weights: reading them would fail in another way")
    with pytest.raises(UnsupportedModel, match="GemmaForCausalLM"):
        load(folder, cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "neither"),
        (lambda path: (path.mkdir(), path)[1], r"no config\.json"),
        (lambda path: (path.write_text("x"), path)[1], "not a GGUF file"),
    ],
)
def test_what_is_no_model_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(make(tmp_path / "thing"), cache)


def test_a_directory_of_gguf_files_says_to_name_one(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"a\.gguf"):
        load(tmp_path, cache)


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


def test_a_failed_conversion_leaves_nothing_that_would_be_loaded(cache: Path) -> None:
    kept = ModelCache(cache)

    def fail(part: Path) -> None:
        (part / "config.json").write_text("{}")
        raise ModelLoadError("no")

    with pytest.raises(ModelLoadError, match="no"):
        kept.converted("key", fail)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []
    done = kept.converted("key", lambda part: (part / "config.json").write_text("{}") and None)
    assert (done / "config.json").read_text() == "{}"


def test_two_starts_convert_once(cache: Path) -> None:
    made: list[Path] = []

    def convert(part: Path) -> None:
        made.append(part)
        time.sleep(0.2)  # Long enough for the other to come to the lock.
        (part / "config.json").write_text("{}")

    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ModelCache(cache).converted("key", convert), range(2)))
    assert len(made) == 1
    assert folders[0] == folders[1]


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


def test_a_digest_is_remembered_only_for_the_very_same_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"one")
    kept = ModelCache(cache)
    first = kept.file_digest(path)
    look = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(look.st_atime_ns, look.st_mtime_ns))
    assert kept.file_digest(path) == first  # Same path, size, mtime and inode: this is what the note is for.
    os.utime(path, ns=(look.st_atime_ns, look.st_mtime_ns + 1))
    second = kept.file_digest(path)
    assert second != first
    replaced = tmp_path / "other"
    replaced.write_bytes(b"one")
    os.utime(replaced, ns=(look.st_atime_ns, look.st_mtime_ns + 1))
    replaced.replace(path)  # Another inode, everything else as noted.
    assert kept.file_digest(path) == first
    for note in (cache / "digests").iterdir():
        note.write_text("damaged")
    assert kept.file_digest(path) == first


def test_a_template_file_replaces_the_models_own(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    loaded = load("random:tiny-llama", cache, chat_template_file=tmp_path / "t.jinja")
    assert loaded.template.render([{"role": "user", "content": "a"}], [], {"mood": "!"}) == "a!"
    with pytest.raises(ModelLoadError, match=r"none\.jinja"):
        load("random:tiny-llama", cache, chat_template_file=tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].name.first }}", "name"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected"),
        (None, "--chat-template-file"),
    ],
)
def test_a_template_that_refuses_is_heard(source: str | None, words: str) -> None:
    tokenizer = presets.tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateRefused, match=words):
        ChatTemplate(tokenizer, source).render([{"role": "user", "content": "a"}], [], {})


def test_tools_and_the_generation_prompt_reach_the_template(cache: Path) -> None:
    template = load("random:tiny-llama", cache).template
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = template.render([{"role": "user", "content": "a"}], [tool], {}, add_generation_prompt=False)
    assert '"look"' in text
    assert text.endswith("a<|im_end|>\n")


STAGES = [StageNeed("cpu", 1000, 0), StageNeed("cpu", 1000, 0)]


def test_the_largest_context_that_fits_is_chosen() -> None:
    # 8 GiB free, a tenth kept, 1 GiB promised; two stages on one device share what is left.
    room = 8 * GIB - int(8 * GIB * 0.1) - GIB
    chosen = choose_context(STAGES, 10**9, None, reserved_bytes=GIB, free=lambda _: 8 * GIB)
    assert chosen == room // 2000 // 256 * 256
    assert choose_context(STAGES, 4097, None, free=lambda _: 2 * GIB) == 4097


def test_the_tightest_device_decides() -> None:
    stages = [StageNeed("cuda:0", 1000, 0), StageNeed("cuda:1", 1000, 0)]
    free = {"cuda:0": 4 * GIB, "cuda:1": GIB}
    assert choose_context(stages, 10**9, None, reserved_bytes=3 * GIB, free=free.__getitem__) == (
        (GIB - (256 << 20)) // 1000 // 256 * 256
    )


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ModelLoadError, match=r"1000000 tokens needs 1,907 MiB on cpu; \d+ tokens"):
        choose_context(STAGES, 10**9, 10**6, free=lambda _: GIB)
    with pytest.raises(ModelLoadError, match="reads 4096 at most"):
        choose_context(STAGES, 4096, 5000, free=lambda _: GIB)
    with pytest.raises(ModelLoadError, match="0 tokens"):
        choose_context(STAGES, 4096, None, free=lambda _: 1 << 20)
