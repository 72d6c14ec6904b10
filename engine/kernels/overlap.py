"""Kernels that are launched while the one before them still runs (programmatic dependent launch, Hopper and later).

    one      ###########################
    next                  launched, waits ############################
    without                                   launched ############################

A token is hundreds of short kernels, each of which reads what the one before wrote. Launched early, the next one's
programs are in place when they may begin, and memory idles for less time in between.

What keeps it right: every kernel that may be launched early waits before it touches anything. One that has ended has
then seen the end of all before it. On other cards nothing is launched early.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)


def overlap(device: torch.device) -> Mapping[str, bool]:
    """How kernels with an argument `EARLY` are launched on `device`, which is where their tensors are.

    Raises RuntimeError if another card is the current one: Triton would launch them there, where nothing orders them
    behind what made the tensors.
    """
    if device.index != torch.cuda.current_device():
        raise RuntimeError(f"a kernel over tensors on {device} would run on cuda:{torch.cuda.current_device()}")
    return _launched(device)


@cache
def _launched(device: torch.device) -> Mapping[str, bool]:
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Lets the next kernel be launched once all programs of this one are, and returns when what earlier ones wrote is
    there."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_alone(EARLY: tl.constexpr):
    """The same, but the next kernel is not launched before this one ends: where it has few programs and this one ends
    unevenly, they would crowd on the processors that are free first, and read memory with no more than those."""
    if EARLY:
        gdc_wait()
