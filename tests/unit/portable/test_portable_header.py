"""The header of a portable conversation, against whatever else its bytes may be."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parkd.portable.header import (
    FIXED_BYTES,
    HEADER_LIMIT_BYTES,
    DamagedFile,
    PortableHeader,
    decode,
    encode,
    header_bytes,
    lengths,
)
from parkd.portable.parts import SourcePart, read_header, verify, write
from parkd.state import Grain, StageLayout, StateField, StateLayout, part_sum, stage_digest

FIXED = struct.Struct("<8s I I Q I I Q I I I I 16s 16s 16s I")
"""docs/FORMAT.md, "Portable conversation", written down a second time."""
NAMES = (
    *("magic", "version", "flags", "file_bytes", "header_bytes", "layout_bytes", "tokens", "block_tokens"),
    *("blocks", "checkpoints", "stages", "fingerprint", "layout_digest", "steering", "model_bytes"),
)


def layout_of(fixed: int = 2) -> StateLayout:
    row = (StateField("key", 0, "int8", (8,), 0),)
    state = (StateField("conv_0", 0, "float32", (fixed,), 0),) if fixed else ()
    first = StageLayout(0, 1, 8, fixed * 4, stage_digest(0, 1, row, state), row, state)
    last_row = (StateField("key", 1, "int8", (16,), 0),)
    return StateLayout((first, StageLayout(1, 2, 16, 0, stage_digest(1, 2, last_row, ()), last_row)), "xxh3-64")


HEADED = StateLayout((StageLayout(0, 2, 12, 0, b"h" * 16, head_bytes=100),), "xxh3-64")
OPAQUE = StateLayout((StageLayout(0, 2, 24, 8, b"o" * 16),), "xxh3-64", Grain.OPAQUE)


def header_of(layout: StateLayout | None = None, tokens: int = 21, **changes: Any) -> PortableHeader:
    layout = layout or layout_of()
    opaque = layout.is_opaque
    positions = () if not layout.has_fixed_state else (3, tokens) if tokens <= 8 else (3, 8, tokens)
    blocks = 1 if opaque else -(-tokens // 8)
    given: dict[str, Any] = {
        "model": "tiny",
        "fingerprint": b"f" * 16,
        "steering": b"",
        "layout": layout,
        "block_tokens": 8,
        "units": np.arange(tokens, dtype=np.uint64),
        "positions": positions,
        "sums": np.arange((blocks + len(positions)) * len(layout.stages), dtype=np.uint64).reshape(
            -1, len(layout.stages)
        ),
        "sizes": (500, 40, 48, 0) if opaque else (),
    }
    return PortableHeader(**{**given, **changes})


def test_the_first_bytes_are_those_of_the_format_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "FORMAT.md").read_text().partition("## Portable conversation")[2]
    rows = re.findall(r"^\| (\d+) \| (8 bytes|16 bytes|u32|u64) \|", page, re.MULTILINE)
    codes = {"8 bytes": "8s", "16 bytes": "16s", "u32": "I", "u64": "Q"}
    data = encode(header_of())
    described = [struct.unpack_from("<" + codes[kind], data, int(at))[0] for at, kind in rows]
    assert described == list(FIXED.unpack_from(data))
    seen = dict(zip(NAMES, FIXED.unpack_from(data), strict=True))
    assert (FIXED.size, FIXED_BYTES) == (108, 108)
    assert seen["magic"] == b"parkdCNV"
    assert (seen["version"], seen["flags"]) == (1, 1)
    assert seen["header_bytes"] == len(data)
    # 21 rows of 8 and 16 bytes, and three checkpoints of 8.
    assert seen["file_bytes"] == len(data) + 21 * 24 + 3 * 8
    assert (seen["tokens"], seen["block_tokens"], seen["blocks"], seen["checkpoints"]) == (21, 8, 3, 3)
    assert (seen["stages"], seen["model_bytes"], seen["steering"]) == (2, 4, bytes(16))
    assert data[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


@pytest.mark.parametrize(
    "header",
    [
        header_of(),
        header_of(layout_of(0)),
        header_of(tokens=8),
        header_of(steering=b"s" * 16, model=""),
        header_of(units=np.arange(21, dtype=np.uint64) | np.uint64(1 << 63)),
        header_of(OPAQUE),
        header_of(HEADED),
    ],
)
def test_a_header_comes_back(header: PortableHeader) -> None:
    data = encode(header)
    assert len(data) == header_bytes(header)
    again = decode(data)
    assert encode(again) == data
    assert again.units.tolist() == header.units.tolist()
    assert (again.model, again.steering, again.positions, again.sizes) == (
        header.model,
        header.steering,
        header.positions,
        header.sizes,
    )
    assert again.layout.digest == header.layout.digest


def test_blocks_with_bytes_beside_their_rows_have_them_in_the_file_and_are_not_cut() -> None:
    header = header_of(HEADED, tokens=11)
    assert [header.part_bytes(part) for part in range(2)] == [(100 + 8 * 12,), (100 + 3 * 12,)]
    whole = np.zeros(100 + 8 * 12, dtype=np.uint8)
    known = part_sum("xxh3-64", whole)
    parts = [[SourcePart(whole, known, whole.nbytes)], [SourcePart(whole, known, 100 + 3 * 12)]]
    with pytest.raises(DamagedFile, match="cannot be cut"):
        write(io.BytesIO(), header, parts)


def resealed(data: bytes) -> bytes:
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


def forged(header: PortableHeader | None = None, **changes: Any) -> bytes:
    """A header with other numbers in its first bytes, whose checksum is right."""
    data = encode(header or header_of())
    seen = dict(zip(NAMES, FIXED.unpack_from(data), strict=True))
    return resealed(FIXED.pack(*{**seen, **changes}.values()) + data[FIXED.size :])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode(header_of())[:50],
        encode(header_of())[:-1],
        encode(header_of()) + b"\0",
        encode(header_of())[:-1] + b"\xff",
        forged(magic=b"parkdMAN"),
        forged(version=2),
        forged(flags=1 | 8),
        forged(flags=0),
        forged(flags=1 | 2),
        forged(steering=b"s" * 16),
        forged(file_bytes=1 << 62),
        forged(file_bytes=10),
        forged(header_bytes=HEADER_LIMIT_BYTES + 1),
        forged(header_bytes=0),
        forged(layout_bytes=1 << 31),
        forged(tokens=0),
        forged(tokens=1 << 63),
        forged(tokens=22),
        forged(block_tokens=0),
        forged(block_tokens=(1 << 32) - 1),
        forged(block_tokens=4),
        forged(blocks=(1 << 32) - 1),
        forged(blocks=2, checkpoints=4),
        forged(checkpoints=0),
        forged(stages=0),
        forged(stages=1),
        forged(layout_digest=b"x" * 16),
        forged(model_bytes=257),
        encode(header_of(positions=(8, 3, 21))),
        encode(header_of(positions=(3, 8, 22))),
        encode(header_of(positions=(3, 8, 20))),
        encode(header_of(positions=(0, 8, 21))),
        encode(header_of(positions=(8, 8, 21))),
        encode(header_of(layout_of(0), positions=(21,), sums=np.zeros((4, 2), dtype=np.uint64))),
        encode(header_of(OPAQUE, sizes=(0, 40, 48, 0))),
        encode(header_of(OPAQUE, sizes=(500, 40, 48, 4))),
        encode(header_of(OPAQUE, sizes=(1 << 50, 40, 48, 0))),
        resealed(encode(header_of()).replace(b"tiny", b"\xff\xfe\xfd\xfc")),
        resealed(encode(header_of()).replace(b'"row_bytes":8', b'"row_bytes":0')),
    ],
)
def test_a_hostile_header_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode(data)


numbers = st.one_of(st.integers(0, 40), st.integers(0, (1 << 32) - 1))
wide = st.one_of(st.integers(0, 3000), st.integers(0, (1 << 64) - 1))


@settings(max_examples=400, deadline=500)
@given(st.data())
def test_whatever_its_numbers_are_nothing_is_made_of_them(data: st.DataObject) -> None:
    """A header with a right checksum and any numbers is refused at once, or is what would be written."""
    narrow = ("version", "flags", "header_bytes", "layout_bytes", "block_tokens", "blocks", "checkpoints", "stages")
    changed = {}
    for name in data.draw(st.lists(st.sampled_from((*narrow, "model_bytes", "file_bytes", "tokens")), max_size=4)):
        changed[name] = data.draw(wide if name in ("file_bytes", "tokens") else numbers)
    raw = bytearray(forged(data.draw(st.sampled_from([header_of(), header_of(OPAQUE)])), **changed))
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(FIXED_BYTES, len(raw) - 9))] = data.draw(st.integers(0, 255))
    sent = resealed(bytes(raw))
    try:
        header = decode(sent)
    except DamagedFile:
        return
    assert encode(header) == sent


@settings(max_examples=200, deadline=500)
@given(st.binary(max_size=400))
@example(b"parkdCNV" + bytes(200))
def test_any_bytes_are_refused(sent: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode(sent)
    with pytest.raises(DamagedFile):
        read_header(io.BytesIO(sent), len(sent))


def whole_file(header: PortableHeader) -> bytes:
    """A file with parts of random bytes."""
    random, parts = np.random.default_rng(1), []
    for part in range(header.parts):
        pieces = [random.integers(0, 256, size, dtype=np.uint8) for size in header.part_bytes(part)]
        parts.append([SourcePart(each, part_sum("xxh3-64", each), each.nbytes) for each in pieces])
    out = io.BytesIO()
    write(out, replace(header, sums=np.zeros((0, 0), dtype=np.uint64)), parts)
    return out.getvalue()


@pytest.mark.parametrize("header", [header_of(), header_of(layout_of(0)), header_of(OPAQUE)])
def test_every_changed_bit_is_noticed(header: PortableHeader) -> None:
    data = whole_file(header)
    assert lengths(data).file_bytes == len(data) == header.file_bytes
    verify(io.BytesIO(data), read_header(io.BytesIO(data), len(data)))
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        file = io.BytesIO(bytes(changed))
        with pytest.raises(DamagedFile):
            verify(file, read_header(file, len(data)))
    for cut in (*range(0, len(data), 50), len(data) - 1):
        with pytest.raises(DamagedFile):
            read_header(io.BytesIO(data[:cut]), cut)
    with pytest.raises(DamagedFile, match="has"):
        read_header(io.BytesIO(data + b"\0"), len(data) + 1)


def test_what_is_parked_is_compared_when_it_is_written() -> None:
    header = header_of(layout_of(0), tokens=8)
    good = [np.zeros(size, dtype=np.uint8) for size in header.part_bytes(0)]
    parts = [SourcePart(each, part_sum("xxh3-64", each), each.nbytes) for each in good]
    good[1][3] = 1
    with pytest.raises(DamagedFile, match="what is parked"):
        write(io.BytesIO(), header, [parts])


def test_a_block_that_holds_more_rows_is_cut_after_it_was_compared() -> None:
    header = header_of(layout_of(0), tokens=5)
    more = [np.arange(8 * width, dtype=np.uint8) for width in (8, 16)]
    sizes = header.part_bytes(0)
    assert sizes == (40, 80)
    parts = [SourcePart(each, part_sum("xxh3-64", each), size) for each, size in zip(more, sizes, strict=True)]
    out = io.BytesIO()
    written = write(out, header, [parts])
    assert written.sums.tolist() == [[part_sum("xxh3-64", more[0][:40]), part_sum("xxh3-64", more[1][:80])]]
    verify(out, read_header(out, len(out.getvalue())))
