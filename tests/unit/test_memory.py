from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import psutil
import pytest

from parkd.memory import cgroup_free_bytes, free_memory_bytes, return_freed_memory

MIB = 1024 * 1024


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_v2_counts_inactive_page_cache_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box",
            "sys/fs/cgroup/box/memory.max": 100 * MIB,
            "sys/fs/cgroup/box/memory.current": 70 * MIB,
            "sys/fs/cgroup/box/memory.stat": f"active_file 5\ninactive_file {20 * MIB}",
        },
    )
    assert cgroup_free_bytes(root) == 50 * MIB


def test_v2_takes_the_tightest_level_on_the_way_up(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/box",
            "sys/fs/cgroup/slice/box/memory.max": "max",
            "sys/fs/cgroup/slice/box/memory.current": 10 * MIB,
            "sys/fs/cgroup/slice/memory.max": 40 * MIB,
            "sys/fs/cgroup/slice/memory.current": 30 * MIB,
        },
    )
    assert cgroup_free_bytes(root) == 10 * MIB


def test_v2_inside_a_container_reads_the_mount_itself(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc",
            "sys/fs/cgroup/memory.max": 64 * MIB,
            "sys/fs/cgroup/memory.current": 4 * MIB,
        },
    )
    assert cgroup_free_bytes(root) == 60 * MIB


@pytest.mark.parametrize(("limit", "free"), [(30 * MIB, 20 * MIB), (9223372036854771712, None)])
def test_v1_limit(tmp_path: Path, limit: int, free: int | None) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n0::/",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": limit,
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 10 * MIB,
        },
    )
    assert cgroup_free_bytes(root) == free


def test_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 5 * MIB,
            "sys/fs/cgroup/memory.current": 6 * MIB,
        },
    )
    assert cgroup_free_bytes(root) == 0
    assert free_memory_bytes(root) == 0


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None
    assert 0 < free_memory_bytes(tmp_path) <= psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_a_thread_freed_goes_back_to_the_system() -> None:
    """Its last piece stays, and with it all that the thread's arena has below it, unless it is told."""
    kept: list[bytes] = []

    def work() -> None:
        pieces = [bytes(1000) for _ in range(200_000)]
        kept.append(pieces[-1])

    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    before = resident()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    held = resident() - before
    assert held > 100 * MIB, "nothing was held: this test shows nothing here"
    return_freed_memory()
    assert resident() - before < held / 4
