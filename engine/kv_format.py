"""How keys and values are kept in rows: as the numbers they are, or as 8-bit codes with a scale a token and head.

    key, value   int8    [heads, dim]     code = round(number / scale), -127 .. 127
    scale        float16 [2, heads]       of the keys, then of the values: largest magnitude / 127

The codes of a row depend on that row alone and are read back by whoever attends, the chunk that wrote them included. So
how a prompt was cut in chunks changes a code only where it changes the number itself, by a rounding, near an edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

KV_FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "int8": torch.int8}
)
"""What people call a format -> the type of its numbers in a row."""

SCALE_DTYPE = torch.float16
LARGEST_CODE = 127
QUANTISED_NAME = "int8 codes, float16 scale a token and head"
"""Part of the fingerprint: to be changed with the rule, since rows made by another are not to be read as these."""


def is_quantised(kv_dtype: torch.dtype) -> bool:
    return kv_dtype == torch.int8


def format_name(kv_dtype: torch.dtype) -> str:
    """What tells formats apart whose rows must never be mixed."""
    return QUANTISED_NAME if is_quantised(kv_dtype) else str(kv_dtype)


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, heads, dim]` of any float type to int8 codes of that shape and float16 scales `[tokens, heads]`.

    The scale is rounded before it is divided by, so a number comes back within half a scale of itself (a little more at
    the largest). Numbers that are not finite come back as NaN, for the sampler to refuse.
    """
    numbers = states.float()
    limit = torch.finfo(SCALE_DTYPE).max
    scales = (numbers.abs().amax(dim=-1) / LARGEST_CODE).clamp(max=limit).to(SCALE_DTYPE)
    # Scale 0: nothing in this head is as large as half the smallest float16, so every code is 0.
    divisors = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
    codes = (numbers / divisors).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return codes, scales


class QuantisedStates:
    """The keys or the values of one layer as rows hold them. Models hand it from the cache to attention as they would
    hand the tensor, `[1, heads, kv, dim]`; the numbers are made a head at a time, where they are needed."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """`codes` is int8 `[kv, heads, dim]`, `scales` float16 `[kv, heads]`: views of rows."""
        self._codes = codes
        self._scales = scales

    @property
    def shape(self) -> torch.Size:
        tokens, heads, dim = self._codes.shape
        return torch.Size((1, heads, tokens, dim))

    def tokens(self, places: torch.Tensor) -> QuantisedStates:
        """Those at `places`, int64 `[n]`, alone."""
        return QuantisedStates(self._codes.index_select(0, places), self._scales.index_select(0, places))

    def head(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of one head, `[1, 1, kv, dim]`."""
        numbers = self._codes[:, index] * self._scales[:, index].float().unsqueeze(-1)
        return numbers.to(dtype)[None, None]

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Those of all heads, `[1, heads, kv, dim]`."""
        numbers = self._codes * self._scales.float().unsqueeze(-1)
        return numbers.to(dtype).transpose(0, 1).unsqueeze(0)


KeptStates = torch.Tensor | QuantisedStates
"""What a cache layer hands to attention."""


def tokens_of(states: KeptStates, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The keys or values at `places`, int64 `[q, n]`: `[q, heads, n, dim]`."""
    if isinstance(states, QuantisedStates):
        rows = states.tokens(places.flatten()).numbers(dtype)[0].transpose(0, 1)
    else:
        rows = states[0].transpose(0, 1).index_select(0, places.flatten()).to(dtype)
    return rows.view(*places.shape, *rows.shape[1:]).transpose(1, 2)
