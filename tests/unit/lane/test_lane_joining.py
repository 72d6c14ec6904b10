"""Where a prompt can go on from what another turn reads, and whether to wait for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parkd.identity.chain import prefix_hashes
from parkd.identity.units import units_of
from parkd.lane.joining import LEAST_TOKENS, Joint, common_tokens, is_worth_waiting, joint
from parkd.state import StageLayout, StateLayout
from parkd.types import ConversationKey, PromptIdentity

ROWS = StateLayout((StageLayout(0, 1, 8, 0, b"d" * 16),), "xxh3-64")
FIXED = StateLayout((StageLayout(0, 1, 8, 64, b"d" * 16),), "xxh3-64")


def prompt(*token_ids: int, model: bytes = b"model") -> PromptIdentity:
    key = ConversationKey("", model, b"")
    ids = np.array(token_ids, dtype=np.int64)
    return PromptIdentity(key, ids, units_of(ids, ()), prefix_hashes(units_of(ids, ()), key.digest, 256))


def test_what_two_prompts_begin_with_is_of_use_but_for_the_last_token_of_the_one_that_reads() -> None:
    one = prompt(*range(600))
    assert common_tokens(prompt(*range(600)), one) == 599
    assert common_tokens(prompt(*range(700)), one) == 599
    assert common_tokens(prompt(*range(300), 7, 7), one) == 300
    assert common_tokens(prompt(*range(250), 7, 7), one) == 0, "less than a block"
    assert common_tokens(prompt(7, *range(1, 600)), one) == 0
    assert common_tokens(prompt(*range(600), model=b"another"), one) == 0


def test_rows_are_of_use_as_soon_as_they_are_read() -> None:
    one = prompt(*range(600))
    assert joint(one, 599, 320, (), ROWS) == Joint(320, 599)
    assert joint(one, 400, 500, (), ROWS) == Joint(400, 400)
    assert joint(replace(one, units=one.units[:300]), 300, 0, (), ROWS) == Joint(0, 299), "its last token is read"


def test_fixed_state_is_of_use_at_checkpoints() -> None:
    one = prompt(*range(600))
    assert joint(one, 599, 320, (100, 300, 599), FIXED) == Joint(300, 599)
    assert joint(one, 598, 320, (100, 300, 599), FIXED) == Joint(300, 300)
    assert joint(one, 90, 320, (100, 300, 599), FIXED) == Joint(0, 0)


@pytest.mark.parametrize(
    ("joints", "own", "waits"),
    [
        ([], 0, False),
        ([Joint(0, LEAST_TOKENS)], 0, True),
        ([Joint(0, LEAST_TOKENS)], 1, False),
        ([Joint(LEAST_TOKENS - 1, LEAST_TOKENS)], 0, True),
        ([Joint(LEAST_TOKENS, LEAST_TOKENS)], 0, False),
        ([Joint(1, 1), Joint(0, LEAST_TOKENS)], 0, False),
        ([Joint(0, LEAST_TOKENS, goes_on=False)], 0, False),
        ([Joint(500, 500), Joint(0, 600)], 0, False),
        ([Joint(500, 500, goes_on=False), Joint(0, 800)], 0, True),
        ([Joint(500, 500, goes_on=False), Joint(0, 800)], 600, False),
    ],
)
def test_who_gains_enough_waits(joints: list[Joint], own: int, waits: bool) -> None:
    assert is_worth_waiting(joints, own) is waits


def test_nobody_waits_for_what_is_read_sooner_than_it_is_restored() -> None:
    asked: list[tuple[int, int]] = []

    def saves(start: int, stop: int) -> bool:
        asked.append((start, stop))
        return False

    assert not is_worth_waiting([Joint(100, 900), Joint(70, 70)], 50, saves)
    assert asked == [(70, 900)]
