"""The streams of a card beside the one it computes on."""

from __future__ import annotations

import torch


class DeviceStreams:
    """The streams of one device that move its rows: one each way, and one for the checksums."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.into = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sums = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow_computing(self) -> None:
        """What is queued from now on comes after all that the device was told to compute so far."""
        computing = torch.cuda.current_stream(self.device)
        for stream in (self.out, self.into, self.sums):
            stream.wait_stream(computing)

    def synchronize(self) -> None:
        for stream in (self.out, self.into, self.sums):
            stream.synchronize()
