"""The CUDA streams of a device besides its compute stream, and events on streams."""

from __future__ import annotations

import torch


class DeviceStreams:
    """One device's streams for copying rows: one per direction, and one for the checksums."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.into = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sums = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow_computing(self) -> None:
        """Makes later work on these streams wait for everything queued on the compute stream so far."""
        computing = torch.cuda.current_stream(self.device)
        for stream in (self.out, self.into, self.sums):
            stream.wait_stream(computing)

    def synchronize(self) -> None:
        for stream in (self.out, self.into, self.sums):
            stream.synchronize()


def record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that completes when everything queued on `stream` so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
