"""What a job does with files: how parts are batched, and what their checksums are compared with."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from parkd.store.files.disk_jobs import BATCH_BYTES, DamagedPart, Part, ReadJob, WriteJob, batches, read, write
from parkd.store.files.fs import GRAIN_BYTES, OpenFile, aligned_zeros
from parkd.store.files.manifest import ExtentRef
from parkd.store.files.park_directory import open_directory
from tests.unit.store.test_store_disk_files import make_manifest

EXTENT = ExtentRef(7, 2 * GRAIN_BYTES)


def part(offset: int, size: int) -> Part:
    return Part(offset, np.zeros(size, dtype=np.uint8), np.zeros(1, dtype=np.uint64), 0)


@pytest.mark.parametrize(
    ("sizes", "gap_before", "lengths"),
    [
        ((BATCH_BYTES, GRAIN_BYTES), None, [1, 1]),
        ((BATCH_BYTES - GRAIN_BYTES, GRAIN_BYTES, GRAIN_BYTES), None, [2, 1]),
        ((BATCH_BYTES - GRAIN_BYTES, GRAIN_BYTES - 1, 1), None, [2, 1]),
        ((2 * BATCH_BYTES, GRAIN_BYTES), None, [1, 1]),
        ((GRAIN_BYTES, 1, GRAIN_BYTES), None, [3]),
        ((GRAIN_BYTES, GRAIN_BYTES, GRAIN_BYTES), 1, [1, 2]),
    ],
)
def test_adjacent_parts_are_moved_together_up_to_a_bound(
    sizes: tuple[int, ...], gap_before: int | None, lengths: list[int]
) -> None:
    """Padding to whole pages counts, and a part larger than the bound is moved alone."""
    parts, at = [], 0
    for number, size in enumerate(sizes):
        at += GRAIN_BYTES if number == gap_before else 0
        parts.append(part(at, size))
        at += -(-size // GRAIN_BYTES) * GRAIN_BYTES
    assert [len(batch) for batch in batches(parts)] == lengths
    assert [one for batch in batches(parts) for one in batch] == parts


def written(folder: Path, *, known: int | None) -> Part:
    """A part of a page and a half, written, with the checksum that the engine gave."""
    buffer = aligned_zeros(GRAIN_BYTES + GRAIN_BYTES // 2)
    buffer[:] = np.arange(buffer.nbytes) % 251
    sums = np.array([known or 0], dtype=np.uint64)
    one = Part(0, buffer, sums, 0, is_summed=known is not None)
    fs = open_directory(folder)
    write(fs, WriteJob(make_manifest(), EXTENT, (one,)))
    fs.close()
    return one


def streamed_part(one: Part) -> Part:
    """The same part, to be compared with its checksum and not kept."""
    buffer = np.zeros(0, dtype=np.uint8)
    return Part(one.offset, buffer, one.file_sums, one.stage, streamed_bytes=one.buffer.nbytes)


def test_a_checksum_of_the_engine_is_not_computed_again(tmp_path: Path) -> None:
    """Computed from the buffer, it would vouch for bytes that changed since the engine summed them."""
    one = written(tmp_path / "d", known=12345)
    assert one.file_sums[0] == 12345
    fs = open_directory(tmp_path / "d")
    with pytest.raises(DamagedPart, match="is not what was written"):
        read(fs, ReadJob(((EXTENT, (one,)),)))
    fs.close()


@pytest.mark.parametrize("left_bytes", [0, GRAIN_BYTES, 2 * GRAIN_BYTES - 1])
def test_an_extent_that_ends_too_early_is_damaged(tmp_path: Path, left_bytes: int) -> None:
    """And no fault of the device, after which the whole tier would be given up."""
    one = written(tmp_path / "d", known=None)
    with (tmp_path / "d" / EXTENT.name).open("r+b") as file:
        file.truncate(left_bytes)
    fs = open_directory(tmp_path / "d")
    with pytest.raises(DamagedPart, match=f"{EXTENT.name} is too short") as damaged:
        read(fs, ReadJob(((EXTENT, (one,)),)))
    assert damaged.value.extent == EXTENT.id
    fs.close()


@pytest.mark.parametrize("left_bytes", [0, GRAIN_BYTES])
def test_an_extent_that_is_only_compared_is_damaged_too_if_it_ends_too_early(tmp_path: Path, left_bytes: int) -> None:
    job = ReadJob(((EXTENT, (streamed_part(written(tmp_path / "d", known=None)),)),))
    with closing(open_directory(tmp_path / "d")) as fs:
        read(fs, job)
        with (tmp_path / "d" / EXTENT.name).open("r+b") as file:
            file.truncate(left_bytes)
        with pytest.raises(DamagedPart, match=f"{EXTENT.name} is too short"):
            read(fs, job)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_fault_of_the_device_is_no_damage(tmp_path: Path, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the conversation stays, and the tier answers for it."""
    one = written(tmp_path / "d", known=None)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the device")

    fs = open_directory(tmp_path / "d")
    monkeypatch.setattr(OpenFile, "read", fail)
    with pytest.raises(OSError, match="the device"):
        read(fs, ReadJob(((EXTENT, (streamed_part(one) if is_streamed else one,)),)))
    fs.close()
