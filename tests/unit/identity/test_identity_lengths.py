"""A text that is far too long is refused while little of it is tokenised; any other is left to be counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parkd.errors import ContextOverflow
from parkd.identity import lengths
from parkd.identity.lengths import LEAST_CHARS, PIECE_CHARS, check_length
from tests.unit.identity.identity_fakes import make_builder, say, talk


class Letters:
    """A token a character."""

    special_tokens: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()

    def __init__(self, chars_a_token: int = 1) -> None:
        self.chars_a_token = chars_a_token
        self.longest = 0
        self.seen = 0

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        self.seen += len(text)
        return [0] * (len(text) // self.chars_a_token)

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        return self.encode("".join(parts))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)


def test_it_is_told_by_the_first_pieces_and_by_how_much() -> None:
    letters = Letters()
    with pytest.raises(ContextOverflow) as refused:
        check_length(letters, "x" * (40 * LEAST_CHARS), 100_000)
    assert letters.longest == PIECE_CHARS
    assert letters.seen < 2 * 100_000 + 2 * PIECE_CHARS
    assert refused.value.prompt_tokens == 40 * LEAST_CHARS
    assert refused.value.context_tokens == 100_000


@pytest.mark.parametrize("count", [LEAST_CHARS, lengths.CHARS_A_TOKEN * 1_000_000])
def test_texts_that_are_not_long_for_the_context_are_not_counted(count: int) -> None:
    letters = Letters()
    check_length(letters, "x" * count, count // lengths.CHARS_A_TOKEN)
    assert letters.seen == 0


def test_long_texts_of_few_tokens_pass() -> None:
    """Whether they fit is for the exact count to say."""
    letters = Letters(chars_a_token=32)
    check_length(letters, "x" * (2 * LEAST_CHARS), LEAST_CHARS // 32)
    assert letters.seen == 2 * LEAST_CHARS


def test_a_builder_that_knows_the_context_refuses_before_it_tokenises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "LEAST_CHARS", 1000)
    long = talk(say("user", "one two " * 1000))
    assert len(make_builder().build(long)) > 2000
    with pytest.raises(ContextOverflow):
        make_builder(context_tokens=100).build(long)
    assert len(make_builder(context_tokens=10_000).build(long)) > 2000
