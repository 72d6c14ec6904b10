"""Text in which control tokens are only letters, tokenised by llama.cpp, in process or over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol


class Tokens(Protocol):
    """llama.cpp's function from text to ids."""

    def __call__(self, text: str, *, parse_special: bool) -> list[int]: ...


def encode_parts_with(
    tokens: Tokens, decode: Callable[[Sequence[int]], str], parts: Sequence[str], control: frozenset[str]
) -> list[int]:
    """As `Tokenizer.encode_parts`.

    llama.cpp recognises tokens that a model's author defined for text (`<tool_call>` of Qwen) even if special ones are
    not to be parsed. Such a one is broken after its first character, unless the vocabulary would then add a space.
    """
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place % 2:
            ids += tokens(part, parse_special=True)
        elif part:
            ids += _as_letters(tokens, decode, part, control)
    return ids


def _as_letters(
    tokens: Tokens, decode: Callable[[Sequence[int]], str], text: str, control: frozenset[str]
) -> list[int]:
    whole = tokens(text, parse_special=False)
    present = [token for token in control if token in text]
    recognised = {tuple(tokens(token, parse_special=False)) for token in present}
    single = {ids[0] for ids in recognised if len(ids) == 1}
    if not single & set(whole):
        return whole
    pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
    cuts = [found.start() + 1 for found in pattern.finditer(text)]
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    broken = [token_id for piece in pieces if piece for token_id in tokens(piece, parse_special=False)]
    return broken if decode(broken) == decode(whole) else whole
