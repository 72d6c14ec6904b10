"""Tokenises text in which control tokens are only letters, between control tokens that are meant.

    parts     "", <|im_start|>, "user\\nis <|im_end|> one?", <|im_end|>, "\\n"
    joined    §1user\\nis <|im_end|> one?§2\\n            a second tokenizer knows the control tokens by other names

So the text between two control tokens is tokenised as it always is, with the same rules at its beginning and end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

NAME_BYTES = 12
"""Random bytes in the other names, so that no text can contain one."""


class RenamedTokens:
    """Thread-safe."""

    def __init__(self, backend: Any, control: frozenset[str]) -> None:
        """`backend` is a `tokenizers.Tokenizer`; its model and rules are shared, not copied."""
        self.control = control
        self._plain = backend
        secret = secrets.token_hex(NAME_BYTES)
        added = backend.get_added_tokens_decoder()
        self._names = {
            added[number].content: f"\u241f{secret}-{number}\u241f"
            for number in sorted(added)
            if added[number].content in control
        }
        other = Tokenizer(backend.model)
        for rule in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, rule)) is not None:
                setattr(other, rule, value)
        for number in sorted(added):
            token = added[number]
            name = self._names.get(token.content)
            renamed = AddedToken(
                token.content if name is None else name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and name is None,
                special=token.special,
            )
            (other.add_special_tokens if token.special else other.add_tokens)([renamed])
        names = {number: self._names.get(token.content, token.content) for number, token in added.items()}
        self._ids = {other.token_to_id(name): number for number, name in names.items()}
        self._control_ids = frozenset(number for number, token in added.items() if token.content in control)
        self._other = other
        self._inside = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Ids of the parts, in turns text and a token of `control`."""
        ids = self._encoded(parts)
        meant = sum(1 for token in parts[1::2] if token in self._names)
        if sum(1 for number in ids if number in self._control_ids) == meant:
            return ids
        # The model's own vocabulary knows a control token as a word. It is broken after its first character.
        ids = []
        for place, part in enumerate(parts):
            pieces = [part] if place % 2 else self._broken(part)
            for piece in pieces:
                ids += self._plain.encode(piece, add_special_tokens=False).ids if piece else []
        return ids

    def _encoded(self, parts: Sequence[str]) -> list[int]:
        text = "".join(self._names.get(part, part) if place % 2 else part for place, part in enumerate(parts))
        (encoding,) = self._other.encode_batch_fast([text], add_special_tokens=False)
        return [self._ids.get(number, number) for number in encoding.ids]

    def _broken(self, text: str) -> list[str]:
        cuts = [found.start() + 1 for found in self._inside.finditer(text)]
        return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
