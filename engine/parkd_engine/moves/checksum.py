"""Checksums of parts: one stage's rows of one block, or one stage's fixed state.

Two kinds behind one interface, chosen by the arenas' devices:

    xxh3-64          CPU only; reads each piece right after its copy, while it is in the processor's cache
    weighted-sum-64  sum over the little-endian 64-bit words w_i of w_i * (2 i + 1), modulo 2**64; runs on any
                     device at memory speed. The weights are odd, so changing one word always changes the sum; they
                     differ, so swapping two words does too unless their difference is a multiple of a high power of 2.

They detect accidental damage only: neither is cryptographic, so bytes can be forged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from parkd_engine.kernels import has_triton

WORD_BYTES = 8


class RunningChecksum(Protocol):
    """The checksum of one part, which is fed in order."""

    def update(self, piece: torch.Tensor) -> None:
        """Adds the next bytes: uint8 `[n]`, contiguous, `n` a multiple of 8 (as rows are). May return before the work
        is done."""


class Checksum(Protocol):
    """A kind of checksum."""

    name: str

    def start(self) -> RunningChecksum: ...

    def values(self, running: Sequence[Any]) -> npt.NDArray[np.uint64]:
        """`[len(running)]`, for objects returned by `start`; waits for queued work, once for each device."""


class Xxh3:
    """XXH3, 64 bits, seed 0. CPU only."""

    name = "xxh3-64"

    def start(self) -> _RunningXxh3:
        return _RunningXxh3()

    def values(self, running: Sequence[Any]) -> npt.NDArray[np.uint64]:
        return np.array([each.hasher.intdigest() for each in running], dtype=np.uint64)


class _RunningXxh3:
    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_64()

    def update(self, piece: torch.Tensor) -> None:
        self.hasher.update(piece.numpy().data)


class WeightedSum:
    """The weighted sum, computed on the device that holds the bytes."""

    name = "weighted-sum-64"

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def start(self) -> _RunningWeightedSum:
        return _RunningWeightedSum(self)

    def weights(self, device: torch.device, start: int, stop: int) -> torch.Tensor:
        """int64 `[stop - start]`: `2 i + 1` for the words `[start, stop)`. Cached, since all parts use the same."""
        kept = self._weights.get(device)
        if kept is None or len(kept) < stop:
            kept = torch.arange(1, 2 * stop + 1, 2, dtype=torch.int64, device=device)
            self._weights[device] = kept
        return kept[start:stop]

    def block_sums(self, part: torch.Tensor, block_bytes: int) -> torch.Tensor:
        """int64 `[blocks]` on the device of `part` (uint8 `[n]`): a sum for each `block_bytes`; the last block may be
        shorter.

        An empty part has one sum, 0. Only queues work, on the current stream.
        """
        words = part.view(torch.int64)
        if not len(words):
            return torch.zeros(1, dtype=torch.int64, device=part.device)
        block_words = block_bytes // WORD_BYTES
        if part.device.type == "cuda" and has_triton():
            from parkd_engine.kernels.sums import block_sums

            return block_sums(words, block_words)
        weights = torch.arange(1, 2 * block_words, 2, dtype=torch.int64, device=part.device)
        return torch.stack([(block * weights[: len(block)]).sum() for block in torch.split(words, block_words)])

    def values(self, running: Sequence[Any]) -> npt.NDArray[np.uint64]:
        values = np.zeros(len(running), dtype=np.uint64)
        by_device: dict[torch.device, list[int]] = {}
        for index, each in enumerate(running):
            if each.total is not None:
                by_device.setdefault(each.total.device, []).append(index)
        for indices in by_device.values():
            totals = torch.stack([total for index in indices if (total := running[index].total) is not None])
            values[indices] = totals.cpu().numpy().view(np.uint64)
        return values


class _RunningWeightedSum:
    def __init__(self, kind: WeightedSum) -> None:
        self.kind = kind
        self.words = 0
        self.total: torch.Tensor | None = None
        """int64 scalar on the bytes' device; its bits are the unsigned sum. None before the first byte."""

    def update(self, piece: torch.Tensor) -> None:
        words = piece.view(torch.int64)
        weights = self.kind.weights(piece.device, self.words, self.words + len(words))
        # int64 products and sums wrap modulo 2**64, to the same bits as unsigned arithmetic.
        partial = (words * weights).sum()
        self.total = partial if self.total is None else self.total + partial
        self.words += len(words)


def checksum_for(devices: Iterable[torch.device]) -> Checksum:
    """The kind for an engine on these devices, the same for all stages."""
    if all(device.type == "cpu" for device in devices):
        return Xxh3()
    return WeightedSum()
