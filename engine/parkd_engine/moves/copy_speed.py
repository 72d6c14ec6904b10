"""Measures how fast main memory is copied to the devices, for the first decisions whether to restore from it.

The copies of all devices run at the same time in a restore, so their speeds add up. A restore also compares checksums
and copies in pieces, so it is somewhat slower; the first one measures that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch

log = logging.getLogger(__name__)

TRIAL_BYTES = 32 * 1024 * 1024
COPIES = 4


def copy_bytes_per_s(devices: Iterable[str], clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Bytes a second over all different devices together; None if one has no room for TRIAL_BYTES, or fails. Takes a
    few hundredths of a second for each."""
    try:
        return sum(_of_device(torch.device(name), clock) for name in dict.fromkeys(devices))
    except RuntimeError as error:
        log.warning("how fast memory is copied to the devices could not be measured: %s", error)
        return None


def _of_device(device: torch.device, clock: Callable[[], float]) -> float:
    host = torch.zeros(TRIAL_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(TRIAL_BYTES, dtype=torch.uint8, device=device)  # its pages are there before the clock runs
    _wait(device)
    began_s = clock()
    for _ in range(COPIES):
        target.copy_(host, non_blocking=True)
    _wait(device)
    return COPIES * TRIAL_BYTES / max(clock() - began_s, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
