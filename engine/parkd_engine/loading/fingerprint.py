"""The engine's fingerprint: it must be equal before two runs may share state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from parkd_engine.arenas.kv_format import format_name
from parkd_engine.families.layer_shapes import kv_shape, layer_kinds
from parkd_engine.families.records import family_of
from parkd_engine.forward.stages import Stage
from parkd_engine.kernels import coded
from parkd_engine.kernels.prompt_attention import kernel_name
from parkd_engine.weights.linear import QuantisedLinear

FINGERPRINT_BYTES = 16
TILES = "int4 in tiles 1"
"""Products over `weights.tiles`, which round vectors to bf16."""
READ_WHOLE = frozenset({"full_attention", "hybrid"})
"""Kinds of layers whose chunks a kernel for prompts may read."""

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


def fingerprint(
    weights_digest: bytes,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    kernels: Sequence[str] = (),
) -> bytes:
    """16 bytes over the weights' digest, configuration (transformers' `config.to_dict()`), compute and KV dtypes, and
    `kernels`, names with versions of those that round otherwise than the usual ones.

    Leaves out context size and devices, which do not change a token's state, and the chat template, whose effect shows
    in the token ids.
    """
    canonical = json.dumps(_shaping(config), sort_keys=True, separators=(",", ":"), default=str)
    hasher = blake2b(digest_size=FINGERPRINT_BYTES, person=b"parkd-engine")
    parts = [weights_digest, canonical.encode(), str(dtype).encode(), format_name(kv_dtype).encode()]
    for part in [*parts, *(name.encode() for name in kernels)]:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def kernels_of(stages: Sequence[Stage], config: Any) -> tuple[str, ...]:
    """Names of the kernels that round otherwise than the usual ones and are in use on the stages' devices, for
    `fingerprint`. `config` is the library's of the text model. May compile those for prompts."""
    names: set[str] = set()
    for stage in stages:
        kinds = enumerate(layer_kinds(config)[stage.first_layer : stage.end_layer], stage.first_layer)
        seeing = [layer for layer, kind in kinds if kind in READ_WHOLE and not family_of(config).has_latents]
        for dim in {kv_shape(config, layer)[1] for layer in seeing}:
            name = kernel_name(stage.device, stage.dtype, dim)
            names |= set() if name is None else {name}
        if any(coded.serves(linear, stage.dtype, stage.device) for linear in _with_codes(stage)):
            names.add(f"{coded.NAME} {coded.VERSION}")
        if any(linear.tile_rows for linear in _with_codes(stage)):
            names.add(TILES)
    return tuple(sorted(names))


def _with_codes(stage: Stage) -> Iterator[QuantisedLinear]:
    for part in [*stage.layers, *([] if stage.head is None else [stage.head])]:
        yield from (module for module in part.modules() if isinstance(module, QuantisedLinear))


def _shaping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _shaping(inner) for name, inner in value.items() if name not in _SHAPELESS}
    if isinstance(value, (list, tuple)):
        return [_shaping(inner) for inner in value]
    return value
