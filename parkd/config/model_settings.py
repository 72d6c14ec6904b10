"""The settings for KV formats, draft tokens and control vectors: text to values, and checks that they agree.

Parsers raise ValueError, whose message says what is expected; functions of all values raise ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parkd.config.llama_settings import scaled_files
from parkd.errors import ConfigError
from parkd.state import VectorFile
from parkd.state.engine_config import MAX_DRAFT_TOKENS, MOST_SEATS

KV_ALIASES = {"auto": None, "bf16": "bf16", "f16": "f16", "f32": "f32", "int8": "int8", "q8_0": "int8"}
"""Names that a user may give -> KV format: the engine's own names, and llama.cpp's name for int8."""

WEIGHTS = {"auto": None, "int4": "int4", "int8": "int8", "fp8": "fp8"}
"""Names that a user may give -> kind of weights, by the engine's own names."""


def kv_format(text: str) -> str | None:
    if text.lower() not in KV_ALIASES:
        raise ValueError(f"expected one of {', '.join(KV_ALIASES)}")
    return KV_ALIASES[text.lower()]


def weights_kind(text: str) -> str | None:
    if text.lower() not in WEIGHTS:
        raise ValueError(f"expected one of {', '.join(WEIGHTS)}")
    return WEIGHTS[text.lower()]


def vectors(text: str) -> tuple[VectorFile, ...]:
    """Parses one or several `[NAME=]FILE`, separated by commas."""
    return tuple(_vector(item.strip(), 1.0) for item in text.split(","))


def scaled_vectors(text: str) -> tuple[VectorFile, ...]:
    """Parses one or several `[NAME=]FILE:SCALE`, separated by commas."""
    return tuple(_vector(file, scale) for file, scale in scaled_files(text, "[NAME=]FILE:SCALE, e.g. calm.gguf:0.8"))


def _vector(text: str, scale: float) -> VectorFile:
    named = re.fullmatch(r"([\w.-]+)=(.+)", text)
    name, file = (named[1], named[2]) if named else (Path(text).stem, text)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"expected [NAME=]FILE; there is no file {file!r}")
    return VectorFile(name, path, scale)


def layer_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})[ ,]+(\d{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("expected the first and the last layer to steer, from 1 up, e.g. 10 20")
    return int(match[1]), int(match[2])


def guesses(text: str) -> int | None:
    if text.lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,4}", text) or int(text) > MAX_DRAFT_TOKENS:
        raise ValueError(f"expected auto, or a whole number from 0 to {MAX_DRAFT_TOKENS}")
    return int(text)


def parallel(text: str) -> int | None:
    """Conversations that are live at once; None for `auto`: as many as fit."""
    if text.lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,4}", text) or not 1 <= int(text) <= MOST_SEATS:
        raise ValueError(f"expected auto, or a whole number from 1 to {MOST_SEATS}")
    return int(text)


def cpu_experts(text: str) -> int | None:
    """Layers whose experts stay in main memory; None for `auto`: as few as let the rest fit."""
    if text.lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,4}", text):
        raise ValueError("expected auto, or a whole number of layers from 0 up")
    return int(text)


def draft_tokens(values: Mapping[str, Any]) -> int | None:
    """The value of `--draft-tokens` or its alias `--draft-max`. Raises ConfigError if both are given and differ."""
    own: int | None = values["draft-tokens"]
    alias: int | None = values["draft-max"]
    if own is not None and alias is not None and own != alias:
        raise ConfigError(f"--draft-tokens is {own} and --draft-max is {alias}: give only one")
    return alias if own is None else own


def one_kv_format(values: Mapping[str, Any]) -> str | None:
    """The KV format from `--kv-cache-dtype`, or from `--cache-type-k` and `--cache-type-v`, which must be equal and are
    given together. Raises ConfigError if the settings contradict each other."""
    names = ("cache-type-k", "cache-type-v")
    for name in names:
        if values[name] not in (None, *KV_ALIASES):
            raise ConfigError(f"--{name} {values[name]} is supported by llama.cpp only: add --engine llama.cpp")
    keys, vals = (KV_ALIASES[values[name] or "auto"] for name in names)
    if keys != vals:
        raise ConfigError(
            f"--cache-type-k is {keys or 'auto'} and --cache-type-v is {vals or 'auto'}: both are stored in one type, "
            f"so give them the same, or use --kv-cache-dtype (--engine llama.cpp can store two)"
        )
    whole: str | None = values["kv-cache-dtype"]
    if whole is not None and keys is not None and whole != keys:
        raise ConfigError(f"--kv-cache-dtype is {whole} and --cache-type-k is {keys}: give only one")
    return whole or keys


def control_vectors(values: Mapping[str, Any]) -> tuple[VectorFile, ...]:
    found: tuple[VectorFile, ...] = (*values["control-vector"], *values["control-vector-scaled"])
    names = [vector.name for vector in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two control vectors are called {name}: rename one, e.g. other={name}.gguf")
    return found
