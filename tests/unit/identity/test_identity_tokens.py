from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.identity.cuts import cuttable_tokens, token_pattern
from parkd.identity.tokens import SegmentTokenizer
from tests.unit.identity.identity_fakes import SEEDED, WordTokenizer

_TOKENS = ("<|start|>", "<|end|>", "<tool>", "<t", "<tool>x")
_PIECES = st.lists(
    st.sampled_from([*_TOKENS, "a", " ", "\n", "<", "<|st", "word", "é", "tool>", "|>", "x"]), max_size=25
)
_MEMO = 1 << 20


class GreedyTokenizer(WordTokenizer):
    """Takes special tokens out leftmost-longest, as real ones do."""

    def __init__(self, special_tokens: Sequence[str] = _TOKENS) -> None:
        super().__init__(sorted(special_tokens, key=len, reverse=True))


class LookingBack(WordTokenizer):
    """`<tool>` swallows the white space before it: cutting there would change ids."""

    def __init__(self) -> None:
        super().__init__()
        self._special = re.compile(r"<\|start\|>|<\|end\|>|\s*<tool>")


class Parity(WordTokenizer):
    """The ids depend on the length of the whole text: nothing can be cut."""

    def encode(self, text: str) -> list[int]:
        return [token_id * 2 + len(text) % 2 for token_id in super().encode(text)]


@SEEDED
@given(st.lists(st.lists(_PIECES.map("".join), min_size=1, max_size=3).map("".join), min_size=1, max_size=12))
def test_ids_are_those_of_the_whole_text_whatever_came_before(texts: list[str]) -> None:
    tokenizer = GreedyTokenizer()
    for memo_bytes in (0, 2000, _MEMO):
        segments = SegmentTokenizer(tokenizer, memo_bytes)
        for text in texts:
            tokenised = segments.tokenise(text)
            assert tokenised.ids.tolist() == tokenizer.encode(text)
            pieces = zip(tokenised.cuts, tokenised.cuts[1:], tokenised.positions, tokenised.positions[1:], strict=False)
            for start, stop, first, last in pieces:
                assert tokenizer.encode(text[start:stop]) == tokenised.ids[first:last].tolist()
            assert segments.memo_bytes <= memo_bytes


@SEEDED
@given(st.lists(st.tuples(_PIECES, _PIECES), min_size=1, max_size=8), _PIECES)
def test_texts_that_fork_anywhere_keep_their_own_ids(forks: list[tuple[list[str], list[str]]], stem: list[str]) -> None:
    tokenizer = GreedyTokenizer()
    segments = SegmentTokenizer(tokenizer, _MEMO)
    trunk = "".join(stem)
    for grow, leave in forks:
        trunk += "".join(grow)
        for text in (trunk, trunk + "".join(leave), trunk[: len(trunk) // 2 + 3] + "".join(leave)):
            assert segments.tokenise(text).ids.tolist() == tokenizer.encode(text)


@SEEDED
@given(_PIECES.map("".join))
def test_the_pattern_finds_what_a_scan_for_the_longest_finds(text: str) -> None:
    found, at = [], 0
    while at < len(text):
        token = max((token for token in _TOKENS if text.startswith(token, at)), key=len, default="")
        if token:
            found.append((at, token))
        at += len(token) or 1
    assert [(match.start(), match[0]) for match in token_pattern(_TOKENS).finditer(text)] == found


def test_a_grown_text_encodes_its_new_pieces_only() -> None:
    tokenizer = WordTokenizer()
    segments = SegmentTokenizer(tokenizer, _MEMO)
    old = "".join(f"<|start|>user\nword {n}<|end|>\n" for n in range(50))
    segments.tokenise(old + "<|start|>assistant\n")
    tokenizer.texts_encoded.clear()
    segments.tokenise(old + "<|start|>assistant\nnew answer<|end|>\n<|start|>assistant\n")
    assert tokenizer.texts_encoded == ["<|start|>assistant\nnew answer"]
    segments.tokenise("<|start|>other<|end|>\n" + old)
    assert tokenizer.texts_encoded[1:] == ["<|start|>other"], "pieces are known wherever they stand"


def test_the_memo_lets_the_least_recent_pieces_go() -> None:
    tokenizer = WordTokenizer()
    segments = SegmentTokenizer(tokenizer, 3000)
    for number in range(40):
        segments.tokenise(f"{number}<|start|>kept<|start|>word{number}")
    tokenizer.texts_encoded.clear()
    segments.tokenise("<|end|>x<|start|>kept")
    segments.tokenise("<|end|>y<|start|>word0")
    assert tokenizer.texts_encoded == ["<|end|>x", "<|end|>y", "<|start|>word0"]


def test_a_token_that_looks_back_is_not_cut_at() -> None:
    tokenizer = LookingBack()
    assert cuttable_tokens(tokenizer) == {"<|start|>", "<|end|>"}
    segments = SegmentTokenizer(tokenizer, _MEMO)
    text = "a <|start|>b \n <tool>c <tool> <|end|>"
    assert segments.tokenise(text).ids.tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("tokenizer", [Parity(), WordTokenizer(special_tokens=())], ids=["unequal", "no tokens"])
def test_what_cannot_be_cut_is_tokenised_whole(tokenizer: WordTokenizer) -> None:
    segments = SegmentTokenizer(tokenizer, _MEMO)
    assert not segments.by_segment
    for text in ("a <|start|> b", "a <|start|> b c", "", "a <|start|> b"):
        assert segments.tokenise(text).ids.tolist() == tokenizer.encode(text)


def test_white_space_tokens_are_known_but_not_cut_at() -> None:
    tokenizer = WordTokenizer(special_tokens=("\n\n", "<|start|>"))
    assert cuttable_tokens(tokenizer) == {"<|start|>"}
    assert SegmentTokenizer(tokenizer, _MEMO).tokenise("a\n\nb<|start|>c\n\n").cuts == [0, 4, 16]


def test_a_position_inside_a_piece_is_as_far_as_the_head_alone_agrees() -> None:
    segments = SegmentTokenizer(WordTokenizer(), _MEMO)
    tokenised = segments.tokenise("<|start|>one two three<|end|>")
    assert segments.position_of(tokenised, 0) == 0
    assert segments.position_of(tokenised, len("<|start|>one two three")) == 4
    assert segments.position_of(tokenised, len("<|start|>one two")) == 3
    assert segments.position_of(tokenised, len("<|start|>one tw")) == 2
    assert segments.position_of(tokenised, len(tokenised.text)) == 5
