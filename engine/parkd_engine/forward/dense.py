"""The forward pass of the decoder layer that most dense models share, in fused kernels.

    norm -> q, k, v -> norm, rotary, write rows -> attention -> output, + residual -> norm -> gate, up, down, + residual

Transformers launches several dozen small kernels for each layer from Python; on a GPU that takes longer than the
arithmetic of a short chunk. This code rounds where transformers does, so its results differ only in the order of sums.
Other architectures, and layers with hooks, run through transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from parkd_engine.arenas.cache import StageCache
from parkd_engine.families.layer_shapes import layer_kinds
from parkd_engine.families.layer_state import LAYER_KINDS
from parkd_engine.families.records import family_of
from parkd_engine.forward.attention import CUDA_KERNELS, of_chunk
from parkd_engine.forward.stages import Stage
from parkd_engine.kernels import has_triton

DTYPES = frozenset({torch.bfloat16, torch.float16})
STEADY_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary types whose frequencies do not change with the length of the sequence."""


def no_recording(config: Any, stages: Sequence[Stage]) -> str | None:
    """Returns why decoding cannot be recorded at all, or None if it may be."""
    if config is None or any(stage.device.type != "cuda" for stage in stages):
        return "a stage is not on a CUDA device"
    if not has_triton():
        return "Triton is not installed"
    if any(stage.host_experts for stage in stages):
        return "experts stay in main memory, and which ones a token needs is known only when it runs"
    return next((reason for stage in stages if (reason := unrecorded(config, stage.dtype)) is not None), None)


def unrecorded(config: Any, dtype: torch.dtype) -> str | None:
    """Returns why decoding of such a model, computed in `dtype`, is not recorded on any GPU; None if it may be."""
    if other := {kind for kind in layer_kinds(config) if not LAYER_KINDS[kind].is_recorded}:
        return f"decoding through layers of kind {', '.join(sorted(other))} is not recorded"
    if family_of(config).by_parts:
        return "its family is known by its parts alone"
    if family_of(config).has_latents:
        return "its layers read the latents of all earlier tokens, whose number varies"
    if dtype not in DTYPES:
        return f"its compute dtype is not among {', '.join(sorted(map(str, DTYPES)))}"
    return None


def refusal(config: Any, dtype: torch.dtype, kept: AbstractSet[torch.dtype]) -> str | None:
    """Returns why such a model, computed in `dtype` with keys and values in the dtypes `kept`, must run through
    transformers; None if it need not."""
    if not family_of(config).is_dense:
        return "the kernels do not support the model's layers"
    if set(layer_kinds(config)) != {"full_attention"} or getattr(config, "sliding_window", None):
        return "not all layers have full attention"
    if getattr(config, "hidden_act", None) != "silu" or getattr(config, "mlp_bias", False):
        return "the kernels do not support its feed-forward layers"
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") not in STEADY_ROTARY or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        return "the kernels do not support its rotary positions"
    if dtype not in DTYPES or kept not in ({torch.int8}, {dtype}):
        return f"its compute dtype, or the dtype of its rows, is not among {', '.join(sorted(map(str, DTYPES)))}"
    return None


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """The modules and rows of one decoder layer."""

    input_norm: torch.Tensor
    qkv: tuple[Any, ...]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Any
    post_norm: torch.Tensor
    gate: Any
    up: Any
    down: Any
    kept: Any
    """The cache's layer."""
    scaling: float

    @property
    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys, values and scales in the rows of all seats, as what is recorded needs them."""
        return self.kept.all_key_rows, self.kept.all_value_rows, getattr(self.kept, "all_scale_rows", None)

    @property
    def key_rows(self) -> torch.Tensor:
        """`[row_tokens - base, kv_heads, head_dim]`, a strided view of arena rows: of the seat's, as the next two."""
        rows: torch.Tensor = self.kept.key_rows
        return rows

    @property
    def value_rows(self) -> torch.Tensor:
        rows: torch.Tensor = self.kept.value_rows
        return rows

    @property
    def scale_rows(self) -> torch.Tensor | None:
        """float16 `[row_tokens - base, 2, kv_heads]` if the rows are int8 codes (`arenas.kv_format`), else None."""
        return getattr(self.kept, "scale_rows", None)


def dense_layers(stage: Stage, cache: StageCache) -> list[DenseLayer]:
    """The stage's layers. The caller has checked that `refusal` returns None."""
    inner: Any = stage.inner
    return [_layer(inner.layers[index], cache.layers[index]) for index in range(stage.first_layer, stage.end_layer)]


def _layer(module: Any, rows: Any) -> DenseLayer:
    attention, mlp = module.self_attn, module.mlp
    return DenseLayer(
        module.input_layernorm.weight,
        (attention.q_proj, attention.k_proj, attention.v_proj),
        getattr(getattr(attention, "q_norm", None), "weight", None),
        getattr(getattr(attention, "k_norm", None), "weight", None),
        attention.o_proj,
        module.post_attention_layernorm.weight,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        rows,
        float(attention.scaling),
    )


class DenseStage:
    """One stage's forward pass of a chunk."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any) -> None:
        self.stage = stage
        self.layers = dense_layers(stage, cache)
        self._eps = float(config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        """Runs `q` tokens at `[position, position + q)` and writes their rows, without waiting.

        `inputs` are those of `Stage.forward` and may be overwritten. Returns `[1, q, hidden]`. The last stage's last
        layer only writes its rows, which are all that a prompt needs of it; its output is omitted.
        """
        with torch.cuda.device(self.stage.device):
            return self._forward(inputs.to(self.stage.device, non_blocking=True), position)

    def _forward(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        from parkd_engine.kernels.pointwise import add_norm, gate

        inner: Any = self.stage.inner
        hidden = inner.embed_tokens(inputs)[0] if self.stage.index == 0 else inputs[0]
        tokens = hidden.shape[0]
        stop = position + tokens
        positions = torch.arange(position, stop, device=hidden.device)
        cos, sin = inner.rotary_emb(hidden[None], position_ids=positions[None])
        turns = (positions, cos[0].contiguous(), sin[0].contiguous())
        bias = causal_lower_right(tokens, stop) if tokens > 1 else None
        normed = torch.empty_like(hidden)
        delta: torch.Tensor | None = None
        is_last_stage = self.stage.head is not None
        with sdpa_kernel(list(CUDA_KERNELS)):
            for index, layer in enumerate(self.layers):
                add_norm(hidden, delta, layer.input_norm, normed, self._eps)
                query = self._write_rows(layer, normed, turns)
                if is_last_stage and index == len(self.layers) - 1:
                    return hidden[None]
                heads = query.view(1, tokens, -1, layer.key_rows.shape[2]).transpose(1, 2)
                keys, values = _kept_numbers(layer, stop, hidden.dtype)
                attended = of_chunk(heads, keys, values, layer.scaling)
                if attended is None:
                    grouped = heads.shape[1] != keys.shape[1]
                    attended = scaled_dot_product_attention(
                        heads, keys, values, attn_mask=bias, scale=layer.scaling, enable_gqa=grouped
                    )[0].transpose(0, 1)
                attended = attended.reshape(tokens, -1)
                add_norm(hidden, layer.output(attended), layer.post_norm, normed, self._eps)
                gates = layer.gate(normed)
                gate(gates, layer.up(normed))
                delta = layer.down(gates)
        return (hidden + delta if delta is not None else hidden)[None]

    def _write_rows(
        self, layer: DenseLayer, normed: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        from parkd_engine.kernels.rows import write_rows

        positions, cos, sin = turns
        q, k, v = (module(normed) for module in layer.qkv)
        query = torch.empty_like(q)
        write_rows(
            q,
            k,
            v,
            cos,
            sin,
            positions,
            query,
            layer.key_rows,
            layer.value_rows,
            layer.scale_rows,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self._eps,
        )
        return query


def _kept_numbers(layer: DenseLayer, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the rows `[0, stop)`, each `[1, kv_heads, stop, head_dim]`; views unless the rows are int8
    codes."""
    keys, values = layer.key_rows[:stop], layer.value_rows[:stop]
    if layer.scale_rows is not None:
        from parkd_engine.kernels.rows import numbers

        keys = numbers(keys, layer.scale_rows[:stop, 0], dtype)
        values = numbers(values, layer.scale_rows[:stop, 1], dtype)
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
