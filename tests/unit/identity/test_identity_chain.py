from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.identity import chain
from parkd.identity.chain import CHAINS_KEPT, ChainMemo, extend_hashes, prefix_hashes
from parkd.types import ConversationKey, Units
from tests.unit.identity.identity_fakes import SEEDED

KEY = ConversationKey("team", b"f" * 16).digest
BLOCK = 4


def _units(*values: int) -> Units:
    return np.array(values, np.uint64)


def test_hashes_are_the_keyed_chain_that_the_format_names() -> None:
    units = np.arange(11, dtype=np.uint64)
    first = blake2b(units[:4].astype("<u8").tobytes(), key=KEY, digest_size=16).digest()
    second = blake2b(units[4:8].astype("<u8").tobytes(), key=first, digest_size=16).digest()
    assert prefix_hashes(units, KEY, BLOCK) == (first, second)


@pytest.mark.parametrize(
    "other",
    [ConversationKey("other", b"f" * 16), ConversationKey("team", b"g" * 16), ConversationKey("team", b"f" * 16, b"s")],
    ids=["namespace", "fingerprint", "steering"],
)
def test_every_part_of_the_key_changes_every_hash(other: ConversationKey) -> None:
    units = np.arange(16, dtype=np.uint64)
    assert other.digest != KEY
    assert not set(prefix_hashes(units, KEY, BLOCK)) & set(prefix_hashes(units, other.digest, BLOCK))


def test_parts_of_the_key_do_not_run_into_each_other() -> None:
    assert ConversationKey("ab", b"c").digest != ConversationKey("a", b"bc").digest


@pytest.mark.parametrize(("changed", "shared"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_a_changed_unit_changes_its_block_and_all_after_it(changed: int, shared: int) -> None:
    units = np.arange(16, dtype=np.uint64)
    other = units.copy()
    other[changed] += np.uint64(1)
    pairs = list(zip(prefix_hashes(units, KEY, BLOCK), prefix_hashes(other, KEY, BLOCK), strict=True))
    assert [a == b for a, b in pairs] == [True] * shared + [False] * (4 - shared)


def test_equal_blocks_behind_different_heads_have_different_hashes() -> None:
    a, b = _units(1, 1, 1, 1, 9, 9, 9, 9), _units(2, 2, 2, 2, 9, 9, 9, 9)
    assert prefix_hashes(a, KEY, BLOCK)[1] != prefix_hashes(b, KEY, BLOCK)[1]


@SEEDED
@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_extending_from_any_prefix_gives_the_hashes_of_the_whole(values: list[int], data: st.DataObject) -> None:
    units = _units(*values)
    cut = data.draw(st.integers(0, len(values)))
    previous = prefix_hashes(units[:cut], KEY, BLOCK)
    assert extend_hashes(previous, units, KEY, BLOCK) == prefix_hashes(units, KEY, BLOCK)


def test_more_hashes_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="more hashes"):
        extend_hashes((b"h" * 16,) * 2, _units(1, 2, 3, 4), KEY, BLOCK)


@SEEDED
@given(
    st.lists(
        st.tuples(st.sampled_from([KEY, b"k" * 16]), st.lists(st.integers(0, 1), max_size=24)), min_size=1, max_size=30
    ),
    st.sampled_from([0, 300, 1 << 20]),
)
def test_the_memo_never_changes_a_hash_and_keeps_its_bound(
    requests: list[tuple[bytes, list[int]]], limit_bytes: int
) -> None:
    memo = ChainMemo(BLOCK, limit_bytes)
    for key, values in requests:
        units = _units(*values)
        assert memo.hashes(units, key) == prefix_hashes(units, key, BLOCK)
        assert memo.memo_bytes <= limit_bytes


def test_the_memo_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(previous: tuple[bytes, ...], units: Units, key: bytes, block: int) -> tuple[bytes, ...]:
        hashed.append(len(units) // block - len(previous))
        return extend_hashes(previous, units, key, block)

    monkeypatch.setattr(chain, "extend_hashes", counting)
    memo = ChainMemo(BLOCK, 1 << 20)
    long = np.arange(400, dtype=np.uint64)
    fork = long.copy()
    fork[202:] += np.uint64(1)
    for units in (long[:200], long, long, fork, long):
        memo.hashes(units, KEY)
    assert hashed == [50, 50, 0, 50, 0]


def test_a_grown_chain_replaces_what_it_grew_from() -> None:
    memo = ChainMemo(BLOCK, 1 << 20)
    units = np.arange(4000, dtype=np.uint64)
    for stop in range(400, 4001, 400):
        memo.hashes(units[:stop], KEY)
    assert memo.memo_bytes < 3 * units.nbytes, "one chain, not ten"
    for number in range(CHAINS_KEPT + 5):
        memo.hashes(units[:4] + np.uint64(number + 1), KEY)
    assert memo.memo_bytes < 100 * (CHAINS_KEPT + 1), "the long one has left"
