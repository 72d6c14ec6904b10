"""Where models come from, what is refused and when, and what is kept between starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import tiny_tokenizer
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from transformers import AutoModelForCausalLM

from parkd.errors import InvalidRequest, ModelError, UnsupportedModel
from parkd.model_files import cache as model_cache
from parkd.model_files.cache import ModelCache
from parkd.words.templates import ChatTemplate


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
    config = preset_config(f"random:{name}")
    random_model(config, torch.float32, torch.device("cpu")).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


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
    with pytest.raises(ModelError, match="tiny-qwen3"):
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
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors"):
        load(folder, cache)


def test_a_wrong_architecture_is_refused_before_weights_are_read(folder: Path, cache: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"not weights: reading them would fail in another way")
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM sets attn_logit_softcapping"):
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
    with pytest.raises(ModelError, match=message):
        load(make(tmp_path / "thing"), cache)


def test_a_directory_of_gguf_files_says_to_name_one(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.gguf"):
        load(tmp_path, cache)


def test_a_failed_conversion_leaves_nothing_that_would_be_loaded(cache: Path) -> None:
    kept = ModelCache(cache)

    def fail(part: Path) -> None:
        (part / "config.json").write_text("{}")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        kept.converted("key", fail)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []
    done = kept.converted("key", lambda part: (part / "config.json").write_text("{}") and None)
    assert (done / "config.json").read_text() == "{}"


def test_a_converted_file_that_changed_is_converted_again(cache: Path) -> None:
    made: list[Path] = []

    def convert(part: Path) -> None:
        made.append(part)
        (part / "model.safetensors").write_bytes(b"weights")
        (part / "config.json").write_text("{}")

    weights = ModelCache(cache).converted("key", convert) / "model.safetensors"
    os.utime(weights, ns=(0, 0))  # as a copy of the folder may have it
    ModelCache(cache).converted("key", convert)
    assert len(made) == 1
    weights.write_bytes(b"we\0ghts")
    ModelCache(cache).converted("key", convert)
    assert len(made) == 2
    assert weights.read_bytes() == b"weights"


def test_a_converted_model_is_not_read_again_to_check_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ModelCache(cache)
    done = kept.converted("key", lambda part: (part / "config.json").write_text("{}") and None)
    monkeypatch.setattr(model_cache, "_content_digest", lambda *_: pytest.fail("it was read"))
    assert kept.converted("key", lambda _: pytest.fail("it was converted")) == done


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
    with pytest.raises(ModelError, match=r"none\.jinja"):
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
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(tokenizer, source).render([{"role": "user", "content": "a"}], [], {})


def test_tools_and_the_generation_prompt_reach_the_template(cache: Path) -> None:
    template = load("random:tiny-llama", cache).template
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = template.render([{"role": "user", "content": "a"}], [tool], {}, add_generation_prompt=False)
    assert '"look"' in text
    assert text.endswith("a<|im_end|>\n")


def test_none_reaches_the_template(tmp_path: Path, cache: Path) -> None:
    """Some templates show an answer's tool calls only when its content is there and None."""
    (tmp_path / "t.jinja").write_text("{{ 'content' in messages[1] and messages[1].content is none }}{{ eos_token }}")
    loaded = load("random:tiny-llama", cache, chat_template_file=tmp_path / "t.jinja")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert loaded.template.render(messages, [], {}) == "True<|im_end|>"


def test_arguments_of_the_renderer_itself_are_not_the_requests_to_set(cache: Path) -> None:
    template = load("random:tiny-llama", cache).template
    own = {"chat_template": "x", "conversations": [], "tokenize": True, "tools": [], "continue_final_message": True}
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, [], own) == template.render(messages, [], {})


def test_no_messages_are_refused(cache: Path) -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        load("random:tiny-llama", cache).template.render([], [], {})


def test_loading_shows_no_bars_of_the_library(folder: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load(folder, cache)
    assert "Loading weights" not in capfd.readouterr().err


def test_found_by_use_15_links_in_the_model_cache_are_not_followed(tmp_path: Path) -> None:
    """Issue 22, item 15, its kind: names that parkd chooses in a folder may be links to something precious."""
    precious, read = tmp_path / "precious", tmp_path / "weights"
    precious.write_text("precious")
    read.write_text("weights")
    cache = ModelCache(tmp_path / "cache")
    digest = cache.file_digest(read)
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    note.unlink()
    note.with_suffix(f".{os.getpid()}.part").symlink_to(precious)
    assert cache.file_digest(read) == digest
    assert not note.is_symlink()
    (tmp_path / "cache" / "models" / "key.lock").symlink_to(tmp_path / "made")
    with pytest.raises(ModelError, match="cannot be stored"):
        cache.converted("key", lambda part: (part / "model").write_text("x") and None)
    assert not (tmp_path / "made").exists()
    assert precious.read_text() == "precious"
