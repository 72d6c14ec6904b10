"""The engine's fingerprint: it must be equal before two runs may share state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch

from parkd_engine.arenas.kv_format import format_name

FINGERPRINT_BYTES = 16

_SHAPELESS = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Settings that change no value of a token's state. Every setting not listed is assumed to change it."""


def fingerprint(weights_digest: bytes, config: Mapping[str, Any], dtype: torch.dtype, kv_dtype: torch.dtype) -> bytes:
    """16 bytes over the weights' digest, configuration (transformers' `config.to_dict()`), compute and KV dtypes.

    Leaves out context size and devices, which do not change a token's state, and the chat template, whose effect shows
    in the token ids.
    """
    canonical = json.dumps(_shaping(config), sort_keys=True, separators=(",", ":"), default=str)
    hasher = blake2b(digest_size=FINGERPRINT_BYTES, person=b"parkd-engine")
    for part in (weights_digest, canonical.encode(), str(dtype).encode(), format_name(kv_dtype).encode()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _shaping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _shaping(inner) for name, inner in value.items() if name not in _SHAPELESS}
    if isinstance(value, (list, tuple)):
        return [_shaping(inner) for inner in value]
    return value
