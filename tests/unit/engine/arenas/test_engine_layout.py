"""Rows, fields and digests."""

from __future__ import annotations

import pytest
import torch
from parkd_engine.arenas import arena as arena_module
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.layout import ROW_ALIGNMENT, build_layout

from parkd.errors import OutOfMemory
from parkd.state import StateLayout
from tests.unit.engine.kit.core_models import tiny_config
from tests.unit.engine.kit.hybrid_models import hybrid_config


def test_fields_lie_side_by_side_and_aligned() -> None:
    config = tiny_config(num_key_value_heads=3, head_dim=3)
    [layout] = build_layout(config, [(1, 3)], torch.bfloat16)
    assert [(field.layer, field.name) for field in layout.row_fields] == [
        (1, "key"),
        (1, "value"),
        (2, "key"),
        (2, "value"),
    ]
    assert [field.offset for field in layout.row_fields] == [0, 32, 64, 96]
    assert layout.row_fields[0].nbytes == 18
    assert layout.row_bytes == 128
    assert layout.row_bytes % ROW_ALIGNMENT == 0
    assert layout.fixed_bytes == 0


def test_digest_tells_dtype_split_and_shape_apart() -> None:
    base = tiny_config()
    variants = [
        build_layout(base, [(0, 4)], torch.float32),
        build_layout(base, [(0, 4)], torch.bfloat16),
        build_layout(base, [(0, 4)], torch.float16),
        build_layout(base, [(0, 2), (2, 4)], torch.float32),
        build_layout(base, [(0, 1), (1, 4)], torch.float32),
        build_layout(tiny_config(num_key_value_heads=1, head_dim=32), [(0, 4)], torch.float32),
        build_layout(tiny_config(num_hidden_layers=5), [(0, 5)], torch.float32),
    ]
    digests = [StateLayout(layouts, "xxh3-64").digest for layouts in variants]
    assert len(set(digests)) == len(variants)
    assert StateLayout(variants[0], "weighted-sum-64").digest not in digests
    assert StateLayout(build_layout(tiny_config(), [(0, 4)], torch.float32), "xxh3-64").digest == digests[0]


def test_the_digest_of_a_park_directory_written_before_is_still_the_engines() -> None:
    layouts = build_layout(tiny_config(), [(0, 1), (1, 4)], torch.float32)
    assert StateLayout(layouts, "xxh3-64").digest.hex() == "bc01eaeedffc68f495cafaa6c9c7f819"


def test_a_field_view_is_the_rows_themselves() -> None:
    [layout] = build_layout(tiny_config(), [(0, 2)], torch.float32)
    arena = StageArena(layout, 7, "cpu")
    arena.rows.zero_()
    field = layout.row_fields[3]
    view = arena.field_view(field)
    assert view.shape == (7, *field.shape)
    view[5] = 1.5
    written = arena.rows[5, field.offset : field.offset + field.nbytes].view(torch.float32)
    assert (written == 1.5).all()
    assert int(arena.rows.count_nonzero()) == int(arena.rows[5, field.offset :].count_nonzero())


def test_an_arena_too_large_names_the_context_that_fits() -> None:
    [layout] = build_layout(tiny_config(), [(0, 4)], torch.float32)
    room = 100 * layout.row_bytes + 5
    with pytest.raises(OutOfMemory, match=r"context of 101 tokens\. About 100 tokens would fit"):
        StageArena(layout, 101, "cpu", free=lambda device: room)
    assert StageArena(layout, 100, "cpu", free=lambda device: room).nbytes == 100 * layout.row_bytes


def test_an_allocator_that_fails_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    [layout] = build_layout(tiny_config(), [(0, 4)], torch.float32)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(OutOfMemory):
        StageArena(layout, 10, "cpu")


@pytest.mark.parametrize(
    ("family", "digests"),
    [
        ("gemma3", ("ebf2eb8cada0f6a0cdc85c1de4402f3d", "7916a89d3ba0799673fa77dee91beb5c")),
        ("qwen3.5-mtp", ("91ed6a6a376b8135008802b61fad1018", "1e9de11ee62dee3a1395abd3689fe106")),
        ("qwen4-exp-vl", ("a175932556d64d814886ff50fe8c17d1", "76c014e8e12565af06afcb42cd97a78a")),
    ],
)
def test_park_directories_of_earlier_versions_are_still_of_this_layout(family: str, digests: tuple[str, str]) -> None:
    """Written down when directories did not yet describe their layouts."""
    layouts = build_layout(hybrid_config(family), ((0, 2), (2, 4)), torch.float32)
    assert tuple(layout.digest.hex() for layout in layouts) == digests


@pytest.mark.parametrize(("start", "base"), [(16, 13), (13, 16), (3, 30), (30, 3), (5, 5)])
@pytest.mark.parametrize("rows_at_once", [1, 3, 10, 100])
def test_rows_move_inside_the_arena_also_over_themselves(
    start: int, base: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    [layout] = build_layout(tiny_config(), [(0, 1)], torch.float32)
    arena = StageArena(layout, 50, "cpu", row_tokens=50)
    monkeypatch.setattr(arena_module, "MOVED_BYTES", rows_at_once * layout.row_bytes + 1)
    arena.all_rows.copy_(torch.arange(50).unsqueeze(1).expand_as(arena.all_rows))
    arena.move_to(start)
    arena.copy_rows(11, base)
    assert arena.all_rows[base : base + 11, 0].tolist() == list(range(start, start + 11))
    others = [row for row in range(50) if not base <= row < base + 11]
    assert arena.all_rows[others, -1].tolist() == others, "nothing else changes"
