"""The size of a conversation's state in llama.cpp, computed from the header of the GGUF file.

    block of n tokens          n * row_bytes + head_bytes
    checkpoint                 fixed_bytes: full windows and recurrent states

Sizes are those that the library writes (llama.cpp: `llama_kv_cache::state_write`,
`llama_memory_recurrent::state_write`, `llama_hparams::n_embd_r`, `n_embd_s`): rows in the types of keys and values,
recurrent states in float32, and a few bytes per cell. A model whose header is not sufficient is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf

from parkd.errors import ModelError
from parkd.model_files.gguf_metadata import GgufMetadata, read_metadata

CELL_BYTES = 12
"""A token's position, the number of its sequences (one), and the sequence id."""
STATE_HEAD_BYTES = 24
"""In front of the rows of a block: names, counts, how values lie."""
LAYER_HEAD_BYTES = 24
"""In front of the keys and of the values of each layer: type and size."""
MROPE_CELL_BYTES = 12
"""Added to CELL_BYTES if a position has several coordinates."""
MROPE_KINDS = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "glm4v")
STATE_ELEMENT_BYTES = 4
FULL_EVERY: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
)
"""Architectures in which every n-th layer has full attention: llama.cpp's n, where the file does not contain it."""
UNKNOWN = ("attention.kv_lora_rank", "wkv.head_size", "kda.head_dim")
"""Metadata keys of models whose state is of another kind."""


@dataclass(frozen=True, slots=True)
class LlamaStateSize:
    """The size of one conversation's state."""

    name: str
    architecture: str
    context_tokens: int
    layers: int
    row_bytes: int
    """Bytes per token, in layers with full attention."""
    head_bytes: int
    """Bytes of each block beside its rows."""
    fixed_bytes: int
    """Bytes that do not grow with the conversation: full windows, recurrent states."""
    windows_not_counted: bool
    """The file has a window that llama.cpp is not known to use for this architecture; all layers count as full."""


def state_size(path: Path, type_k: str, type_v: str) -> LlamaStateSize:
    """`path` is the file, or the first of several. Raises ModelError."""
    file = read_metadata(path)
    unknown = [entry for entry in UNKNOWN if file.of_kind(entry)]
    if unknown:
        raise ModelError(
            f"The bytes per token of {path.name} cannot be computed without loading it ({file.kind}.{unknown[0]}): "
            f"start parkd, whose start-up lines show them."
        )
    layers, recurrent = _needed(file, "block_count"), _recurrent_layers(file)
    window = int(file.of_kind("attention.sliding_window", 0))
    sliding = _sliding_layers(file, layers) if window else frozenset()
    # Falcon-H1's layers have both kinds of state.
    attending = [layer for layer in range(layers) if layer not in recurrent or file.kind == "falcon-h1"]
    whole = [layer for layer in attending if layer not in sliding]
    cell = CELL_BYTES + (MROPE_CELL_BYTES if file.kind in MROPE_KINDS else 0)
    rows = sum(_row_bytes(file, layer, type_k, type_v) for layer in whole) + (cell if whole else 0)
    a_window_token = sum(_row_bytes(file, layer, type_k, type_v) for layer in sliding) + (cell if sliding else 0)
    return LlamaStateSize(
        name=str(file.entries.get("general.name") or path.stem),
        architecture=file.kind,
        context_tokens=_needed(file, "context_length"),
        layers=layers,
        row_bytes=rows,
        head_bytes=STATE_HEAD_BYTES + LAYER_HEAD_BYTES * len(whole),
        fixed_bytes=window * a_window_token + (len(recurrent) * _recurrent_bytes(file) if recurrent else 0),
        windows_not_counted=bool(window and not sliding),
    )


def _needed(file: GgufMetadata, entry: str) -> int:
    value = file.of_kind(entry)
    if value is None:
        raise ModelError(f"{file.path} has no entry {file.kind}.{entry}, so the bytes per token cannot be computed.")
    return int(value)


def _of_layer(value: Any, layer: int) -> int:
    """The value for one layer; `value` is one number for all layers, or a list with one per layer."""
    return int(value[layer] if isinstance(value, list) else value)


def _row_bytes(file: GgufMetadata, layer: int, type_k: str, type_v: str) -> int:
    heads = _of_layer(file.of_kind("attention.head_count"), layer)
    kv_heads = _of_layer(file.of_kind("attention.head_count_kv", heads), layer)
    if not kv_heads:
        return 0
    size = _needed(file, "embedding_length") // max(heads, 1)
    key, value = (int(file.of_kind(f"attention.{name}_length", size)) for name in ("key", "value"))
    return _bytes_of(kv_heads * key, type_k) + _bytes_of(kv_heads * value, type_v)


def _bytes_of(elements: int, type_name: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name.upper()]]
    return int(elements * size // block)


def _sliding_layers(file: GgufMetadata, layers: int) -> frozenset[int]:
    pattern = file.of_kind("attention.sliding_window_pattern", FULL_EVERY.get(file.kind))
    if isinstance(pattern, list):
        return frozenset(layer for layer in range(layers) if pattern[layer])
    if not pattern:
        return frozenset()
    return frozenset(layer for layer in range(layers) if (layer + 1) % int(pattern))


def _recurrent_layers(file: GgufMetadata) -> frozenset[int]:
    layers = range(_needed(file, "block_count"))
    if not (file.of_kind("ssm.state_size") or file.of_kind("shortconv.l_cache")):
        return frozenset()
    kv_heads = file.of_kind("attention.head_count_kv", 0)
    if isinstance(kv_heads, list):
        return frozenset(layer for layer in layers if not kv_heads[layer])
    every = int(file.of_kind("full_attention_interval", FULL_EVERY.get(file.kind, 0)))
    return frozenset(layer for layer in layers if not every or (layer + 1) % every)


def _recurrent_bytes(file: GgufMetadata) -> int:
    """Bytes of one layer: the inputs kept for its convolution, and its recurrent state."""
    if reach := file.of_kind("shortconv.l_cache"):
        return (int(reach) - 1) * _needed(file, "embedding_length") * STATE_ELEMENT_BYTES
    inner, state = _needed(file, "ssm.inner_size"), _needed(file, "ssm.state_size")
    channels = inner + 2 * int(file.of_kind("ssm.group_count", 0)) * state
    tail = max(0, _needed(file, "ssm.conv_kernel") - 1)
    return (tail * channels + state * inner) * STATE_ELEMENT_BYTES
