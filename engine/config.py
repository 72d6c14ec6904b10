"""How the engine is laid out: what the loader and the stages are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_DRAFT_TOKENS = 16
CPU_BATCH, CARD_BATCH = 512, 2048
"""Tokens of a chunk. On CPUs a longer one is no faster and answers a client that leaves later; a card is not busy with
less (86k tokens of an 8B model on two H200: 4.9 s with 2048, 5.1 s with 4096)."""


def batch_for(devices: Sequence[str]) -> int:
    """Tokens a prefill chunk where nobody said: what suits cards if all stages are on some."""
    return CARD_BATCH if _all_cards(devices) else CPU_BATCH


def _all_cards(devices: Sequence[str]) -> bool:
    return all(torch.device(device).type == "cuda" for device in devices)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen; `None` means that the engine chooses."""

    devices: tuple[str, ...] = ("cpu",)
    """One a stage; the same device may appear twice (`("cpu", "cpu")` is two stages)."""
    layer_split: tuple[int, ...] | None = None
    """First layer of each later stage, ascending; None balances the weights over the devices."""
    context_tokens: int | None = None
    """Rows every arena holds; None takes the model's own limit or what fits, whichever is smaller."""
    batch_tokens: int = 512
    """Tokens a prefill chunk; chunks end at absolute multiples of it."""
    dtype: torch.dtype | None = None
    """What the model computes in; None is fp32 on CPU and the checkpoint's own on CUDA."""
    kv_dtype: torch.dtype | None = None
    """What keys and values are kept in, of `engine.kv_format.KV_FORMATS`; None is the compute dtype."""

    ctx_checkpoints: int = 8
    """Copies of the fixed state that stay on the devices, a position each; for models that have any."""
    draft_tokens: int | None = None
    """Tokens that a draft head guesses a step; None and 0 decode without one."""
    window_slack_tokens: int = 256
    """A sliding window can be cut back by so many tokens without a checkpoint."""

    peer_access: bool = True
    """Cards may copy straight to each other where they can; else hidden states go through main memory."""

    @property
    def guesses(self) -> int:
        """`draft_tokens`, once chosen. Nobody guesses unasked: on processors a step with guesses costs as much as those
        steps apart, and on cards it pays for a head that is right often enough, which nobody knows beforehand."""
        return self.draft_tokens or 0

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("devices: at least one is needed")
        if self.layer_split is not None and len(self.layer_split) != len(self.devices) - 1:
            raise ValueError(
                f"layer_split names {len(self.layer_split)} first layers for {len(self.devices)} devices; "
                f"name {len(self.devices) - 1}, one for each stage after the first"
            )
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens is {self.draft_tokens}; it must be from 0 to {MAX_DRAFT_TOKENS}")
        for name in ("context_tokens", "batch_tokens", "ctx_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
