"""The memory that this process can still take: the machine's free memory or the cgroup's, whichever is less."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""In cgroup v1, a limit near 2**63 means that there is none."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping. `root` is the directory with `proc` and `sys`; if these are missing
    (not Linux), cgroups are ignored."""
    machine = int(psutil.virtual_memory().available)
    limits = cgroup_free_bytes(root)
    return machine if limits is None else min(machine, limits)


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of the machine's memory or the cgroup's limit, whichever is less."""
    limits = (_number(folder / maximum) for folder, maximum, _, _ in _levels(root))
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def resident_bytes() -> int:
    """Bytes of this process that are in main memory, those of mapped files included."""
    return int(psutil.Process().memory_info().rss)


def return_freed_memory() -> None:
    """Returns freed memory that the allocator still holds to the system. glibc keeps freed memory for each thread
    without a limit, so the memory of one large request would stay taken. Does nothing on other systems (musl, macOS,
    Windows).
    """
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cgroup_free_bytes(root: Path = Path("/")) -> int | None:
    """The least free bytes of this process's cgroup and its ancestors; None if none has a limit.

    cgroups count the page cache as used, but the kernel reclaims its inactive part before it refuses memory, so that
    part counts as free here.
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
    """The folders from this process's cgroup up to the mount point, each with the names of its files.

    In a container, the process's path may not exist under the mount point; then only the mount point itself, which is
    the container's cgroup, has files.
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
