"""The tokenizer of a loaded model, as the library's fast tokenizer provides it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from parkd.errors import ModelError
from parkd.words.text import ANSWER_MARKS, TextAssembler, TokenBytes
from parkd_engine.words.renamed import RenamedTokens
from parkd_engine.words.responses import ResponseTemplate


class ChatTokenizer:
    """Text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Any, *, declares: bool = True) -> None:
        """`tokenizer` is the library's. Raises ModelError if it is not a fast one. `declares`: whether to use its
        response template, if it has one."""
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError("The model has no fast tokenizer (tokenizer.json), which is needed.")
        self._backend = tokenizer.backend_tokenizer
        # Some files enable padding or truncation, which would change the prompt.
        self._backend.no_padding()
        self._backend.no_truncation()
        self.responses = ResponseTemplate.of(tokenizer) if declares else None
        """How to parse answers, if the model's files define it."""
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens: tuple[str, ...] = tuple(added[number].content for number in sorted(added))
        """Tokens that are matched in text before tokenization, in the order of their ids."""
        self.control_tokens: tuple[str, ...] = tuple(
            added[number].content for number in sorted(added) if added[number].special
        )
        """Those of them that the model's files call special."""
        self._renamed: RenamedTokens | None = None
        marks = frozenset() if self.responses is None else self.responses.marks(self.special_tokens)
        self._token_bytes = TokenBytes.of(self._backend, ANSWER_MARKS | marks)

    def encode(self, text: str) -> list[int]:
        # The batch method releases the interpreter lock.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        """Ids of a text in parts, in turns text in which no token of `control` is recognised, and one of `control`."""
        renamed = self._renamed
        if renamed is None or renamed.control != control:
            renamed = self._renamed = RenamedTokens(self._backend, control)
        return renamed.encode(parts)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def piece(self, token_id: int) -> bytes:
        """The bytes that the token writes; for a special token its text, and none outside the vocabulary."""
        return self._pieces[token_id]

    @cached_property
    def _pieces(self) -> TokenBytes:
        return TokenBytes.of(self._backend, frozenset(self.special_tokens))

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer's own rule puts before a text."""
        (plain,) = self._backend.encode_batch_fast(["a"], add_special_tokens=False)
        (opened,) = self._backend.encode_batch_fast(["a"], add_special_tokens=True)
        places = [place for place, token_id in enumerate(opened.ids) if token_id == plain.ids[0]]
        return tuple(opened.ids[: places[0]]) if places else ()

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        content: str = self._backend.to_str()
        return content

    def text(self) -> TextAssembler:
        """An assembler for the text of one answer."""
        return TextAssembler(self._token_bytes)
