"""What the entries and tensors of a GGUF file mean for a model that the library knows.

The names are those of llama.cpp's converter (`gguf-py`, tensor mapping). A file whose meaning is not known for certain
is refused: a model that runs but reads its rope or its text slightly wrong is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModel
from engine.gguf import GgufFile
from engine.load_errors import ModelLoadError

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
"""Tokens that end an answer whatever `eos_token_id` says: many files name only one of two."""

ROPE_FACTORS = "rope_freqs.weight"
ROPE_TOLERANCE = 1e-3

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_config(file: GgufFile) -> dict[str, Any]:
    """The content of the library's `config.json`. Raises UnsupportedModel or ModelLoadError; reads no weights."""
    kind = str(file.metadata.get("general.architecture", ""))
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} holds a model of the kind {kind!r}; GGUF files of {', '.join(ARCHITECTURES)} can be loaded."
        )
    entry = _Entries(file, kind)
    if entry.get("expert_count", 0):
        raise UnsupportedModel(f"{file.path} holds a mixture of experts, which cannot be loaded from GGUF.")
    heads = int(entry["attention.head_count"])
    hidden = int(entry["embedding_length"])
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": int(entry["feed_forward_length"]),
        "num_hidden_layers": int(entry["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(entry.get("attention.head_count_kv", heads)),
        "head_dim": int(entry.get("attention.key_length", entry.get("rope.dimension_count", hidden // heads))),
        "rms_norm_eps": float(entry["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": int(entry["context_length"]),
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(file),
        "rope_parameters": _rope(file, entry),
    }
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids that end an answer, ascending."""
    ids = {
        int(file.metadata[f"tokenizer.ggml.{name}_token_id"])
        for name in ("eos", "eot")
        if f"tokenizer.ggml.{name}_token_id" in file.metadata
    }
    wanted = set(END_TOKENS)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    return sorted(ids | {number for number, token in enumerate(tokens) if token in wanted})


def tensor_names(file: GgufFile) -> dict[str, str]:
    """GGUF name -> library name, for every tensor. Raises ModelLoadError for one that has no place."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue  # Folded into `rope_parameters`.
        base, _, role = name.rpartition(".")
        parts = base.split(".")
        if base in _WHOLE:
            names[name] = f"{_WHOLE[base]}.{role}"
        elif len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
            names[name] = f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{role}"
        else:
            raise ModelLoadError(f"{file.path} holds a tensor of unknown use, {name}: the model is of another kind.")
    return names


def model_tensor(file: GgufFile, name: str, config: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """The tensor as the library wants it: float32, rotary halves apart."""
    values = file.dequantized(name)
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in ("attn_q", "attn_k"):
        return values
    # llama.cpp interleaves the two rotary halves of llama models' queries and keys; the library keeps them apart.
    heads = config["num_attention_heads"] if part == "attn_q" else config["num_key_value_heads"]
    split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


class _Entries:
    """The entries of one architecture, by their names without its prefix."""

    def __init__(self, file: GgufFile, kind: str) -> None:
        self._file = file
        self._kind = kind

    def get(self, name: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._kind}.{name}", default)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None or isinstance(value, list):
            raise ModelLoadError(f"{self._file.path} has no usable entry {self._kind}.{name}.")
        return value


def _rope(file: GgufFile, entry: _Entries) -> dict[str, Any]:
    theta = float(entry.get("rope.freq_base", 10000.0))
    scaling = str(entry.get("rope.scaling.type", "none"))
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, int(entry.get("rope.dimension_count", 0)))
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(entry["rope.scaling.factor"])
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling == "yarn":
        original = int(entry["rope.scaling.original_context_length"])
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModel(f"{file.path} scales its rope in an unknown way ({scaling}).")


def _llama3_rope(file: GgufFile, theta: float, dimensions: int) -> dict[str, Any]:
    """Finds the llama3 scaling whose divisors the file holds; the file does not name its parameters.

    All published models of this kind use the factors 1 and 4 over 8192 tokens; whatever does not reproduce the file's
    divisors is refused.
    """
    divisors = file.dequantized(ROPE_FACTORS).reshape(-1).astype(np.float64)
    low, high, original = 1.0, 4.0, 8192
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (2 * np.arange(len(divisors)) / max(dimensions, 1))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if 2 * len(divisors) != dimensions or not np.allclose(expected, divisors, rtol=ROPE_TOLERANCE):
        raise UnsupportedModel(f"{file.path} scales its rope by divisors of an unknown origin.")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
