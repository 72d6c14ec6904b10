"""Formats of keys and values in rows: floating point, or 8-bit codes with one scale per token and head.

    key, value   int8    [heads, dim]     code = round(number / scale), -127 .. 127
    scale        float16 [2, heads]       of the keys, then of the values: largest magnitude / 127

The codes of a row depend on that row alone, and attention always reads the codes, also in the chunk that wrote them. So
the chunking of a prompt changes a code only if it changes the number itself, by a rounding error near a code boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

KV_FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "int8": torch.int8}
)
"""Name of a format -> dtype of its numbers in a row."""


def kv_dtype_of(kv_format: str | None, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers in a row; None: the one they are computed in."""
    return compute_dtype if kv_format is None else KV_FORMATS[kv_format]


SCALE_DTYPE = torch.float16
LARGEST_CODE = 127
QUANTISED_NAME = "int8 codes, float16 scale a token and head"
"""Part of the fingerprint. Change it with the rule, so that rows of different rules are never mixed."""


def is_quantised(kv_dtype: torch.dtype) -> bool:
    return kv_dtype == torch.int8


def format_name(kv_dtype: torch.dtype) -> str:
    """A name that differs between formats whose rows must not be mixed."""
    return QUANTISED_NAME if is_quantised(kv_dtype) else str(kv_dtype)


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `[tokens, heads, dim]` of any float dtype to int8 codes of that shape and float16 scales
    `[tokens, heads]`.

    The scale is rounded before the division, so numbers are off by at most half a scale (the largest by a little more).
    Non-finite numbers read back as NaN, which the sampler refuses.
    """
    numbers = states.float()
    limit = torch.finfo(SCALE_DTYPE).max
    scales = (numbers.abs().amax(dim=-1) / LARGEST_CODE).clamp(max=limit).to(SCALE_DTYPE)
    # Scale 0: nothing in this head is as large as half the smallest float16, so every code is 0.
    divisors = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
    codes = (numbers / divisors).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return codes, scales


class QuantisedStates:
    """The quantised keys or values of one layer. Models pass it from the cache to attention in place of a tensor
    `[1, heads, kv, dim]`. Attention dequantises one head at a time."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """`codes` is int8 `[kv, heads, dim]`, `scales` float16 `[kv, heads]`: views of rows."""
        self._codes = codes
        self._scales = scales

    @property
    def shape(self) -> torch.Size:
        tokens, heads, dim = self._codes.shape
        return torch.Size((1, heads, tokens, dim))

    def tokens(self, places: torch.Tensor) -> QuantisedStates:
        """Only the tokens at `places`, int64 `[n]`."""
        return QuantisedStates(self._codes.index_select(0, places), self._scales.index_select(0, places))

    def head(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One head, dequantised: `[1, 1, kv, dim]`."""
        numbers = self._codes[:, index] * self._scales[:, index].float().unsqueeze(-1)
        return numbers.to(dtype)[None, None]

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """All heads, dequantised: `[1, heads, kv, dim]`."""
        numbers = self._codes * self._scales.float().unsqueeze(-1)
        return numbers.to(dtype).transpose(0, 1).unsqueeze(0)


KeptStates = torch.Tensor | QuantisedStates
"""What a cache layer returns to attention."""


def tokens_of(states: KeptStates, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The keys or values at `places`, int64 `[q, n]`, as `[q, heads, n, dim]`."""
    if isinstance(states, QuantisedStates):
        rows = states.tokens(places.flatten()).numbers(dtype)[0].transpose(0, 1)
    else:
        rows = states[0].transpose(0, 1).index_select(0, places.flatten()).to(dtype)
    return rows.view(*places.shape, *rows.shape[1:]).transpose(1, 2)
