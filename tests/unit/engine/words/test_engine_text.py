"""Ids to text without half characters, and stop strings wherever tokens are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parkd_engine.families.presets.words import tiny_tokenizer
from parkd_engine.words.chat import ChatTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from parkd.errors import ModelError
from parkd.words.text import TextAssembler, TokenBytes

SEED = 5


class Table:
    """A vocabulary that counts how often it is asked."""

    def __init__(self, tokens: dict[int, str]) -> None:
        self._tokens = tokens
        self.asked = 0

    def id_to_token(self, token_id: int) -> str | None:
        self.asked += 1
        return self._tokens.get(token_id)


BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel"}
LETTERS = Table({number: chr(number) for number in range(ord("a"), ord("z") + 1)})


def push_all(assembler: TextAssembler, ids: list[int], step: int = 1) -> str:
    """The concatenated pieces, fed `step` ids at a time."""
    pieces = [assembler.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return "".join(pieces) + assembler.flush()


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return tiny_tokenizer().backend_tokenizer


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: marked spaces, bytes for what is not in it."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghij", "\u2581", "\u2581a"]
    backend = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("\u2581", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40), step=st.integers(1, 4))
def test_pieces_join_to_the_decoded_text(tiny: Tokenizer, fallback: Tokenizer, text: str, step: int) -> None:
    for backend in (tiny, fallback):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert push_all(TextAssembler(TokenBytes.of(backend)), ids, step) == backend.decode(ids)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 511), max_size=30))
def test_any_ids_join_to_what_the_library_makes_of_them(tiny: Tokenizer, ids: list[int]) -> None:
    """Broken UTF-8 included: a model may say anything."""
    assert push_all(TextAssembler(TokenBytes.of(tiny)), ids) == tiny.decode(ids, skip_special_tokens=True)


def test_half_a_character_waits_for_the_other_half(tiny: Tokenizer) -> None:
    assembler = TextAssembler(TokenBytes.of(tiny))
    ids = tiny.encode("é🙂").ids
    assert [assembler.push([token]) for token in ids] == ["", "é", "", "", "", "🙂"]
    assert assembler.flush() == ""


def test_a_character_that_never_ends_is_replaced(tiny: Tokenizer) -> None:
    assembler = TextAssembler(TokenBytes.of(tiny))
    assert assembler.push(tiny.encode("🙂").ids[:-1]) == ""
    assert assembler.flush() == "\ufffd"


def test_special_and_unknown_tokens_say_nothing(tiny: Tokenizer) -> None:
    ids = [*tiny.encode("a<|im_end|>b").ids, 10**6]
    assert push_all(TextAssembler(TokenBytes.of(tiny)), ids) == "ab"


def test_a_leading_space_stays(fallback: Tokenizer, tiny: Tokenizer) -> None:
    for backend in (fallback, tiny):
        ids = backend.encode(" a").ids
        assert push_all(TextAssembler(TokenBytes.of(backend)), ids) == " a"


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match="WordPiece"):
        TokenBytes(LETTERS, {"type": "WordPiece"}, ())


def test_each_token_is_looked_up_once() -> None:
    """An answer's cost is linear: nothing already said is decoded again."""
    table = Table({97: "a"})
    assembler = TextAssembler(TokenBytes(table, BYTE_LEVEL, ()))
    assert push_all(assembler, [97] * 5000) == "a" * 5000
    assert table.asked == 1


class Library:
    """What `ChatTokenizer` uses of the library's tokenizer."""

    is_fast = True

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend


def test_pieces_are_bytes_also_of_special_tokens_and_halves_of_characters(tiny: Tokenizer, fallback: Tokenizer) -> None:
    """Found by use 32: joined pieces of "\u5abd \U0001f917" gave replacement marks."""
    text = "\u5abd \U0001f917"
    for backend in (tiny, fallback):
        words = ChatTokenizer(Library(backend), declares=False)
        pieces = [words.piece(token_id) for token_id in words.encode(text)]
        assert b"".join(pieces) == text.encode()
        assert any(not piece.isascii() and len(piece) < 3 for piece in pieces)
        assert words.piece(10**6) == b""
    words = ChatTokenizer(Library(tiny), declares=False)
    assert [words.piece(tiny.token_to_id(mark)) for mark in words.special_tokens] == [
        mark.encode() for mark in words.special_tokens
    ]
    assert words.special_tokens


def test_the_opening_tokens_are_those_of_the_tokenizers_own_rule(tiny: Tokenizer) -> None:
    assert ChatTokenizer(Library(tiny), declares=False).opening_ids == ()
    opened = Tokenizer.from_str(tiny.to_str())
    mark = ChatTokenizer(Library(tiny), declares=False).special_tokens[0]
    begins, closes = (mark, tiny.token_to_id(mark)), ("b", tiny.token_to_id("b"))
    opened.post_processor = processors.TemplateProcessing(f"{mark} $A b", special_tokens=[begins, closes])
    assert ChatTokenizer(Library(opened), declares=False).opening_ids == (begins[1],)
