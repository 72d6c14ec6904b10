"""From what a store holds in memory into a portable file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from parkd.portable.header import PortableHeader
from parkd.portable.parts import SourcePart, write
from parkd.state import StateLayout
from parkd.store.records import Held


def header_of(
    held: Held, layout: StateLayout, block_tokens: int, *, fingerprint: bytes, steering: bytes, model: str
) -> PortableHeader:
    """The header of what is held, without sums. `layout` is the store's."""
    sizes: tuple[int, ...] = ()
    if layout.is_opaque:
        wholes = [stages[0].bytes for stages in held.blocks]
        sizes = (*wholes, *(stages[0].buffer.nbytes for stages in held.checkpoints))
    return PortableHeader(
        model=model,
        fingerprint=fingerprint,
        steering=steering,
        layout=layout,
        block_tokens=block_tokens,
        units=held.parked.units,
        positions=tuple(checkpoint.position for checkpoint in held.parked.checkpoints),
        sums=np.zeros((0, 0), dtype=np.uint64),
        sizes=sizes,
    )


def export(held: Held, header: PortableHeader, out: BinaryIO) -> PortableHeader:
    """Writes what is held to an empty file, and compares it with its checksums. Raises DamagedFile and OSError."""
    return write(out, header, _parts(held, header))


def _parts(held: Held, header: PortableHeader) -> Iterator[list[SourcePart]]:
    for number, (runs, sums) in enumerate(zip(held.blocks, held.block_sums, strict=True)):
        sizes = header.part_bytes(number)
        # A block may hold more rows than the conversation, if it was read from disk only in part.
        yield [
            SourcePart(run.buffer if run.file is None else run.file, int(value), size)
            for run, value, size in zip(runs, sums, sizes, strict=True)
        ]
    for parts, sums in zip(held.checkpoints, held.checkpoint_sums, strict=True):
        yield [SourcePart(part.buffer, int(value), part.buffer.nbytes) for part, value in zip(parts, sums, strict=True)]
