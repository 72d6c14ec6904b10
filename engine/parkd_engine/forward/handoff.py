"""Copies hidden states from one stage's device to the next stage's.

GPUs with peer access         one copy, which orders itself after the first stage's work and before the second's
GPUs without                  sending stream -> page-locked memory -> receiving stream, through `SLOTS` buffers in turn
anything else                 torch's own copy
"""

from __future__ import annotations

import torch

from parkd_engine.arenas.streams import record_event

SLOTS = 2
"""Chunks that can be in transfer at once: one being received and one being sent."""


class _Slot:
    """Page-locked memory for one chunk. It may be overwritten after the event `read`."""

    def __init__(self) -> None:
        self.read: torch.cuda.Event | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._memory.numel() < hidden.nbytes:
            self._memory = torch.empty(hidden.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)


class HandOff:
    """The boundary between two stages. Between two GPUs the host does not wait."""

    def __init__(self, source: torch.device, target: torch.device, *, peer_access: bool = True) -> None:
        """Without `peer_access` GPUs copy through main memory even if they could reach each other."""
        self.source, self.target = source, target
        cards = source.type == target.type == "cuda"
        reaches = source == target or (cards and torch.cuda.can_device_access_peer(source, target))
        self.is_staged = cards and not (peer_access and reaches)
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._next = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy of `hidden` on the target device."""
        if self.is_staged:
            out = torch.empty_like(hidden, device=self.target)
            self._through_host(hidden, out)
            return out
        # A copy to the CPU must be synchronous: nothing makes the CPU wait until the GPU has sent its data.
        return hidden.to(self.target, non_blocking=self.target.type == "cuda")

    def into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Copies `hidden` into `out`, a tensor on the target device with a fixed address."""
        if self.is_staged:
            self._through_host(hidden, out)
        else:
            out.copy_(hidden, non_blocking=True)

    def _through_host(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        host = slot.like(hidden)
        sending, receiving = torch.cuda.current_stream(self.source), torch.cuda.current_stream(self.target)
        with torch.cuda.stream(sending):
            if slot.read is not None:
                sending.wait_event(slot.read)
            host.copy_(hidden, non_blocking=True)
            sent = record_event(sending)
        with torch.cuda.stream(receiving):
            receiving.wait_event(sent)
            out.copy_(host, non_blocking=True)
            slot.read = record_event(receiving)
