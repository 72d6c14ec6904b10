"""Reads the RoPE scaling of a GGUF file, which the library's reader ignores.

Without it a model runs but misreads long prompts. So scaling that cannot be identified for certain is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parkd.errors import ModelError, UnsupportedModel
from parkd.model_files.gguf_metadata import GgufMetadata

ROPE_FACTORS = "rope_freqs.weight"
ROPE_TOLERANCE = 1e-3


def add_scaling(file: GgufMetadata, config: Any) -> None:
    """Completes `config.rope_parameters`. Raises UnsupportedModel or ModelError."""
    rope = config.rope_parameters
    # Models with sliding windows have one RoPE per layer kind; only that of full attention is scaled.
    target = rope.get("full_attention", rope)
    if ROPE_FACTORS in file.tensors:
        target.update(_llama3(file, float(target["rope_theta"]), int(file.of_kind("rope.dimension_count", 0))))
        return
    kind = str(file.of_kind("rope.scaling.type", "none"))
    if kind == "none":
        return
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} has an unknown RoPE scaling ({kind}); load its safetensors instead.")
    target.update({"rope_type": kind, "factor": float(_needed(file, "rope.scaling.factor"))})
    if kind == "yarn":
        target["original_max_position_embeddings"] = int(_needed(file, "rope.scaling.original_context_length"))


def _needed(file: GgufMetadata, name: str) -> Any:
    value = file.of_kind(name)
    if value is None:
        raise ModelError(f"{file.path} has no entry {file.kind}.{name}.")
    return value


def _llama3(file: GgufMetadata, theta: float, dimensions: int) -> dict[str, Any]:
    """Finds the llama3 scaling that gives the file's divisors; the file does not name its parameters.

    All published models of this kind use the factors 1 and 4 over 8192 tokens. Raises UnsupportedModel if these do not
    reproduce the divisors.
    """
    divisors = file.tensor(ROPE_FACTORS).reshape(-1).astype(np.float64)
    low, high, original = 1.0, 4.0, 8192
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (2 * np.arange(len(divisors)) / max(dimensions, 1))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if 2 * len(divisors) != dimensions or not np.allclose(expected, divisors, rtol=ROPE_TOLERANCE):
        raise UnsupportedModel(f"{file.path} has unknown RoPE divisors; load its safetensors instead.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
