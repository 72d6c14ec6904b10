"""From a file into the buffers of a capture: as it is, with other checksums, and cut for another split."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from parkd.errors import ConversationUnfit
from parkd.portable.fitting import is_plain, recut_for
from parkd.portable.header import DamagedFile, PortableHeader
from parkd.portable.landing import fill
from parkd.portable.parts import SourcePart, write
from parkd.state import Bytes, FixedPart, RowRun, StageTransfer, StateLayout, Transfer, part_sum
from tests.unit.state.split_layouts import LAYERS, WIDTHS, layout_of

TOKENS, BLOCK = 11, 4


def state_of(layout: StateLayout) -> tuple[list[Bytes], list[Bytes]]:
    """Rows and fixed state of each stage, whose bytes tell layer, row and place, in every split alike."""
    rows, fixed = [], []
    for stage in layout.stages:
        part = np.zeros((TOKENS, stage.row_bytes), dtype=np.uint8)
        for field in stage.row_fields:
            layer = 99 if field.is_shared else field.layer
            for row in range(TOKENS):
                part[row, field.offset : field.offset + field.nbytes] = (
                    layer * 31 + row * 7 + np.arange(field.nbytes)
                ) % 251
        rows.append(part.reshape(-1))
        once = np.zeros(stage.fixed_bytes, dtype=np.uint8)
        for field in stage.fixed_fields:
            once[field.offset : field.offset + field.nbytes] = (field.layer * 17 + np.arange(field.nbytes)) % 251
        fixed.append(once)
    return rows, fixed


def file_of(layout: StateLayout) -> tuple[io.BytesIO, PortableHeader]:
    header = PortableHeader(
        "tiny",
        b"f" * 16,
        b"",
        layout,
        BLOCK,
        np.arange(TOKENS, dtype=np.uint64),
        (TOKENS,),
        np.zeros((0, 0), np.uint64),
    )
    rows, fixed = state_of(layout)
    parts = []
    for block in range(header.blocks):
        first = block * BLOCK
        pieces = [
            part[first * stage.row_bytes : (first + header.rows(block)) * stage.row_bytes]
            for part, stage in zip(rows, layout.stages, strict=True)
        ]
        parts.append([SourcePart(each, part_sum(layout.checksum, each), each.nbytes) for each in pieces])
    parts.append([SourcePart(each, part_sum(layout.checksum, each), each.nbytes) for each in fixed])
    out = io.BytesIO()
    return out, write(out, header, parts)


def transfer_for(layout: StateLayout, *, cut_at: int) -> Transfer:
    """Buffers with another conversation's bytes, in two runs, as memory may have them."""
    stages = []
    for stage in layout.stages:
        runs = tuple(
            RowRun(start, stop, np.full((stop - start) * stage.row_bytes, 0xEE, dtype=np.uint8))
            for start, stop in ((0, cut_at), (cut_at, TOKENS))
        )
        stages.append(StageTransfer(runs, (FixedPart(TOKENS, np.full(stage.fixed_bytes, 0xEE, dtype=np.uint8)),)))
    return Transfer(layout.digest, 0, TOKENS, BLOCK, tuple(stages))


@pytest.mark.parametrize("cut_at", [4, 8])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (layout_of(2), layout_of(2)),
        (layout_of(2), layout_of(2, checksum="weighted-sum-64")),
        (layout_of(2, checksum="weighted-sum-64"), layout_of(1, 3)),
        (layout_of(), layout_of(1, 2, 3, 4, checksum="weighted-sum-64")),
        (layout_of(1, 2, 3, 4), layout_of()),
    ],
)
def test_everything_lands_where_the_layout_here_has_it(there: StateLayout, here: StateLayout, cut_at: int) -> None:
    file, header = file_of(there)
    transfer = transfer_for(here, cut_at=cut_at)
    recut = recut_for(header, here, b"f" * 16, BLOCK)
    assert (recut is None) == (there.digest == here.digest)
    sums = fill(file, header, transfer, here, recut)
    rows, fixed = state_of(here)
    for number, (moved, stage) in enumerate(zip(transfer.stages, here.stages, strict=True)):
        assert np.array_equal(np.concatenate([run.buffer for run in moved.rows]), rows[number])
        assert np.array_equal(moved.fixed[0].buffer, fixed[number])
        assert int(sums.fixed[0, number]) == part_sum(here.checksum, fixed[number])
        for block, first in enumerate(range(0, TOKENS, BLOCK)):
            part = rows[number][first * stage.row_bytes : (first + BLOCK) * stage.row_bytes]
            assert int(sums.rows[block, number]) == part_sum(here.checksum, part)


@pytest.mark.parametrize("here", [layout_of(2), layout_of(1, 3)])
def test_a_part_that_changed_since_is_noticed(here: StateLayout) -> None:
    file, header = file_of(layout_of(2))
    content = bytearray(file.getvalue())
    content[-3] ^= 1
    recut = recut_for(header, here, b"f" * 16, BLOCK)
    with pytest.raises(DamagedFile, match=f"checkpoint at {TOKENS}"):
        fill(io.BytesIO(bytes(content)), header, transfer_for(here, cut_at=4), here, recut)
    with pytest.raises(DamagedFile, match="ends"):
        fill(io.BytesIO(bytes(content[:-1])), header, transfer_for(here, cut_at=4), here, recut)


def test_what_does_not_fit_is_said() -> None:
    _, header = file_of(layout_of(2))
    with pytest.raises(ConversationUnfit, match=r"other weights.*of tiny"):
        recut_for(header, layout_of(2), b"g" * 16, BLOCK)
    with pytest.raises(ConversationUnfit, match="blocks of 4 tokens"):
        recut_for(header, layout_of(2), b"f" * 16, 256)
    wider = layout_of(2)
    last = wider.stages[-1]
    other = replace(wider, stages=(*wider.stages[:-1], replace(last, end_layer=LAYERS + 1)))
    with pytest.raises(ConversationUnfit, match="layers 0 to 4"):
        recut_for(header, other, b"f" * 16, BLOCK)


def test_only_numbers_are_plain() -> None:
    assert not is_plain(layout_of(2)), "its positions may be places in memory"
    numbers = StateLayout(
        tuple(
            replace(stage, row_fields=tuple(field for field in stage.row_fields if field.dtype_name == "int8"))
            for stage in layout_of(2).stages
        ),
        "xxh3-64",
    )
    assert is_plain(numbers)
    bare = StateLayout(tuple(replace(stage, row_fields=(), fixed_fields=()) for stage in numbers.stages), "xxh3-64")
    assert not is_plain(bare), "nobody says what it is"
    assert sum(WIDTHS) == sum(field.nbytes for stage in numbers.stages for field in stage.row_fields)
