"""Attention of a prompt's chunk through FlashAttention 3 of `flashinfer-python`, on the cards where it is faster.

    keys, values   views of arena rows, strided by whole rows: the kernel takes them as they are
    queries        the last of the keys

It needs a Hopper card, bf16 or f16, head sizes of 64, 128 or 256, and nvcc: each head size is compiled at its first use
on a machine, which takes about a minute, and kept in the package's own cache. What this module refuses, torch's flash
kernel computes: slower, and right.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger("parkd.engine")

PACKAGE, MODULE = "flashinfer-python", "flashinfer"
CAPABILITY = (9, 0)
"""The only one: later cards have other instructions."""
HEAD_SIZES = frozenset({64, 128, 256})
HALVES = frozenset({torch.bfloat16, torch.float16})
LEAST_QUERIES = 8192
"""Queries, counted in every head, from which the kernel is faster: with fewer it does not fill the card, whereas
torch's divides the keys (H200, 86,343 keys, 32 heads of 128: 0.92 ms for 16 queries, torch 0.30; 4.0 for 2048, torch
8.3)."""
TRIED_QUERIES, TRIED_KEYS, TRIED_HEADS = 130, 700, (4, 2)
"""Of the chunk on which a kernel is tried before it is used; heads of queries and of keys."""
WRONG = 0.02
"""The relative difference from torch's kernel above which a kernel is not used."""


class PromptAttention:
    """Causal attention for one head size."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """`query` is `[q, heads, dim]`, `key` and `value` `[kv, kv_heads, dim]`, whose last axis is contiguous. Returns
        `[q, heads, dim]`."""
        with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
            out: torch.Tensor = self._run(
                query.contiguous(), key, value, causal=True, kv_layout="NHD", sm_scale=scaling, backend="fa3"
            )
        return out


def kernel_name(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """What reads prompts there in place of torch's kernel, with its version; None if nothing does. Part of the
    fingerprint, since its sums are rounded differently."""
    return None if kernel_for(device, dtype, dim) is None else f"{PACKAGE} {importlib.metadata.version(PACKAGE)} fa3"


def is_worth_it(queries: int, heads: int) -> bool:
    """Whether the kernel is faster than torch's for a chunk of so many queries."""
    return queries * heads >= LEAST_QUERIES


def kernel_for(device: torch.device, dtype: torch.dtype, dim: int) -> PromptAttention | None:
    """The kernel for prompts; None where torch's is to be used. The first call for a head size may compile for a
    minute, and the reason for a None that is no property of the card is logged once."""
    if device.type != "cuda" or dtype not in HALVES or dim not in HEAD_SIZES:
        return None
    return _tried(device, dtype, dim)


@cache
def _tried(device: torch.device, dtype: torch.dtype, dim: int) -> PromptAttention | None:
    if torch.cuda.get_device_capability(device) != CAPABILITY or importlib.util.find_spec(MODULE) is None:
        return None
    try:
        from flashinfer import single_prefill_with_kv_cache

        kernel = PromptAttention(single_prefill_with_kv_cache)
        reason = _fault(kernel, device, dtype, dim)
    except Exception as error:  # Whatever a package of kernels and a compiler may raise.
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if reason is None:
        return kernel
    log.warning("prompts are read by torch's kernel, because that of %s cannot be used: %s", PACKAGE, reason)
    return None


def _fault(kernel: PromptAttention, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why a kernel must not be used: another result than torch's, or another one the second time. None if nothing is
    wrong with it."""
    heads, kv_heads = TRIED_HEADS
    numbers = torch.Generator(device).manual_seed(1)
    rows = torch.randn((TRIED_KEYS, 2, kv_heads, dim), device=device, generator=numbers).to(dtype)
    query = torch.randn((TRIED_QUERIES, heads, dim), device=device, generator=numbers).to(dtype)
    keys, values = rows[:, 0], rows[:, 1]
    first, second = (kernel(query, keys, values, dim**-0.5) for _ in range(2))
    if not torch.equal(first, second):
        return "its results differ from one call to the next"
    usual = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=causal_lower_right(TRIED_QUERIES, TRIED_KEYS),
        scale=dim**-0.5,
        enable_gqa=True,
    )
    expected = usual[0].transpose(0, 1).float()
    error = float((first.float() - expected).norm() / expected.norm())
    return None if error < WRONG else f"its results are off by {error:.1%}"
