"""Latent attention of a few tokens, without computing keys and values of all earlier tokens.

    a chunk      latents c `[kv, rank]` -> keys W_k c and values W_v c of every head -> attention
    few tokens   query q -> q W_k -> attention over the latents, which all heads share -> W_v (the sum of p c)

Both are the same but for rounding, as q (W_k c) = (q W_k) c and the sum of p (W_v c) is W_v times the sum of p c
(DeepSeek-V2, section 2.1.2). Rows hold what they held: latents and rotary keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parkd_engine.weights.linear import matrix_of

MOST_TOKENS = 16
"""Tokens up to which the projections are absorbed. Each goes over all latents alone, so that it has the same bits
whatever is beside it; a chunk computes keys and values once for all its tokens."""
LAZY = "parkd_absorbs"
"""Attribute that marks a replaced method."""

Expand = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The library's method: (module, latents, rotary keys) -> keys and values of every head."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentStates:
    """What a module of latent attention passes to the attention function in place of keys and of values."""

    module: Any
    """The library's: `kv_b_proj` computes the keys and values of each head from latents."""
    latents: torch.Tensor
    """`[1, 1, kv, rank]`."""
    rotary: torch.Tensor
    """Rotary part of the keys, `[1, 1, kv, rotary]`."""
    expand: Expand

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, heads, kv, dim]` of all tokens."""
        return self.expand(self.module, self.latents, self.rotary)

    def attend(self, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Causal attention of `[1, heads, q, dim]` queries, the last of the tokens; returns `[1, heads, q, value]`.

        Scores and sums are float32, as in the kernels for keys and values.
        """
        module, (_, heads, tokens, width) = self.module, query.shape
        weights = matrix_of(module.kv_b_proj, query.dtype).view(heads, -1, self.latents.shape[3])
        of_keys, of_values = torch.split(weights, [module.qk_nope_head_dim, module.v_head_dim], dim=1)
        plain, turned = torch.split(query[0], [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=2)
        scale = width**-0.5 if scaling is None else scaling
        latents, rotary = self.latents[0, 0].float(), self.rotary[0, 0].float()
        outputs = []
        for token in range(tokens):
            seen = len(latents) - tokens + token + 1
            moved = torch.matmul(plain[:, token, None], of_keys)[:, 0].float()
            scores = torch.addmm(moved @ latents[:seen].T, turned[:, token].float(), rotary[:seen].T)
            mixed = torch.softmax(scores * scale, dim=-1) @ latents[:seen]
            outputs.append(torch.matmul(mixed.to(query.dtype)[:, None], of_values.transpose(1, 2)))
        return torch.cat(outputs, dim=1)[None]


def absorb_projections(layers: Any, attention_name: str) -> None:
    """Makes the latent attention of these layers pass latents to the attention function of that name, and keys and
    values to any other. May be called again."""
    kinds = {type(part) for layer in layers for part in layer.modules() if hasattr(type(part), "expand_kv")}
    for kind in kinds:
        if not hasattr(kind.expand_kv, LAZY):
            kind.expand_kv = _lazily(kind.expand_kv, attention_name)


def _lazily(expand: Expand, attention_name: str) -> Callable[..., Any]:
    @functools.wraps(expand)
    def lazily(module: Any, latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        if module.config._attn_implementation != attention_name:
            return expand(module, latents, rotary)
        states = LatentStates(module, latents, rotary, expand)
        return states, states

    setattr(lazily, LAZY, True)
    return lazily
