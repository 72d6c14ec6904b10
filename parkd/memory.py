"""How much memory this process can still take: what the machine or the cgroup reports, whichever is less."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with a number near 2**63."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping. `root` holds `proc` and `sys`; where they are missing (not Linux),
    the system's own figure stands alone."""
    machine = int(psutil.virtual_memory().available)
    limits = cgroup_free_bytes(root)
    return machine if limits is None else min(machine, limits)


def total_memory_bytes(root: Path = Path("/")) -> int:
    """What the machine has, or what the cgroup grants, whichever is less."""
    limits = (_number(folder / maximum) for folder, maximum, _, _ in _levels(root))
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def return_freed_memory() -> None:
    """Lets the system have what was freed and is still held for later. glibc keeps it by thread, without a bound of its
    own: what one large request took stays taken. Does nothing where there is no such call (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cgroup_free_bytes(root: Path = Path("/")) -> int | None:
    """The least that this process's cgroup and those around it leave; None when none sets a limit.

    The page cache counts as used there, but the kernel gives the inactive part of it back before it refuses memory.
    """
    least: int | None = None
    for folder, maximum, current, inactive in _levels(root):
        limit = _number(folder / maximum)
        used = _number(folder / current)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        free = max(0, limit - max(0, used - _stat(folder / "memory.stat", inactive)))
        least = free if least is None else min(least, free)
    return least


def _levels(root: Path) -> list[tuple[Path, str, str, str]]:
    """Each folder from this process's cgroup up to the mount, with the names of its files.

    Inside a container the path may lie outside of what is mounted; then only the mount itself is there, and it is
    the container's.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    levels: list[tuple[Path, str, str, str]] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / path.lstrip("/")
        levels += [(level, *names) for level in (folder, *folder.parents) if level == mount or mount in level.parents]
    return levels


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, field: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0
