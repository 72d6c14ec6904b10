"""What a layout says of itself, what is made of another split's parts, and the sums of parts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from parkd_engine.moves.checksum import WeightedSum

from parkd.state import (
    DamagedLayout,
    Grain,
    OtherState,
    StageLayout,
    StateField,
    StateLayout,
    describe,
    layout_from,
    part_sum,
    recut_between,
    stage_digest,
)
from tests.unit.state.split_layouts import LAYERS, WIDTHS, layout_of


def rows_of(layout: StateLayout, rows: int) -> list[Any]:
    """Every byte tells its layer, its row and its place in the field; padding is 0."""
    parts = []
    for stage in layout.stages:
        part = np.zeros((rows, stage.row_bytes), dtype=np.uint8)
        for field in stage.row_fields:
            layer = 200 if field.is_shared else field.layer * 16
            for row in range(rows):
                part[row, field.offset : field.offset + field.nbytes] = layer + row * 5 + np.arange(field.nbytes) % 3
        parts.append(part.reshape(-1))
    return parts


def test_rows_and_fixed_state_are_where_the_other_split_has_them() -> None:
    splits = [(), (2,), (1, 3), (1, 2, 3, 4), (4,), ()]
    assert recut_between(layout_of(3), layout_of(3)).is_same
    layouts = [layout_of(*split) for split in splits]
    for old, new in pairwise(layouts):
        recut = recut_between(old, new)
        assert not recut.is_same
        into = [np.zeros(3 * stage.row_bytes, dtype=np.uint8) for stage in new.stages]
        for stage, part in enumerate(rows_of(old, 3)):
            recut.add_rows(stage, part, into)
        assert [part.tolist() for part in into] == [part.tolist() for part in rows_of(new, 3)]
        fixed = [np.arange(stage.fixed_bytes, dtype=np.uint8) for stage in old.stages]
        moved = [np.zeros(stage.fixed_bytes, dtype=np.uint8) for stage in new.stages]
        for stage, part in enumerate(fixed):
            recut.add_fixed(stage, part, moved)
        assert sum(part.nbytes for part in moved) == WIDTHS[1] + WIDTHS[3]
        for number, stage in enumerate(new.stages):
            for field in stage.fixed_fields:
                source, there = next(
                    (n, f) for n, s in enumerate(old.stages) for f in s.fixed_fields if f.layer == field.layer
                )
                expected = fixed[source][there.offset : there.offset + there.nbytes]
                assert np.array_equal(moved[number][field.offset : field.offset + field.nbytes], expected)


@pytest.mark.parametrize(("first", "second"), [(0, 16), (16, 0)])
def test_fields_that_are_adjacent_in_one_layout_alone_are_copied_apart(first: int, second: int) -> None:
    def layout(key_at: int, value_at: int) -> StateLayout:
        fields = sorted(
            (StateField("key", 0, "int8", (8,), key_at), StateField("value", 0, "int8", (8,), value_at)),
            key=lambda field: field.offset,
        )
        return StateLayout((StageLayout(0, 1, 24, 0, stage_digest(0, 1, fields, ()), tuple(fields)),), "xxh3-64")

    row = np.arange(24, dtype=np.uint8)
    apart = np.zeros(24, dtype=np.uint8)
    recut_between(layout(0, 8), layout(first, second)).add_rows(0, row, [apart])
    assert apart[first : first + 8].tolist() == list(range(8))
    assert apart[second : second + 8].tolist() == list(range(8, 16))
    back = np.zeros(24, dtype=np.uint8)
    recut_between(layout(first, second), layout(0, 8)).add_rows(0, apart, [back])
    assert back[:16].tolist() == list(range(16))


def test_only_the_checksum_may_differ_too() -> None:
    recut = recut_between(layout_of(2), layout_of(2, checksum="weighted-sum-64"))
    assert recut.is_same


def test_states_that_nobody_describes_are_not_cut() -> None:
    plain = StateLayout((StageLayout(0, LAYERS, 64, 0, b"d" * 16),), "xxh3-64")
    with pytest.raises(OtherState, match="does not tell"):
        recut_between(plain, layout_of())
    headed = StateLayout(tuple(replace(stage, head_bytes=8) for stage in layout_of().stages), "xxh3-64")
    with pytest.raises(OtherState, match="beside their rows"):
        recut_between(headed, layout_of(2))
    opaque = StateLayout((StageLayout(0, LAYERS, 64, 0, b"d" * 16),), "xxh3-64", Grain.OPAQUE)
    with pytest.raises(OtherState, match="only its engine"):
        recut_between(opaque, layout_of())


@pytest.mark.parametrize("size", [0, 8, 4096, (1 << 20) + 8, 3 << 20])
def test_sums_are_those_that_engines_compute(size: int) -> None:
    part = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert part_sum("xxh3-64", part) == xxhash.xxh3_64_intdigest(part.tobytes())
    kind = WeightedSum()
    running = kind.start()
    if size:
        running.update(torch.from_numpy(part))
    assert part_sum("weighted-sum-64", part) == int(kind.values([running])[0])
    words = [int.from_bytes(part[at : at + 8].tobytes(), "little") for at in range(0, min(size, 4096), 8)]
    if size <= 4096:
        assert part_sum("weighted-sum-64", part) == sum(w * (2 * i + 1) for i, w in enumerate(words)) % 2**64


def test_other_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="no checksum"):
        part_sum("md5", np.zeros(8, dtype=np.uint8))
    with pytest.raises(ValueError, match="words"):
        part_sum("weighted-sum-64", np.zeros(9, dtype=np.uint8))


def changed(**changes: Any) -> bytes:
    """The description of a layout with something else in its first stage."""
    document = json.loads(describe(layout_of(2)))
    document["stages"][0].update(changes)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


FIELD = ["key", 0, "int8", [16], 0, False]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"stages":' + b"9" * 5000 + b"}",
        describe(layout_of(2)) + b" ",
        describe(layout_of(2)).replace(b'"grain":"rows"', b'"grain":"rows","more":1'),
        changed(row_bytes=0),
        changed(row_bytes=-8),
        changed(row_bytes=1 << 40),
        changed(row_bytes=65.0),
        changed(row_bytes=True),
        changed(layers=[0, 3]),
        changed(layers=[2, 0]),
        changed(digest="00" * 16),
        changed(digest="zz"),
        changed(row=[["key", 0, "int8", [16], 60, False]]),
        changed(row=[["key", 0, "object", [16], 0, False]]),
        changed(row=[["key", 7, "int8", [16], 0, False]]),
        changed(row=[["key", 0, "int8", [-1], 0, False]]),
        changed(row=[["key", 0, "int8", [1 << 39] * 8, 0, False]]),
        changed(row=[FIELD, FIELD]),
        changed(row=[["key", 0, "int8", [16], 0, 0]]),
        changed(row=[[7, 0, "int8", [16], 0, False]]),
    ],
)
def test_a_hostile_layout_is_refused(text: bytes) -> None:
    with pytest.raises(DamagedLayout):
        layout_from(text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_that_change_are_no_other_layout(data: st.DataObject) -> None:
    """What is accepted at all is exactly what would be written."""
    text = bytearray(describe(layout_of(2)))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        layout = layout_from(bytes(text))
    except DamagedLayout:
        return
    assert describe(layout) == bytes(text)
