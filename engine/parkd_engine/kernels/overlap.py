"""Launches kernels while the previous one still runs (programmatic dependent launch, Hopper and later).

    one      ###########################
    next                  launched, waits ############################
    without                                   launched ############################

A token takes hundreds of short kernels, each of which reads the output of the one before. With an early launch the next
kernel's programs are ready when it may start, so memory is idle for less time in between.

This is correct because every kernel that may be launched early waits before it accesses any memory. So a kernel that
has ended has waited for all before it. On older GPUs nothing is launched early.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parkd_engine.kernels import EARLY_CAPABILITY


def overlap(device: torch.device) -> Mapping[str, bool]:
    """Launch arguments of kernels with a parameter `EARLY`, for tensors on `device`.

    Raises RuntimeError if another GPU is the current one: Triton would launch the kernel there, where nothing orders it
    after the work that writes the tensors.
    """
    if device.index != torch.cuda.current_device():
        raise RuntimeError(f"a kernel over tensors on {device} would run on cuda:{torch.cuda.current_device()}")
    return _launched(device)


@cache
def _launched(device: torch.device) -> Mapping[str, bool]:
    if torch.cuda.get_device_capability(device) < EARLY_CAPABILITY:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Allows the next kernel to launch once all programs of this one have started, and waits until writes of earlier
    kernels are visible."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_alone(EARLY: tl.constexpr):
    """Waits likewise, but the next kernel may not launch early. If that has few programs and this one's end at
    different times, all would go to the multiprocessors that are free first, and only those would read memory."""
    if EARLY:
        gdc_wait()
