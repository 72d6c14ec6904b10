"""The jobs of the disk tier, as plain values, and the functions that carry them out.

The store hands out jobs and is told how they ended; it never waits for one. A job touches only files and the buffers
that it names, so it can run on any thread. Tests run jobs inline to replay faults.

    write    parts -> extent -> fsync -> manifest under a temporary name -> fsync -> rename -> fsync of the directory
    read     extents -> buffers, each part's checksum compared; of another layer split, cut for this one
    remove   manifests first, then extents, so that no manifest is left that names a removed extent
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from parkd.state import Bytes, Recut, Sums, part_sum
from parkd.state.sums import XXH3
from parkd.store.files.fs import GRAIN_BYTES, File, FileSystem, aligned_zeros
from parkd.store.files.manifest import (
    TEMPORARY_SUFFIX,
    DamagedManifest,
    DiskPlace,
    ExtentRef,
    Manifest,
    decode,
    encode,
)

BATCH_BYTES = 4 << 20
"""About how much one call moves: large enough for full speed, small enough that several are in flight, and that the
checksums after the last one take little time."""
STREAM_BYTES = 16 << 20
"""Files that are only compared with their checksum are read in pieces of this size."""

RunAll = Callable[[Sequence[Callable[[], None]]], None]
"""Runs all calls in any order, and returns after all have ended. Raises the first error."""


class DamagedPart(Exception):
    """An extent's bytes are not those that were written."""

    def __init__(self, extent: int, message: str) -> None:
        super().__init__(message)
        self.extent = extent


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The bytes of one stage of a block or a checkpoint, and their place in an extent."""

    offset: int
    buffer: Bytes
    file_sums: Sums
    """`[stages]`: a write fills in `file_sums[stage]`, a read compares with it."""
    stage: int
    is_summed: bool = False
    """The checksum is known already, because the engine's is the same function of the same bytes."""
    streamed_bytes: int = 0
    """Only for reads: this many bytes are compared with their checksum and not kept."""

    @property
    def padding(self) -> int:
        return -self.buffer.nbytes % GRAIN_BYTES


@dataclass(frozen=True, eq=False)
class WriteJob:
    """Writes a conversation: the parts that are not on disk yet, then its manifest."""

    manifest: Manifest
    extent: ExtentRef | None
    """The new extent; None if every part is on disk already."""
    parts: tuple[Part, ...]
    """Ascending, and without gaps except padding, from 0 to the size of the extent."""
    is_adopted: bool = False
    """The engine has written the extent itself: there are no parts, but it must be synced."""

    @property
    def temporary_name(self) -> str:
        return self.manifest.name + TEMPORARY_SUFFIX


@dataclass(frozen=True, eq=False)
class ReadJob:
    extents: tuple[tuple[ExtentRef, tuple[Part, ...]], ...]
    """The parts of each extent are ascending."""

    @property
    def bytes(self) -> int:
        return sum(part.buffer.nbytes + part.streamed_bytes for _, parts in self.extents for part in parts)


@dataclass(frozen=True, eq=False)
class RecutJob(ReadJob):
    """Reads a conversation of another layer split, and cuts it for this one. Its extents name no parts: the manifest,
    which the job reads too, knows where they are."""

    manifest_name: str
    recut: Recut
    blocks: tuple[tuple[Bytes, ...], ...]
    """By block and stage here."""
    checkpoints: tuple[tuple[int, tuple[Bytes, ...]], ...]
    """Position, and bytes by stage here."""
    sums: Sums
    """`[blocks, stages]`: the reading fills in the engine's checksums of what is here."""
    fixed_sums: Sums
    """`[checkpoints, stages]`: the same."""

    @property
    def bytes(self) -> int:
        parts = [*self.blocks, *(buffers for _, buffers in self.checkpoints)]
        return sum(buffer.nbytes for buffers in parts for buffer in buffers)


@dataclass(frozen=True, eq=False)
class RemoveJob:
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class MarkJob:
    """Writes when conversations were last used, as the file times of their manifests. A hint: it may be lost."""

    times: tuple[tuple[str, float], ...]
    """Manifest names, and seconds since the epoch."""


def run_serially(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def on_pool(pool: ThreadPoolExecutor) -> RunAll:
    """Runs the calls of one job at once on a pool's threads. The first error is raised after all have ended."""

    def run_all(calls: Sequence[Callable[[], None]]) -> None:
        if len(calls) == 1:
            calls[0]()
            return
        futures = [pool.submit(call) for call in calls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    return run_all


def write(fs: FileSystem, job: WriteJob, run_all: RunAll = run_serially) -> None:
    """Returns once the conversation is durable on the device. Raises OSError after removing what was written; what
    could not be removed is among `leftovers(job)`."""
    try:
        if job.extent is not None and job.is_adopted:
            _sync_file(fs, job.extent.name)
        elif job.extent is not None:
            _write_file(fs, job.extent.name, _extent_writers(job.parts), run_all)
        data = np.frombuffer(encode(job.manifest), dtype=np.uint8)
        _write_file(fs, job.temporary_name, lambda file: [lambda: file.write(0, [data])], run_serially)
        fs.rename(job.temporary_name, job.manifest.name)
        fs.sync()
    except Exception:
        # A failed fsync may have lost any page, and a second one need not report it: everything written is removed.
        remove(fs, RemoveJob(leftovers(job)))
        raise


def leftovers(job: WriteJob) -> tuple[str, ...]:
    """Names of the files that a failed write may have left."""
    names = [job.temporary_name, job.manifest.name]
    if job.extent is not None:
        names.append(job.extent.name)
    return tuple(names)


def read(fs: FileSystem, job: ReadJob, run_all: RunAll = run_serially) -> None:
    """Fills the buffers and compares checksums. Raises DamagedPart, and OSError if the device fails."""
    if isinstance(job, RecutJob):
        _read_recut(fs, job)
        return
    with contextlib.ExitStack() as files:
        calls: list[Callable[[], None]] = []
        for extent, parts in job.extents:
            try:
                file = fs.open(extent.name)
            except FileNotFoundError as error:
                raise DamagedPart(extent.id, f"{extent.name} is not there") from error
            files.callback(file.close)
            calls += [_reader(file, extent, batch) for batch in batches(p for p in parts if not p.streamed_bytes)]
            calls += [_verifier(file, extent, part) for part in parts if part.streamed_bytes]
        run_all(calls)


def _read_recut(fs: FileSystem, job: RecutJob) -> None:
    """One part of the other split at a time is in memory beside the buffers, and is compared with its checksums before
    anything is taken from it."""
    old, new = job.recut.old, job.recut.new
    first = job.extents[0][0].id
    try:
        manifest = decode(fs.load(job.manifest_name))
    except (FileNotFoundError, DamagedManifest) as error:
        raise DamagedPart(first, f"{job.manifest_name} cannot be read: {error}") from error
    known = {checkpoint.position: checkpoint for checkpoint in manifest.checkpoints}
    is_it = manifest.name == job.manifest_name and manifest.layout_digest == old.digest
    if not is_it or len(manifest.blocks) < len(job.blocks):
        raise DamagedPart(first, f"{job.manifest_name} is another than it was")
    with contextlib.ExitStack() as files:
        reader = _OneByOne(fs, {ref.id: ref for ref in manifest.extents}, files)
        for block, into, sums in zip(manifest.blocks, job.blocks, job.sums, strict=False):
            rows = into[0].nbytes // new.stages[0].row_bytes
            _blank(into)
            for stage, layout in enumerate(old.stages):
                part = reader.part(block.place, block.sums, stage, block.rows * layout.row_bytes, old.checksum)
                job.recut.add_rows(stage, part[: rows * layout.row_bytes], into)
            sums[:] = [part_sum(new.checksum, buffer) for buffer in into]
        for (position, into), sums in zip(job.checkpoints, job.fixed_sums, strict=True):
            checkpoint = known[position]
            _blank(into)
            for stage, layout in enumerate(old.stages):
                part = reader.part(checkpoint.place, checkpoint.sums, stage, layout.fixed_bytes, old.checksum)
                job.recut.add_fixed(stage, part, into)
            sums[:] = [part_sum(new.checksum, buffer) for buffer in into]


def _blank(buffers: Sequence[Bytes]) -> None:
    """What was in this memory before may be another conversation's."""
    for buffer in buffers:
        buffer[:] = 0


class _OneByOne:
    """Reads parts into one piece of memory, which the next part overwrites."""

    def __init__(self, fs: FileSystem, extents: Mapping[int, ExtentRef], files: contextlib.ExitStack) -> None:
        self._fs = fs
        self._extents = extents
        self._files = files
        self._open: dict[int, File] = {}
        self._scratch = aligned_zeros(GRAIN_BYTES)

    def part(self, place: DiskPlace, sums: Sums, stage: int, size: int, checksum: str) -> Bytes:
        """A part of `size` bytes, compared with the file's checksum and the engine's. Raises DamagedPart, OSError."""
        padded = -(-size // GRAIN_BYTES) * GRAIN_BYTES
        if self._scratch.nbytes < padded:
            self._scratch = aligned_zeros(padded)
        name = self._extents[place.extent].name
        try:
            if place.extent not in self._open:
                self._open[place.extent] = self._fs.open(name)
                self._files.callback(self._open[place.extent].close)
            self._open[place.extent].read(int(place.offsets[stage]), [self._scratch[:padded]])
        except FileNotFoundError as error:
            raise DamagedPart(place.extent, f"{name} is not there") from error
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise DamagedPart(place.extent, f"{name} is too short") from error
            raise
        part = self._scratch[:size]
        if part_sum(XXH3, part) != int(place.file_sums[stage]) or part_sum(checksum, part) != int(sums[stage]):
            raise DamagedPart(place.extent, f"a part of {name} at {place.offsets[stage]} is not what was written")
        return part


def remove(fs: FileSystem, job: RemoveJob) -> tuple[str, ...]:
    """Removes files. Returns the names of those that could not be removed."""
    left = []
    for name in job.names:
        try:
            fs.remove(name)
        except FileNotFoundError:
            continue
        except OSError:
            left.append(name)
    return tuple(left)


def mark(fs: FileSystem, job: MarkJob) -> None:
    """Sets file times without a sync, one system call each. Where that fails, the manifest keeps the older time."""
    for name, at_s in job.times:
        with contextlib.suppress(OSError):
            fs.mark(name, at_s)


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Groups adjacent parts into batches of about BATCH_BYTES."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        joins = bool(batch) and batch[-1].offset + batch[-1].buffer.nbytes + batch[-1].padding == part.offset
        if batch and (not joins or size + part.buffer.nbytes > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.buffer.nbytes + part.padding
    if batch:
        yield batch


def _write_file(
    fs: FileSystem, name: str, writers: Callable[[File], Sequence[Callable[[], None]]], run_all: RunAll
) -> None:
    file = fs.create(name)
    try:
        run_all(writers(file))
        file.sync()
    finally:
        file.close()


def _sync_file(fs: FileSystem, name: str) -> None:
    file = fs.open(name)
    try:
        file.sync()
    finally:
        file.close()


def _extent_writers(parts: tuple[Part, ...]) -> Callable[[File], Sequence[Callable[[], None]]]:
    def writer(file: File, batch: list[Part]) -> Callable[[], None]:
        def call() -> None:
            for part in batch:
                if not part.is_summed:
                    part.file_sums[part.stage] = part_sum(XXH3, part.buffer)
            buffers, tails = _in_pages(batch)
            for part, tail in tails:
                tail[: -part.padding] = part.buffer[part.buffer.nbytes - tail.nbytes + part.padding :]
            file.write(batch[0].offset, buffers)

        return call

    return lambda file: [writer(file, batch) for batch in batches(parts)]


def _reader(file: File, extent: ExtentRef, batch: list[Part]) -> Callable[[], None]:
    def call() -> None:
        buffers, tails = _in_pages(batch)
        try:
            file.read(batch[0].offset, buffers)
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise DamagedPart(extent.id, f"{extent.name} is too short") from error
            raise
        for part, tail in tails:
            part.buffer[part.buffer.nbytes - tail.nbytes + part.padding :] = tail[: -part.padding]
        for part in batch:
            if part_sum(XXH3, part.buffer) != int(part.file_sums[part.stage]):
                raise DamagedPart(extent.id, f"a part of {extent.name} at {part.offset} is not what was written")

    return call


def _verifier(file: File, extent: ExtentRef, part: Part) -> Callable[[], None]:
    def call() -> None:
        scratch, at = aligned_zeros(min(STREAM_BYTES, part.streamed_bytes + GRAIN_BYTES)), 0
        hasher = xxhash.xxh3_64()
        while at < part.streamed_bytes:
            piece = scratch[: min(scratch.nbytes, part.streamed_bytes - at)]
            try:
                file.read(part.offset + at, [piece])
            except OSError as error:
                if error.errno == errno.ENODATA:
                    raise DamagedPart(extent.id, f"{extent.name} is too short") from error
                raise
            hasher.update(piece.data)
            at += piece.nbytes
        if hasher.intdigest() != int(part.file_sums[part.stage]):
            raise DamagedPart(extent.id, f"{extent.name} is not what was written")

    return call


def _in_pages(batch: list[Part]) -> tuple[list[Bytes], list[tuple[Part, Bytes]]]:
    """The buffers of a batch in whole pages, as direct I/O requires. If a part ends inside a page, its last page is a
    zeroed buffer of its own, so that neither the file nor memory gets bytes from beyond the part."""
    padded = [part for part in batch if part.padding]
    pages = iter(aligned_zeros(GRAIN_BYTES * len(padded)).reshape(len(padded), GRAIN_BYTES))
    buffers: list[Bytes] = []
    tails: list[tuple[Part, Bytes]] = []
    for part in batch:
        whole = part.buffer.nbytes // GRAIN_BYTES * GRAIN_BYTES
        if whole:
            buffers.append(part.buffer[:whole])
        if part.padding:
            tails.append((part, next(pages)))
            buffers.append(tails[-1][1])
    return buffers, tails
