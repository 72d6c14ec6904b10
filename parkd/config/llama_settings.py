"""The settings of the llama.cpp engine, under llama-server's names: text to values.

Parsers raise ValueError, whose message says what is expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("auto", "torch", "llama.cpp", "llama-server", "remote")
CACHE_TYPES = ("auto", "f32", "f16", "bf16", "int8", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""llama-server's names, and `int8`, the torch engine's name for q8_0."""
FLAGS = (
    *("gpu-layers", "split-mode", "tensor-split", "main-gpu", "cpu-moe", "n-cpu-moe", "llama-lib", "flash-attn"),
    *("lora", "lora-scaled"),
    *("embeddings", "pooling", "reranking"),
)
"""Settings that only this engine has."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter. It applies wherever a request does not choose others."""

    path: Path
    scale: float = 1.0


def engine_name(text: str) -> str:
    return _one_of(ENGINES, text)


def cache_type(text: str) -> str | None:
    name = _one_of(CACHE_TYPES, text)
    return None if name == "auto" else name


def split_mode(text: str) -> str:
    return _one_of(("none", "layer", "row"), text)


def flash_attn(text: str) -> str:
    return _one_of(("on", "off", "auto"), text)


def pooling(text: str) -> str:
    return _one_of(("mean", "cls", "last", "rank"), text)


def shares(text: str) -> tuple[float, ...]:
    items = text.split(",")
    if not all(re.fullmatch(r"\d+\.?\d*", item.strip()) for item in items):
        raise ValueError("expected a share for each card, e.g. 3,1")
    return tuple(float(item) for item in items)


def library(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        raise ValueError(f"expected a file or a folder; there is none at {text!r}")
    return path.absolute()


def loras(text: str) -> tuple[LoraAdapter, ...]:
    return tuple(_lora(item.strip(), 1.0) for item in text.split(","))


def scaled_loras(text: str) -> tuple[LoraAdapter, ...]:
    return tuple(_lora(file, scale) for file, scale in scaled_files(text, "FILE:SCALE, e.g. style.gguf:0.5"))


def scaled_files(text: str, expected: str) -> list[tuple[str, float]]:
    """Splits one or several `FILE:SCALE`, separated by commas. `expected` is one of them, for the error."""
    found = []
    for item in text.split(","):
        file, _, scale = item.strip().rpartition(":")
        if not file or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", scale):
            raise ValueError(f"expected {expected}, or several with a comma between them")
        found.append((file, float(scale)))
    return found


def _lora(text: str, scale: float) -> LoraAdapter:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(f"expected a file; there is none at {text!r}")
    return LoraAdapter(path, scale)


def _one_of(known: tuple[str, ...], text: str) -> str:
    if text.lower() not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return text.lower()
