"""The disk tier: writes and reads compared with a plain loop; start-up and look-up with many conversations.

The plain loop does the minimum that the tier must do: `pwritev` and `preadv` of large pieces, unbuffered if the file
system supports it, and one `fsync` at the end. It runs before and after each measurement of the tier, on the same disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import xxhash

from benchmarks.common import MIB, Goal, Result, Table, finish, machine
from parkd.state import Checksums, StageLayout, StateLayout, part_sum
from parkd.store.files import disk_jobs
from parkd.store.files.disk_jobs import ReadJob, RemoveJob, WriteJob, read, remove, write
from parkd.store.files.fs import DirectoryFs, aligned_zeros
from parkd.store.files.park_directory import open_directory
from parkd.store.flights import Promotion
from parkd.store.opening import DiskOptions, open_tiered
from parkd.store.records import Capture, CaptureRequest, Parked, StoreConfig
from parkd.store.store import ConversationStore

BLOCK_TOKENS = 256
KEY = b"k" * 16
FINGERPRINT = b"f" * 16
CALLS_IN_FLIGHT = 4
PLAIN_BYTES = 16 << 20
"""Bytes per call of the plain loop. It has one call in flight, so larger calls than the tier's make it faster."""
LARGE = StateLayout(tuple(StageLayout(i, i + 1, 32768, 0, bytes([i]) * 16) for i in range(2)), "weighted-sum-64")
"""Two stages of 32 KiB per token each."""
SMALL = StateLayout(tuple(StageLayout(i, i + 1, 16, 0, bytes([i]) * 16) for i in range(2)), "weighted-sum-64")
"""Rows so small that only metadata matters."""


def open_store(fs: DirectoryFs, layout: StateLayout, ram_bytes: int, disk_bytes: int) -> ConversationStore:
    return open_tiered(
        fs,
        StoreConfig(ram_bytes, BLOCK_TOKENS),
        DiskOptions(disk_bytes, 1 << 50),
        layout,
        FINGERPRINT,
        clock=time.monotonic,
        wall=time.time,
        new_id=lambda: secrets.token_hex(8),
    )


def hashes_of(units: np.ndarray) -> tuple[bytes, ...]:
    chain, hashes = KEY, []
    for stop in range(BLOCK_TOKENS, len(units) + 1, BLOCK_TOKENS):
        chain = xxhash.xxh3_128_digest(chain + units[stop - BLOCK_TOKENS : stop].tobytes())
        hashes.append(chain)
    return tuple(hashes)


def park(store: ConversationStore, layout: StateLayout, units: np.ndarray, fill: np.ndarray | None = None) -> Parked:
    capture = store.begin_capture(CaptureRequest(KEY, units, hashes_of(units), (), layout.digest))
    assert isinstance(capture, Capture), capture
    for stage in capture.transfer.stages:
        for run in stage.rows:
            if fill is not None:
                run.buffer[:] = np.resize(fill, run.buffer.size)
    blocks = -(-len(units) // BLOCK_TOKENS)
    stages = len(layout.stages)
    return store.commit(capture, Checksums(np.zeros((blocks, stages), np.uint64), np.zeros((0, stages), np.uint64)))


def together(pool: ThreadPoolExecutor) -> Callable[[Sequence[Callable[[], None]]], None]:
    def run_all(calls: Sequence[Callable[[], None]]) -> None:
        for future in [pool.submit(call) for call in calls]:
            future.result()

    return run_all


def plain_write(path: Path, size: int, piece: np.ndarray) -> float:
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct_flag(path), 0o600)
    for at in range(0, size, piece.size):
        os.pwritev(fd, [piece[: min(piece.size, size - at)].data], at)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - began


def plain_read(path: Path, size: int, piece: np.ndarray) -> float:
    forget_cached(path)
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | direct_flag(path))
    for at in range(0, size, piece.size):
        os.preadv(fd, [piece[: min(piece.size, size - at)].data], at)
    os.close(fd)
    return time.perf_counter() - began


def direct_flag(path: Path) -> int:
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError:
        return 0
    return flag


def forget_cached(path: Path) -> None:
    """Drops the file from the page cache, so that a read reaches the device even without direct I/O."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure_speed(folder: Path, tokens: int, rounds: int) -> tuple[dict[str, list[float]], int, float]:
    """(seconds of each write and read of the tier and of the plain loop, alternating, and of reads without checksums;
    bytes of one; seconds of the checksums alone)."""
    fs = open_directory(folder / "speed")
    size = tokens * LARGE.row_bytes
    store = open_store(fs, LARGE, 2 * size + (64 << 20), 64 * size)
    piece, fill = aligned_zeros(PLAIN_BYTES), np.frombuffer(np.random.default_rng(1).bytes(8 << 20), np.uint8)
    piece[:] = np.resize(fill, piece.size)
    plain = folder / "speed" / "plain"
    seconds: dict[str, list[float]] = {name: [] for name in ("write", "plain write", "read", "unchecked", "plain read")}
    with ThreadPoolExecutor(CALLS_IN_FLIGHT) as pool:
        run_all = together(pool)
        for number in range(rounds):
            units = np.random.default_rng(number).integers(0, 50_000, tokens, dtype=np.uint64)
            parked = park(store, LARGE, units, fill)
            job = next_write(store, fs)
            seconds["plain write"].append(plain_write(plain, size, piece))
            began = time.perf_counter()
            write(fs, job, run_all)
            seconds["write"].append(time.perf_counter() - began)
            store.finished(job, None)
            store.table.evict(store.table.known(parked.id), "the benchmark reads it back")
            seconds["plain read"].append(plain_read(plain, size, piece))
            promotion = store.promote(parked.id, tokens)
            assert isinstance(promotion, Promotion)
            ways = ("read", "unchecked") if number % 2 else ("unchecked", "read")
            for way in (*ways, *reversed(ways)):  # so that a drift favours neither
                for ref, _ in promotion.job.extents:
                    forget_cached(folder / "speed" / ref.name)
                with patch.object(disk_jobs, "part_sum", part_sum if way == "read" else Anything):
                    began = time.perf_counter()
                    read(fs, promotion.job, run_all)
                    seconds[way].append(time.perf_counter() - began)
            sums_s = sum_seconds(promotion.job)
            store.promoted(promotion, None)
            store.drop(parked.id, "the benchmark is done with it")
            drain(store, fs)
    plain.unlink()
    fs.close()
    return seconds, size, sums_s


class Anything:
    """A checksum that equals any other, to measure reads without checksums."""

    def __init__(self, algorithm: str, buffer: np.ndarray) -> None: ...

    def __ne__(self, other: object) -> bool:
        return False


def sum_seconds(job: ReadJob) -> float:
    """Seconds of the checksums of the same bytes alone, on one thread."""
    began = time.perf_counter()
    for _, parts in job.extents:
        for part in parts:
            xxhash.xxh3_64_intdigest(part.buffer.data)
    return time.perf_counter() - began


def next_write(store: ConversationStore, fs: DirectoryFs) -> WriteJob:
    while isinstance(job := store.next_job(), RemoveJob):
        store.finished(job, None, remove(fs, job))
    assert job is not None
    return job


def drain(store: ConversationStore, fs: DirectoryFs) -> None:
    while (job := store.next_job()) is not None:
        if isinstance(job, RemoveJob):
            store.finished(job, None, remove(fs, job))
        else:
            write(fs, job)
            store.finished(job, None)


def measure_many(folder: Path, conversations: int, blocks: int) -> dict[str, float]:
    """Start-up and look-up with `conversations` on disk that have `blocks` in total."""
    path, tokens = folder / "many", blocks // conversations * BLOCK_TOKENS
    fs = open_directory(path)
    store = open_store(fs, SMALL, 256 << 20, 8 << 30)
    rng, prompts = np.random.default_rng(2), []
    shared = rng.integers(0, 50_000, 2 * BLOCK_TOKENS, dtype=np.uint64)
    for _ in range(conversations):
        units = np.concatenate([shared, rng.integers(0, 50_000, tokens - len(shared), dtype=np.uint64)])
        park(store, SMALL, units)
        prompts.append(hashes_of(units))
        drain(store, fs)
    fs.close()
    del store
    fs = open_directory(path)
    began = time.perf_counter()
    store = open_store(fs, SMALL, 256 << 20, 8 << 30)
    start_s = time.perf_counter() - began
    stats = store.disk_stats()
    assert stats.conversations == conversations, stats
    times = []
    for hashes in itertools.islice(itertools.cycle(prompts), 2000):
        began = time.perf_counter()
        found = store.candidates(KEY, hashes)
        times.append(time.perf_counter() - began)
        assert found[0][1] == len(hashes)
    fs.close()
    return {
        "start_s": start_s,
        "match_median_s": statistics.median(times),
        "match_p99_s": statistics.quantiles(times, n=100)[98],
        "index_bytes": stats.index_bytes / conversations,
        "manifest_bytes": sum(p.stat().st_size for p in path.glob("*.manifest")) / conversations,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (the temporary directory's)")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000)
    given = parser.parse_args(arguments)
    started = machine()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        seconds, size, sums_s = measure_speed(Path(name), given.tokens, given.rounds)
        many = measure_many(Path(name), given.conversations, given.blocks)
    rows, goals = [], []
    for way in ("write", "read"):
        ours, theirs = statistics.median(seconds[way]), statistics.median(seconds[f"plain {way}"])
        share = theirs / ours
        rows.append(
            (way, f"{size / MIB:.0f}", f"{size / ours / 1e9:.2f}", f"{size / theirs / 1e9:.2f}", f"{share:.2f}")
        )
        goals.append(Goal(f"{way} against a plain loop of the same sizes", ">= 0.9", f"{share:.2f}", share >= 0.9))
    checked, unchecked = (np.reshape(seconds[way], (-1, 2)).sum(1) for way in ("read", "unchecked"))
    cost = float(np.median(1 - unchecked / checked))
    claim = "checksums, of the time that a read takes (with and without, in turn)"
    goals.append(Goal(claim, "<= 5%", f"{cost:.1%}", cost <= 0.05))
    sums_share = sums_s / (CALLS_IN_FLIGHT * statistics.median(seconds["read"]))
    goals.append(
        Goal(
            f"start with {given.conversations:,} conversations",
            "< 2 s",
            f"{many['start_s']:.2f} s",
            many["start_s"] < 2,
        )
    )
    median_ms = many["match_median_s"] * 1e3
    goals.append(Goal("look-up among them, median", "< 1 ms", f"{median_ms:.3f} ms", median_ms < 1))
    result = Result(
        "disk",
        "The disk tier",
        "The tier's own jobs write a conversation of two stages and read it back; a plain loop of direct I/O does the "
        "same with a file of the same size. The two alternate, and the figures are medians. Then many small "
        "conversations are parked, the store is opened again and each is looked up.",
        tables=[
            Table("Speed", ("", "MiB", "tier GB/s", "plain GB/s", "share"), tuple(rows)),
            Table(
                f"{given.conversations:,} conversations of {given.blocks:,} blocks",
                ("start", "look-up median", "look-up p99", "index bytes each", "manifest bytes each"),
                (
                    (
                        f"{many['start_s']:.2f} s",
                        f"{median_ms:.3f} ms",
                        f"{many['match_p99_s'] * 1e3:.3f} ms",
                        f"{many['index_bytes']:,.0f}",
                        f"{many['manifest_bytes']:,.0f}",
                    ),
                ),
            ),
        ],
        goals=goals,
        notes=[
            f"The checksums of one read take {sums_s * 1e3:.0f} ms of one thread. {CALLS_IN_FLIGHT} threads share "
            f"them, and compute while others wait for the device: {sums_share:.0%} of their time."
        ],
        raw={"seconds": seconds, "sums_s": sums_s, "many": many},
    )
    finish(result, started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
