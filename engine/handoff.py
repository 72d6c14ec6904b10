"""Hidden states from one stage's device to the next one's.

cards that reach each other   one copy, ordered behind the one stage and ahead of the other by the copy itself
cards that do not             sending stream -> page-locked memory -> receiving stream, in turn through few slots
anything else                 the copy the library makes
"""

from __future__ import annotations

import torch

SLOTS = 2
"""Chunks that may be on their way at once: the one being received and the one being sent."""


class _Slot:
    """Page-locked memory for one chunk; `read` has happened once it may be overwritten."""

    def __init__(self) -> None:
        self.read: torch.cuda.Event | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._memory.numel() < hidden.nbytes:
            self._memory = torch.empty(hidden.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)


class HandOff:
    """One boundary between stages. The host waits for nothing where both sides are cards."""

    def __init__(self, source: torch.device, target: torch.device, *, peer_access: bool = True) -> None:
        """Without `peer_access` cards go through main memory also where they could reach each other."""
        self.source, self.target = source, target
        cards = source.type == target.type == "cuda"
        reaches = source == target or (cards and torch.cuda.can_device_access_peer(source, target))
        self.is_staged = cards and not (peer_access and reaches)
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._next = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same numbers on the target."""
        if self.is_staged:
            out = torch.empty_like(hidden, device=self.target)
            self._through_host(hidden, out)
            return out
        # To the CPU the copy must be waited for: nothing orders what the CPU reads after what a card still sends.
        return hidden.to(self.target, non_blocking=self.target.type == "cuda")

    def into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """The same into memory on the target that stays where it is."""
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
            sent = _event(sending)
        with torch.cuda.stream(receiving):
            receiving.wait_event(sent)
            out.copy_(host, non_blocking=True)
            slot.read = _event(receiving)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
