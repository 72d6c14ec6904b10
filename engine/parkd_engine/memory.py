"""Computes the longest context that fits the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from parkd_engine.errors import ModelLoadError

MARGIN_SHARE = 0.1
"""Share of free memory that is not used: for a chunk's activations, the tokenizer's cache, allocator overhead."""
MARGIN_MIN_BYTES = 256 << 20
CONTEXT_STEP = 256
"""A context below the model's limit that is chosen here is a multiple of this."""
MIN_CONTEXT = 512
"""The shortest context, in tokens, that is chosen automatically: a shorter one would be useless."""


@dataclass(frozen=True, slots=True)
class StageNeed:
    """The memory that one stage needs on its device."""

    device: str
    row_bytes: int
    fixed_bytes: int


def free_bytes(device: str) -> int:
    """Free bytes on `device`. Ignores limits on this process alone."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)


def usable_bytes(free: int) -> int:
    """The part of `free` bytes that may be used: all but the margin."""
    return free - max(MARGIN_MIN_BYTES, int(free * MARGIN_SHARE))


def choose_context(
    stages: Sequence[StageNeed],
    model_tokens: int,
    asked_tokens: int | None,
    *,
    reserved_bytes: int = 0,
    free: Callable[[str], int] = free_bytes,
) -> int:
    """Context length in tokens: `asked_tokens`, or the most that fits, up to the model's own limit.

    Call it when the weights are loaded. `reserved_bytes` of main memory are set aside for parked state. Raises
    ModelLoadError, with numbers, if the context does not fit or is longer than the model's limit.
    """
    if asked_tokens is not None and asked_tokens > model_tokens:
        raise ModelLoadError(
            f"A context of {asked_tokens} tokens was requested, but the model supports at most {model_tokens}. "
            f"Ask for {model_tokens} or fewer."
        )
    fitting = {
        device: _fitting(needs, free(device), reserved_bytes if device == "cpu" else 0)
        for device, needs in _by_device(stages).items()
    }
    device, tokens = min(fitting.items(), key=lambda entry: entry[1])
    if asked_tokens is not None:
        if asked_tokens > tokens:
            raise ModelLoadError(_shortage(stages, device, asked_tokens, tokens))
        return asked_tokens
    if tokens >= model_tokens:
        return model_tokens
    chosen = tokens // CONTEXT_STEP * CONTEXT_STEP
    if chosen < min(MIN_CONTEXT, model_tokens):
        raise ModelLoadError(_shortage(stages, device, MIN_CONTEXT, max(tokens, 0)))
    return chosen


def _by_device(stages: Sequence[StageNeed]) -> Mapping[str, list[StageNeed]]:
    grouped: dict[str, list[StageNeed]] = {}
    for stage in stages:
        place = torch.device(stage.device)
        grouped.setdefault("cpu" if place.type == "cpu" else str(place), []).append(stage)
    return grouped


def _fitting(needs: Sequence[StageNeed], free: int, reserved: int) -> int:
    room = usable_bytes(free) - reserved - sum(need.fixed_bytes for need in needs)
    row_bytes = sum(need.row_bytes for need in needs)
    return room // row_bytes


def _shortage(stages: Sequence[StageNeed], device: str, asked: int, fitting: int) -> str:
    row_bytes = sum(need.row_bytes for need in _by_device(stages)[device])
    return (
        f"A context of {asked} tokens needs {asked * row_bytes / 2**20:,.0f} MiB on {device}; "
        f"{max(fitting, 0)} tokens ({max(fitting, 0) * row_bytes / 2**20:,.0f} MiB) fit there besides the weights and "
        f"a margin. Choose a smaller --ctx-size, a smaller --conversation-cache-mib, or a smaller model."
    )
