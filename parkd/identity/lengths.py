"""Texts that are far too long for the context, told without tokenising them whole.

Tokenising takes some two hundred bytes of memory a token: of a large file that an agent put into a prompt by mistake,
more than many machines have. So a long text is counted a piece at a time, until it is plain that it cannot fit.

    text   |--64 Ki--|--64 Ki--|-- not looked at --|
    tokens |  n of it          | > twice the context: refused
"""

from __future__ import annotations

from parkd.engine_adapter.base import Tokenizer
from parkd.errors import ContextOverflow

LEAST_CHARS = 1 << 20
"""Shorter texts are never counted: what they take is small, and most are known already."""
CHARS_A_TOKEN = 8
"""About twice what texts have: a text that fits is hardly ever counted."""
PIECE_CHARS = 64 * 1024
CERTAIN_CONTEXTS = 2
"""A piece's edge splits a token, and what a tokenizer makes of a long run without a space depends on where it begins.
That changes the count by far less than this."""


def check_length(tokenizer: Tokenizer, text: str, context_tokens: int) -> None:
    """Raises ContextOverflow, with an estimate of the prompt's tokens, if `text` has over twice as many as fit."""
    if len(text) <= max(LEAST_CHARS, CHARS_A_TOKEN * context_tokens):
        return
    counted = 0
    for start in range(0, len(text), PIECE_CHARS):
        stop = min(start + PIECE_CHARS, len(text))
        counted += len(tokenizer.encode(text[start:stop]))
        if counted > CERTAIN_CONTEXTS * context_tokens:
            raise ContextOverflow(counted * len(text) // stop, 0, context_tokens)
