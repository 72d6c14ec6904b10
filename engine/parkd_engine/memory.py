"""The memory of devices: what is free, what of it may be used, and what the matrix library takes."""

from __future__ import annotations

import psutil
import torch

MARGIN_SHARE = 0.1
"""Share of free main memory that is not used: other processes need memory too, and the tokenizer's cache grows."""
CARD_MARGIN_SHARE = 0.06
"""The same on a GPU: what an account may be off by (0.03), and as much for what no account can know beforehand (code of
kernels, images being encoded, copies for captures, gaps between allocations)."""
MARGIN_MIN_BYTES = 256 << 20


def free_bytes(device: str) -> int:
    """Free bytes on `device`. Ignores limits on this process alone. On a GPU, asking creates the CUDA context, so what
    that takes is not free."""
    if is_card(device):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)


def usable_bytes(free: int, device: str) -> int:
    """The part of `free` bytes on `device` that may be used: all but the margin."""
    return free - max(MARGIN_MIN_BYTES, int(free * (CARD_MARGIN_SHARE if is_card(device) else MARGIN_SHARE)))


def library_bytes(device: str) -> int:
    """Bytes that the matrix library keeps on `device` for each stream of work, measured by a first product. 0 if it has
    them already, if there is no such GPU here, and on CPUs."""
    place = torch.device(device)
    if not is_card(device) or (place.index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        return 0
    before = torch.cuda.memory_allocated(place)
    numbers = torch.ones((16, 16), dtype=torch.bfloat16, device=place)
    numbers = numbers @ numbers
    torch.cuda.synchronize(place)
    del numbers
    return max(0, torch.cuda.memory_allocated(place) - before)


def is_card(device: str) -> bool:
    """Whether `device` is a GPU with memory of its own."""
    return torch.device(device).type == "cuda"
