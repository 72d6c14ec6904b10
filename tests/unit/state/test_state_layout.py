"""The digest that names a layout in a park directory, and where state resumes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.state import Grain, Resume, StageLayout, StateLayout, last_exact

ROWS = StateLayout(
    (StageLayout(0, 3, 512, 0, bytes(range(16))), StageLayout(3, 8, 768, 4096, bytes(range(16, 32)))),
    "weighted-sum-64",
)
OPAQUE = StateLayout((StageLayout(0, 28, 1024, 65536, b"o" * 16),), "xxh3-64", Grain.OPAQUE)
FILE = StateLayout((StageLayout(0, 1, 2048, 1, b"f" * 16),), "xxh3-64", Grain.FILE)


@pytest.mark.parametrize(
    ("layout", "digest"),
    [
        (ROWS, "d86884303b62386268eaa1071d00f901"),
        (OPAQUE, "3c03cc30abb4d966596ec0e8ee25e9b0"),
        (FILE, "6de053aad5ca175319ca17d312a13793"),
    ],
)
def test_the_digests_of_park_directories_written_before_are_still_the_same(layout: StateLayout, digest: str) -> None:
    assert layout.digest.hex() == digest


def test_bytes_beside_the_rows_of_a_block_are_part_of_the_layout() -> None:
    plain, headed = (
        StateLayout((StageLayout(0, 3, 512, 0, b"x" * 16, head_bytes=head),), "xxh3-64") for head in (0, 24)
    )
    assert plain.digest != headed.digest
    assert [headed.stages[0].block_bytes(*asked) for asked in ((1,), (256,), (300, 2))] == [
        24 + 512,
        24 + 256 * 512,
        48 + 300 * 512,
    ]


@pytest.mark.parametrize("grain", Grain)
@pytest.mark.parametrize("fixed_bytes", [0, 1, 4096])
def test_state_without_fixed_state_resumes_anywhere_and_a_file_with_it_at_its_end(
    grain: Grain, fixed_bytes: int
) -> None:
    layout = StateLayout((StageLayout(0, 4, 64, fixed_bytes, b"s" * 16),), "xxh3-64", grain)
    expected = {Grain.ROWS: "at checkpoints", Grain.OPAQUE: "at checkpoints", Grain.FILE: "at the end"}[grain]
    assert layout.resume == (expected if fixed_bytes else "anywhere")
    assert layout.resume.needs_checkpoints == bool(fixed_bytes)


def test_one_stage_with_fixed_state_makes_the_whole_conversation_need_checkpoints() -> None:
    assert ROWS.resume is Resume.AT_CHECKPOINTS


@given(st.integers(0, 12), st.sets(st.integers(1, 12)), st.none() | st.integers(0, 12))
def test_the_last_exact_position_is_the_largest_that_may_be_cut_to(
    limit: int, checkpoints: set[int], floor: int | None
) -> None:
    exact = {0} | checkpoints | (set() if floor is None else set(range(floor, 13)))
    assert last_exact(limit, checkpoints, floor) == max(place for place in exact if place <= limit)
