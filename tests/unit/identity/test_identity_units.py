from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.identity.units import IMAGE_BIT, common_prefix, image_units, units_of
from parkd.types import ImageSpan
from tests.unit.identity.identity_fakes import SEEDED

A, B = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()
_UNITS = st.lists(st.integers(0, 3), max_size=40)


def test_units_equal_the_ids_where_there_is_no_image() -> None:
    ids = np.array([5, 0, 248_319], np.int64)
    assert units_of(ids).tolist() == [5, 0, 248_319]
    assert not units_of(ids).flags.writeable


def test_an_images_positions_tell_its_digest_and_offset_and_nothing_else() -> None:
    ids = np.arange(20, dtype=np.int64)
    other_placeholders = ids.copy()
    other_placeholders[3:15] = 7
    span = ImageSpan(3, 15, A)
    units = units_of(ids, [span])
    assert (units[3:15] & IMAGE_BIT).all()
    assert not (np.delete(units, range(3, 15)) & IMAGE_BIT).any()
    assert len(set(units[3:15].tolist())) == 12
    assert np.array_equal(units, units_of(other_placeholders, [span]))
    assert common_prefix(units, units_of(ids, [ImageSpan(3, 15, B)])) == 3
    assert ids[3] == 3, "the ids themselves stay"


def test_a_longer_image_begins_like_a_shorter_one_of_the_same_digest() -> None:
    assert np.array_equal(image_units(A, 30)[:11], image_units(A, 11))
    assert not np.array_equal(image_units(A, 8)[:4], image_units(A, 8)[4:])


@pytest.mark.parametrize("spans", [[(3, 9), (8, 10)], [(15, 21)], [(4, 4)], [(6, 2)]])
def test_spans_that_overlap_or_leave_the_prompt_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="image span"):
        units_of(np.arange(20, dtype=np.int64), [ImageSpan(start, stop, A) for start, stop in spans])


def test_a_negative_id_is_refused_since_it_would_read_as_an_image() -> None:
    with pytest.raises(ValueError, match="negative"):
        units_of(np.array([1, -1], np.int64))


@SEEDED
@given(_UNITS, _UNITS)
def test_common_prefix_is_what_a_loop_counts(left: list[int], right: list[int]) -> None:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_prefix(np.array(left, np.uint64), np.array(right, np.uint64)) == count


@pytest.mark.parametrize("at", [0, 1, 255, 256, 257, 511, 512, 513, 8191, 8192, 8193, 16384, 19_999])
def test_common_prefix_at_the_edges_of_blocks_and_comparison_steps(at: int) -> None:
    units = np.arange(20_000, dtype=np.uint64)
    other = units.copy()
    other[at] += np.uint64(1)
    assert common_prefix(units, other) == at
    assert common_prefix(units, units[:at]) == at
