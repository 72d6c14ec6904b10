"""From a portable file into the room that a store reserved for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from parkd.portable.header import PortableHeader
from parkd.portable.parts import PartReader, scratch_for
from parkd.private_files import private_opener
from parkd.state import (
    Bytes,
    Checksums,
    Recut,
    RowRun,
    StageLayout,
    StateFile,
    StateLayout,
    StateSizes,
    Sums,
    Transfer,
    part_sum,
)
from parkd.store.records import CaptureRequest


def request_for(
    header: PortableHeader, layout: StateLayout, key_digest: bytes, namespace: str, prefix_hashes: tuple[bytes, ...]
) -> CaptureRequest:
    """What the store is asked to make room for. Nothing of it descends from what is parked already."""
    sizes = None
    if header.sizes:
        sizes = StateSizes(header.sizes[0], header.sizes[1:])
    return CaptureRequest(
        key_digest=key_digest,
        units=header.units,
        prefix_hashes=prefix_hashes,
        lineage=(),
        layout_digest=layout.digest,
        checkpoints=header.positions,
        namespace=namespace,
        sizes=sizes,
        is_indivisible=True,
    )


def fill(
    file: BinaryIO, header: PortableHeader, transfer: Transfer, layout: StateLayout, recut: Recut | None
) -> Checksums:
    """Reads all parts into the buffers of a capture of the whole conversation. Every part is compared with its
    checksum before anything is made of it; those of another split are cut for `layout`, and get new checksums.

    Needs memory for one part of one stage beside the buffers. Raises DamagedFile, OSError, MemoryError.
    """
    reader = PartReader(file, header)
    if header.kind.is_file:
        state_file = transfer.stages[0].rows[0].file
        assert state_file is not None
        return _file_filled(reader, header, state_file)
    places = _places(header, layout, transfer)
    if recut is None or recut.is_same:
        for part, buffers in enumerate(places):
            for stage, buffer in enumerate(buffers):
                reader.into(part, stage, buffer)
        sums = header.sums if recut is None else _sums(layout.checksum, places)
    else:
        scratch = scratch_for(header)
        for part, buffers in enumerate(places):
            for buffer in buffers:
                buffer[:] = 0  # what was there before may be another conversation's
            for stage, size in enumerate(header.part_bytes(part)):
                reader.into(part, stage, scratch[:size])
                add = recut.add_rows if part < header.blocks else recut.add_fixed
                add(stage, scratch[:size], buffers)
        sums = _sums(layout.checksum, places)
    return Checksums(sums[: header.blocks], sums[header.blocks :])


def _sums(checksum: str, places: Sequence[Sequence[Bytes]]) -> Sums:
    sums = [[part_sum(checksum, buffer) for buffer in buffers] for buffers in places]
    return np.array(sums, dtype=np.uint64).reshape(len(places), len(places[0]))


def _places(header: PortableHeader, layout: StateLayout, transfer: Transfer) -> list[list[Bytes]]:
    """The buffers of every part, by stage."""
    places = []
    for block in range(header.blocks):
        start = block * header.block_tokens * (not header.kind.is_whole)
        places.append(
            [
                _rows(stage.rows, start, start + header.rows(block), header.block_tokens, known)
                for stage, known in zip(transfer.stages, layout.stages, strict=True)
            ]
        )
    fixed = zip(*(stage.fixed for stage in transfer.stages), strict=True)
    return [*places, *([part.buffer for part in stages] for stages in fixed)]


def _rows(runs: Sequence[RowRun], start: int, stop: int, block_tokens: int, stage: StageLayout) -> Bytes:
    """The buffer of a block's rows, which are all in one run."""
    run = next(run for run in runs if run.start <= start and stop <= run.stop)
    if (start, stop) == (run.start, run.stop):
        return run.buffer
    at = stage.block_bytes(start - run.start, (start - run.start) // block_tokens)
    return run.buffer[at : at + stage.block_bytes(stop - start)]


def _file_filled(reader: PartReader, header: PortableHeader, file: StateFile) -> Checksums:
    """Writes a state that stays in a file. If that fails, there is nothing at its path."""
    try:
        with open(file.path, "xb", opener=private_opener) as out:
            out.writelines(reader.pieces(0))
    except BaseException:
        with suppress(FileNotFoundError):
            file.path.unlink()
        raise
    sums = header.sums
    return Checksums(sums[:1], sums[1:], header.sizes[0])
