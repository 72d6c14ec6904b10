from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parkd.identity.chain import prefix_hashes
from parkd.identity.matcher import (
    common_prefix,
    divergence_of,
    resumable_position,
)
from parkd.identity.units import units_of
from parkd.state import Costs
from parkd.types import ConversationKey, ImageSpan, PromptIdentity
from tests.unit.identity.identity_fakes import SEEDED, ChatMl, WordTokenizer, make_builder, say, talk


def _oracle(common: int, prompt_len: int, rewindable: bool, checkpoints: Sequence[int]) -> int:
    """Tries every position from the last, which is the definition written down."""
    for position in range(prompt_len - 1, 0, -1):
        if position <= common and (rewindable or position in checkpoints):
            return position
    return 0


@SEEDED
@given(st.integers(0, 60), st.integers(0, 60), st.booleans(), st.lists(st.integers(0, 70), max_size=8))
@example(common=10, prompt_len=10, rewindable=True, checkpoints=[])
@example(common=10, prompt_len=10, rewindable=False, checkpoints=[10, 9])
@example(common=0, prompt_len=0, rewindable=True, checkpoints=[0])
def test_resumable_position_is_the_oracles(
    common: int, prompt_len: int, rewindable: bool, checkpoints: list[int]
) -> None:
    expected = _oracle(common, prompt_len, rewindable, checkpoints)
    assert resumable_position(common, prompt_len, 0 if rewindable else None, checkpoints) == expected


def test_two_prompts_that_share_193_of_241_tokens_switch_with_one_token_to_read() -> None:
    """Report 2: each of two prompts is known whole, so going back to one reads its last token only."""
    a = np.arange(241, dtype=np.uint64)
    b = a.copy()
    b[193:] += np.uint64(1000)
    assert common_prefix(a, b) == 193
    assert resumable_position(common_prefix(a, b), 241, 0, ()) == 193
    assert resumable_position(common_prefix(a, a), 241, 0, ()) == 240


@pytest.mark.parametrize("length", [2, 5, 255, 256, 257, 2047])
def test_a_short_prompt_is_reused_up_to_its_exact_length(length: int) -> None:
    """Report 18: no least length; and with fixed state the checkpoint at n - 1 is what counts."""
    units = np.arange(length, dtype=np.uint64)
    assert resumable_position(common_prefix(units, units), length, 0, ()) == length - 1
    assert resumable_position(common_prefix(units, units), length, None, (length - 1, length)) == length - 1
    grown = np.arange(length + 10, dtype=np.uint64)
    assert resumable_position(common_prefix(units, grown), length + 10, 0, ()) == length


def test_units_that_differ_under_equal_hashes_are_never_a_match() -> None:
    """Report 43: hashes find, comparison decides. A collision is injected: both records claim the same hashes."""
    ours, theirs = np.arange(64, dtype=np.uint64), np.arange(64, dtype=np.uint64)
    theirs[20] += np.uint64(1)
    key = ConversationKey("", b"f" * 16)
    claimed = prefix_hashes(ours, key.digest, 8)
    identity = PromptIdentity(key, ours.astype(np.int64), ours, claimed)
    colliding = PromptIdentity(key, theirs.astype(np.int64), theirs, claimed)
    assert identity.prefix_hashes == colliding.prefix_hashes
    assert common_prefix(identity.units, colliding.units) == 20


@SEEDED
@given(st.integers(0, 50), st.integers(0, 50))
def test_reading_costs_grow_with_depth_as_a_sum_over_tokens(start: int, stop: int) -> None:
    cost = Costs(read_s=2.0, read_growth_s=0.5)
    assert cost.reading_s(start, stop) == pytest.approx(sum(2.0 + 0.5 * token for token in range(start, stop)))


def test_a_divergence_names_the_token_its_text_and_its_message() -> None:
    """Report 23: a clock heads the prompt."""
    tokenizer = WordTokenizer()
    builder = make_builder(tokenizer)
    clock = "Be brief. The time is {}."
    old = builder.build(talk(say("system", clock.format("tenone")), say("user", "hello there")))
    new = builder.build(talk(say("system", clock.format("tentwo")), say("user", "hello there")))
    common = common_prefix(new.units, old.units)
    told = str(divergence_of(new, old.units, tokenizer))
    assert tokenizer.decode([int(new.token_ids[common])]) == " tentwo"
    assert told.startswith(f"token {common} in system is the first that differs: ' tentwo")
    assert "' tenone" in told
    later = builder.build(talk(say("system", clock.format("tenone")), say("user", "hello you")))
    assert "in message 2 (user)" in str(divergence_of(later, old.units, tokenizer))


def test_a_prefix_is_no_divergence_and_an_image_is_told_as_one() -> None:
    tokenizer = WordTokenizer()
    identity = make_builder(tokenizer, ChatMl()).build(talk(say("user", "one two three four")))
    assert divergence_of(identity, identity.units[:3], tokenizer) is None
    longer = np.append(identity.units, np.uint64(1))
    assert divergence_of(identity, longer, tokenizer) is None
    assert divergence_of(identity, identity.units, tokenizer) is None
    image = units_of(identity.token_ids.copy(), [ImageSpan(2, 5, hashlib.sha256(b"i").digest())])
    assert "where an image was known" in str(divergence_of(identity, image, tokenizer))
