"""llama.cpp in process: experts that stay in the memory of the host (`--cpu-moe`, `--n-cpu-moe`), and sums that do not
repeat on cards."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

from parkd.engine_adapter.llama_cpp.library import GRAPHS_VARIABLE, WARN_LEVEL, LibraryLog
from tests.integration.llama.llama_cpp_kit import loaded
from tests.integration.llama.test_llama_cpp_bits import compare
from tests.integration.llama.tiny_gguf import LAYERS

LAYERS_ALL = LAYERS + 1
"""The library counts the output as one."""
PLACED = re.compile(rb"tensor (\S+) .* buffer type overridden to (\S+)")
"""What the library logs of each tensor that is kept elsewhere."""


@pytest.mark.parametrize(("options", "layers"), [({}, 0), ({"n_cpu_moe": 2}, 2), ({"cpu_moe": True}, LAYERS)], ids=str)
def test_the_experts_of_these_layers_stay_with_the_host(
    options: dict[str, object], layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, take = [], LibraryLog._take

    def seen(log: LibraryLog, level: int, text: bytes, data: object) -> None:
        logged.append(text)
        take(log, level, text, data)

    monkeypatch.setattr(LibraryLog, "_take", seen)
    with loaded("tiny-experts", tmp_path, **options) as engine:
        placed = {found[1].decode(): found[2].decode() for line in logged if (found := PLACED.match(line))}
        names = {f"blk.{n}.ffn_{part}_exps.weight" for n in range(layers) for part in ("gate", "up", "down")}
        assert placed.keys() == names
        assert all(place.startswith("CPU") for place in placed.values())
        assert engine.notes == ()
        compare(engine, 129, 2)


def test_what_was_parked_with_experts_elsewhere_is_not_found(tmp_path: Path) -> None:
    seen = set()
    for options in ({}, {"n_cpu_moe": 1}, {"n_cpu_moe": 2}, {"cpu_moe": True}):
        with loaded("tiny-experts", tmp_path, **options) as engine:
            seen.add(engine.info.fingerprint)
    assert len(seen) == 4


def test_a_model_without_experts_says_that_they_are_none(tmp_path: Path) -> None:
    with loaded("tiny-dense", tmp_path, cpu_moe=True) as engine:
        assert "no experts" in " ".join(engine.notes)


@pytest.mark.parametrize(
    ("options", "name", "is_split"),
    [
        ({"cpu_moe": True}, "tiny-experts", True),
        ({"gpu_layers": LAYERS}, "tiny-experts", True),
        ({"gpu_layers": LAYERS_ALL}, "tiny-experts", False),
        ({"gpu_layers": 0}, "tiny-experts", False),
        ({"gpu_layers": LAYERS}, "tiny-dense", False),
    ],
)
def test_experts_on_both_sides_are_told(
    options: dict[str, object], name: str, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_supports_gpu_offload", lambda: True)
    with loaded(name, tmp_path, **options) as engine:
        assert engine.model.splits_experts == is_split
        assert any("sums round" in note for note in engine.notes) == is_split


@pytest.mark.parametrize("is_card", [True, False])
def test_without_flash_attention_on_a_card_graphs_are_off(
    is_card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off by the user, or by the library, which warns of it."""
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_supports_gpu_offload", lambda: is_card)
    monkeypatch.setenv(GRAPHS_VARIABLE, "")
    prepare, fingerprints = LibraryLog.__init__, []

    def warned(log: LibraryLog) -> None:
        prepare(log)
        log._take(WARN_LEVEL, b"resolve_fused_ops: Flash Attention not supported, set to disabled\n", None)

    for flash_attn, has_warned in (("on", False), ("off", False), ("auto", False), ("auto", True)):
        monkeypatch.delenv(GRAPHS_VARIABLE, raising=False)
        monkeypatch.setattr(LibraryLog, "__init__", warned if has_warned else prepare)
        with loaded("tiny-dense", tmp_path, flash_attn=flash_attn) as engine:
            is_off = is_card and (flash_attn == "off" or has_warned)
            assert (os.environ.get(GRAPHS_VARIABLE) == "1") == is_off
            assert any("CUDA graphs" in note for note in engine.notes) == is_off
            fingerprints.append(engine.info.fingerprint)
    assert len(set(fingerprints)) == 3 + is_card
