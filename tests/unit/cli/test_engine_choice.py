"""`--engine auto`: it goes by what `--model` is and by what is installed, and the first line says which and why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from parkd_engine.families.presets.shapes import PRESETS

from parkd import cli
from parkd.cli.model import LLAMA_HINT, LLAMA_PACKAGE, card_notes, choose_engine, unpacking_notes
from parkd.cli.random_models import check_name
from parkd.config import load
from parkd.errors import ConfigError, ModelError

HUB, GGUF = "owner/name", "some/Model.GGUF"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PARKD_")]:
        monkeypatch.delenv(name)


def test_found_by_use_a_mistyped_random_model_is_refused_before_torch_is_imported() -> None:
    """It took 40 s on a busy machine, in silence."""
    asked = "[cli.main([name, '--model', 'random:tiny-qwen33', '--port', '0']) for name in ('serve', 'canary', 'plan')]"
    script = f"import sys; from parkd import cli; print({asked}, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[2, 2, 2] False\n", ended.stderr
    assert ended.stderr.count("no random model of that name; did you mean tiny-qwen3?") == 3
    for name in PRESETS:
        check_name(f"random:{name}")


def installed(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    """Makes the library found, or not, whatever is installed here; nothing else is hidden."""
    find = importlib.util.find_spec
    spec = ModuleSpec(LLAMA_PACKAGE, None) if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == LLAMA_PACKAGE else find(name))


@pytest.mark.parametrize(
    ("flags", "model", "is_demo", "has_library", "engine", "why"),
    [
        ({}, GGUF, False, True, "llama.cpp", "the model is a GGUF file, and the library is installed"),
        ({}, GGUF, False, False, "torch", f"llama.cpp is not installed: {LLAMA_HINT}"),
        ({}, HUB, False, True, "torch", "the model is not a GGUF file"),
        ({}, HUB, False, False, "torch", "the model is not a GGUF file"),
        ({"devices": "cpu,cpu"}, GGUF, False, True, "torch", "--devices names its stages"),
        ({"devices": "cpu"}, HUB, False, True, "torch", "--devices names its stages"),
        ({"devices": "cpu,cpu", "layer-split": "2"}, GGUF, False, True, "torch", "--devices names its stages"),
        ({}, GGUF, True, True, "torch", "the demo model runs on it unless asked otherwise"),
        ({}, GGUF, True, False, "torch", f"llama.cpp is not installed: {LLAMA_HINT}"),
        ({"gpu-layers": "3"}, GGUF, True, True, "llama.cpp", "--gpu-layers is its flag"),
        ({"main-gpu": "1"}, GGUF, False, True, "llama.cpp", "--main-gpu is its flag"),
        ({"weights": "int4"}, GGUF, False, True, "torch", "--weights converts for it"),
        ({"threads": "2"}, HUB, False, True, "torch", "the model is not a GGUF file"),
        ({"engine": "torch"}, GGUF, False, True, "torch", "--engine names it"),
        ({"engine": "llama.cpp"}, GGUF, True, True, "llama.cpp", "--engine names it"),
        ({"upstream": "http://127.0.0.1:1"}, "", False, True, "llama-server", "--upstream names one"),
        ({"upstream": "http://127.0.0.1:1"}, "", False, False, "llama-server", "--upstream names one"),
    ],
)
def test_the_engine_is_chosen_by_the_model_and_by_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: dict[str, str],
    model: str,
    is_demo: bool,
    has_library: bool,
    engine: str,
    why: str,
) -> None:
    installed(monkeypatch, is_there=has_library)
    config = load(with_slots(flags, tmp_path), {}).model
    assert choose_engine(config, model, is_demo=is_demo) == (engine, why)


def with_slots(flags: dict[str, str], folder: Path) -> dict[str, str]:
    """An upstream needs its directory and a bound."""
    if "upstream" not in flags:
        return flags
    return {**flags, "slot-save-path": str(folder), "conversation-cache-disk-mib": "8"}


@pytest.mark.parametrize(
    ("flags", "model", "has_library", "hint"),
    [
        ({"engine": "llama.cpp"}, HUB, True, "runs GGUF files"),
        ({"engine": "llama.cpp"}, GGUF, False, "pip install llama-cpp-python"),
        ({"engine": "llama.cpp", "devices": "cpu,cpu"}, GGUF, True, "--tensor-split"),
        (
            {"main-gpu": "1"},
            HUB,
            True,
            "--main-gpu is for llama.cpp, and this runs on torch, since the model is not a GGUF",
        ),
        ({"main-gpu": "1"}, GGUF, False, "since llama.cpp is not installed"),
        ({"main-gpu": "1", "devices": "cpu"}, GGUF, True, "since --devices names its stages"),
        ({"engine": "torch", "gpu-layers": "3"}, GGUF, True, "since --engine names it"),
        ({"engine": "llama.cpp", "weights": "int4"}, GGUF, True, "--weights int4 is for --engine torch"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, str], model: str, has_library: bool, hint: str
) -> None:
    installed(monkeypatch, is_there=has_library)
    config = load(with_slots(flags, tmp_path), {}).model
    with pytest.raises(ConfigError, match=hint):
        choose_engine(config, model, is_demo=False)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"engine": "torch", "upstream": "http://127.0.0.1:1"}, "leave out --upstream or --engine torch"),
        ({"slot-save-path": "."}, "--engine llama-server needs --upstream"),
        ({"engine": "remote"}, "--engine remote needs --upstream"),
        ({"upstream-turns": "9"}, "--upstream-turns is for --engine remote: name the server"),
        ({"upstream": "http://127.0.0.1:1", "slot-save-path": ".", "upstream-turns": "9"}, "--engine remote"),
        ({"upstream": "http://127.0.0.1:1", "conversation-cache-mib": "100"}, "keeps its own: leave it out"),
        ({"upstream": "http://127.0.0.1:1", "threads": "2"}, "give it to the server at --upstream"),
    ],
)
def test_flags_of_a_llama_server_are_refused_without_one(flags: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load(flags, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [("threads", "2"), ("gpu-layers", "9"), ("model", "owner/name"), ("ctx-size", "4096"), ("kv-cache-dtype", "int8")],
)
def test_flags_of_a_model_are_refused_beside_a_llama_server_that_has_loaded_it(
    tmp_path: Path, name: str, text: str
) -> None:
    flags = with_slots({"upstream": "http://127.0.0.1:1", name: text}, tmp_path)
    with pytest.raises(ConfigError, match=f"--{name} is for a model .* give it to the llama-server"):
        load(flags, {})


LOADERS = {"llama.cpp": "load_llama_cpp", "torch": "load_engine", "llama-server": "load_upstream"}


@pytest.mark.parametrize(
    ("words", "has_library", "engine", "why"),
    [
        ([], True, "llama.cpp", "the model is a GGUF file, and the library is installed"),
        ([], False, "torch", f"llama.cpp is not installed: {LLAMA_HINT}"),
        (["--devices", "cpu,cpu"], True, "torch", "--devices names its stages"),
        (["--upstream", "http://127.0.0.1:1"], True, "llama-server", "--upstream names one"),
    ],
)
def test_the_first_line_says_it_and_that_engine_is_the_one_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    has_library: bool,
    engine: str,
    why: str,
) -> None:
    """Each loader is replaced by one that stops there and names itself."""
    installed(monkeypatch, is_there=has_library)
    for name, loader in LOADERS.items():

        def stop(*_given: Any, name: str = name, **_more: Any) -> None:
            raise ModelError(f"{name} was loaded")

        monkeypatch.setattr(cli, loader, stop)
    model = tmp_path / "m.gguf"
    model.touch()
    place = ["--slot-save-path", str(tmp_path), "--conversation-cache-disk-mib", "8"]
    rest = place if "--upstream" in words else ["--model", str(model)]
    assert cli.main([*words, *rest, "--port", "0"]) == 2
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == f"engine    {engine}, since {why}"
    assert f"{engine} was loaded" in told.err


@pytest.mark.parametrize(
    ("gpu_layers", "build_has_cards", "has_card", "said"),
    [
        (None, True, True, ""),
        (None, False, False, ""),
        (0, False, True, ""),
        (None, False, True, "the cards here are not used"),
        (9, False, False, "--gpu-layers has no effect"),
        (9, False, True, "--gpu-layers has no effect"),
        (9, True, False, ""),
    ],
)
def test_a_build_for_the_processor_alone_is_told_where_cards_were_meant(
    gpu_layers: int | None, build_has_cards: bool, has_card: bool, said: str
) -> None:
    notes = card_notes(gpu_layers, build_has_cards, has_card)
    assert len(notes) == bool(said)
    assert all(said in note and "--engine torch" in note for note in notes)


def test_a_gguf_file_that_torch_unpacks_says_so(tmp_path: Path) -> None:
    """Found by use 21: it took five times its size without a word."""
    file = tmp_path / "x.GGUF"
    file.write_bytes(bytes(3 << 20))
    [note] = unpacking_notes(str(file), tmp_path / "home")
    assert "3 MiB of this GGUF file" in note
    assert LLAMA_HINT in note
    assert unpacking_notes(str(tmp_path), tmp_path) == ()


def test_experts_in_main_memory_are_for_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, is_there=True)
    for value, expected in (("12", 12), ("auto", None), ("0", 0)):
        assert load({"cpu-experts": value}, {}).model.layout.cpu_experts == expected
    with pytest.raises(ConfigError, match=r"--cpu-experts is for --engine torch.*--gpu-layers"):
        choose_engine(load({"cpu-experts": "auto"}, {}).model, GGUF, is_demo=False)
    assert choose_engine(load({"cpu-experts": "auto"}, {}).model, HUB, is_demo=False)[0] == "torch"
    with pytest.raises(ConfigError, match="whole number of layers"):
        load({"cpu-experts": "all"}, {})


def test_llama_cpp_takes_a_number_of_live_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, is_there=True)
    assert choose_engine(load({"parallel": "3"}, {}).model, GGUF, is_demo=False)[0] == "llama.cpp"
    with pytest.raises(ConfigError, match=r"--parallel auto is for --engine torch.*name a number"):
        choose_engine(load({"parallel": "auto"}, {}).model, GGUF, is_demo=False)


def test_embeddings_and_reranking_are_of_llama_cpp_and_exclude_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, is_there=True)
    for flags, expected in (
        ({}, (False, None)),
        ({"embeddings": "on"}, (True, None)),
        ({"embeddings": "on", "pooling": "last"}, (True, "last")),
        ({"reranking": "on"}, (True, "rank")),
    ):
        llama = load(flags, {}).model.llama
        assert (llama.embeddings, llama.pooling) == expected
    for flags, said in (
        ({"pooling": "last"}, "--embeddings: add it"),
        ({"reranking": "on", "embeddings": "on"}, "leave out --embeddings"),
        ({"reranking": "on", "pooling": "mean"}, "leave out --embeddings and --pooling"),
        ({"embeddings": "on", "pooling": "max"}, "mean, cls, last, rank"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(flags, {})
    with pytest.raises(ConfigError, match=r"--embeddings is for llama\.cpp"):
        choose_engine(load({"embeddings": "on"}, {}).model, HUB, is_demo=False)


@pytest.mark.parametrize("flag", ["draft-tokens", "draft-max"])
def test_llama_cpp_does_not_pass_over_guesses_that_it_cannot_make(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, is_there=True)
    with pytest.raises(ConfigError, match=r"--draft-tokens is for draft heads on --engine torch"):
        choose_engine(load({flag: "3"}, {}).model, GGUF, is_demo=False)
    assert choose_engine(load({flag: "0"}, {}).model, GGUF, is_demo=False)[0] == "llama.cpp"
