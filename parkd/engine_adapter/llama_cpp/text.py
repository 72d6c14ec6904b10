"""Text and tokens by llama.cpp's own vocabulary, which defines the token ids of a GGUF model."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as low
from llguidance import LLTokenizer

from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.parts import encode_parts_with
from parkd.engine_adapter.rendered import RenderedTemplate
from parkd.errors import EngineFailure
from parkd.words.templates import ChatTemplate as EngineTemplate
from parkd.words.text import ANSWER_MARKS

_CUT_OUT = low.LLAMA_TOKEN_ATTR_CONTROL | low.LLAMA_TOKEN_ATTR_USER_DEFINED | low.LLAMA_TOKEN_ATTR_UNKNOWN
_STRIPS = low.LLAMA_TOKEN_ATTR_LSTRIP | low.LLAMA_TOKEN_ATTR_RSTRIP
_SILENT = low.LLAMA_TOKEN_ATTR_CONTROL | low.LLAMA_TOKEN_ATTR_UNKNOWN
_FIRST_PIECE_BYTES = 64


class LlamaTokenizer:
    """A `Tokenizer`. Thread-safe: the vocabulary never changes, and the library's look-ups keep no state."""

    def __init__(self, model: LlamaModel) -> None:
        self._vocab = model.vocab
        attributes = [low.llama_vocab_get_attr(model.vocab, token) for token in range(model.vocab_size)]
        cut_out = [token for token, attribute in enumerate(attributes) if attribute & _CUT_OUT]
        # If a special token consumes adjacent spaces, pieces cut there would tokenise differently: nothing is cut.
        strips = any(attributes[token] & _STRIPS for token in cut_out)
        texts = [self.piece(token).decode(errors="replace") for token in cut_out]
        self.special_tokens: tuple[str, ...] = () if strips else tuple(text for text in texts if text)
        silent = {text for token, text in zip(cut_out, texts, strict=True) if attributes[token] & _SILENT}
        self.control_tokens: tuple[str, ...] = tuple(text for text in texts if text in silent and text)

    def encode(self, text: str) -> list[int]:
        return self._tokens(text, parse_special=True)

    def encode_whole(self, text: str) -> list[int]:
        """With the tokens that the vocabulary puts around every text."""
        return self._tokens(text, parse_special=True, add_special=True)

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        return encode_parts_with(self._tokens, self.decode, parts, control)

    def _tokens(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = low.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
            if count >= 0:
                return list(tokens[:count])
            room = -count

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.piece(int(token)) for token in token_ids).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """The token's bytes, also for special tokens."""
        room = _FIRST_PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = low.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def grammar_tokenizer(self, vocab_size: int, end_token_ids: Sequence[int]) -> Any:
        """An `LLTokenizer` over the same vocabulary. Takes about a second."""
        # The same as in llguidance.llamacpp, without functions that the library has deprecated.
        tokens = [self.piece(token) for token in range(vocab_size)]
        for token, text in enumerate(tokens):
            attribute = low.llama_vocab_get_attr(self._vocab, token)
            is_mark = attribute & low.LLAMA_TOKEN_ATTR_USER_DEFINED and text[:1] == b"<" and text[-1:] == b">"
            if attribute & low.LLAMA_TOKEN_ATTR_CONTROL or is_mark:
                tokens[token] = b"\xff" + text  # llguidance's prefix for tokens that no text matches
        tokenize = ctypes.cast(low._lib.llama_tokenize, ctypes.c_void_p).value
        make: Any = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]
        return make(tokens=tokens, vocab_ptr=self._vocab, tokenize_fptr=tokenize, eos_token=list(end_token_ids))


class AnswerBytes:
    """The bytes that each token adds to an answer's text; none for tokens that are not text. Thread-safe."""

    def __init__(self, tokenizer: LlamaTokenizer, vocab: Any) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._tokenizer.piece(token)
            silent = low.llama_vocab_get_attr(self._vocab, token) & _SILENT
            if silent and known.decode(errors="replace") not in ANSWER_MARKS:
                known = b""
            self._known[token] = known
        return known


class _FileTemplate:
    """The attributes of a transformers tokenizer that the template renderer uses."""

    def __init__(self, source: str | None, special_tokens_map: Mapping[str, str]) -> None:
        self.chat_template = source
        self.special_tokens_map = dict(special_tokens_map)

    def get_chat_template(self, source: str | None, _tools: Any) -> str:
        chosen = source or self.chat_template
        if chosen is None:
            raise EngineFailure("There is no chat template.")
        return chosen


def model_template(model: LlamaModel, tokenizer: LlamaTokenizer) -> RenderedTemplate:
    """The template in the file, rendered like those of other models."""
    named = {
        "bos_token": low.llama_vocab_bos(model.vocab),
        "eos_token": low.llama_vocab_eos(model.vocab),
        "pad_token": low.llama_vocab_pad(model.vocab),
    }
    texts = {name: tokenizer.decode([token]) for name, token in named.items() if token >= 0}
    return RenderedTemplate(EngineTemplate(_FileTemplate(model.chat_template, texts), None))
