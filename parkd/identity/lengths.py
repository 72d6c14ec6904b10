"""Refuses texts that are far too long for the context, without tokenising all of them.

Tokenising takes about 200 bytes of memory per token. For a huge file that an agent puts into a prompt by mistake, that
may be more than the machine has. So the tokens of a long text are counted piece by piece, until it is certain that they
do not fit.

    text   |--64 Ki--|--64 Ki--|--- not read ------|
    tokens |  n of it          | > twice the context: refused
"""

from __future__ import annotations

from parkd.engine_adapter.base import Tokenizer
from parkd.errors import ContextOverflow
from parkd.types import StillWanted, always_wanted

LEAST_CHARS = 1 << 20
"""Shorter texts are never counted: they take little memory, and the tokens of most are cached."""
CHARS_A_TOKEN = 8
"""About twice the usual number, so that texts that fit are hardly ever counted."""
PIECE_CHARS = 64 * 1024
CERTAIN_CONTEXTS = 2
"""Refuses a text only with this many times the context's tokens. Cutting at the end of a piece may split a token, and
changes how a long run without spaces is tokenised, but that changes the count by far less than this factor."""


def check_messages(count: int, context_tokens: int) -> None:
    """Raises ContextOverflow for more than twice as many messages as tokens fit, before they are rendered: that takes
    ten seconds for as many as a body can have, and each is at least a token."""
    if count > CERTAIN_CONTEXTS * context_tokens:
        raise ContextOverflow(count, 0, context_tokens)


def check_length(
    tokenizer: Tokenizer, text: str, context_tokens: int, still_wanted: StillWanted = always_wanted
) -> None:
    """Raises ContextOverflow, with an estimate of the prompt's tokens, if `text` has more than twice as many as fit."""
    if len(text) <= max(LEAST_CHARS, CHARS_A_TOKEN * context_tokens):
        return
    counted = 0
    for start in range(0, len(text), PIECE_CHARS):
        still_wanted()
        stop = min(start + PIECE_CHARS, len(text))
        counted += len(tokenizer.encode(text[start:stop]))
        if counted > CERTAIN_CONTEXTS * context_tokens:
            raise ContextOverflow(counted * len(text) // stop, 0, context_tokens)
