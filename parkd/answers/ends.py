"""Answers that may not end by themselves: `ignore_eos`, and `min_tokens` until there are so many.

The tokens that end an answer are masked, so nothing else about it changes: the others are drawn as they would be if
the model had no such token. So are those that open another's turn, behind which a model that cannot end its own goes on
as somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from parkd.errors import InvalidRequest
from parkd.types import TokenMask, ToolChoiceMode, TurnRequest


class HeldEnds:
    """A `TokenMask` for one answer: allows what `inner` allows, but no end token before `least_tokens`."""

    def __init__(
        self, end_token_ids: frozenset[int], vocab_size: int, least_tokens: int | None, inner: TokenMask | None
    ) -> None:
        """`least_tokens` is None for an answer that only its limit or a stop string ends."""
        self._ends = np.array(sorted(end_token_ids), dtype=np.int64)
        self._all = np.ones(vocab_size, dtype=np.bool_)
        self._open = self._all.copy()
        self._open[self._ends] = False
        self._left = least_tokens
        self._inner = inner

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Raises InvalidRequest if `inner` allows nothing but the end."""
        is_held = self._left is None or self._left > 0
        if self._inner is None:
            return self._open if is_held else self._all
        allowed = self._inner.allowed()
        if is_held:
            allowed = allowed & self._open[: len(allowed)]
            if not allowed.any():
                raise InvalidRequest(
                    f"The form of the answer is complete, and `min_tokens` asks for {self._left} more. Ask for fewer.",
                    param="min_tokens",
                )
        return allowed

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._left is not None:
            self._left -= 1


def opening_ids(
    openers: Iterable[str], control_tokens: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> frozenset[int]:
    """The first control token in each of the texts that open turns; nothing for those that are opened by text."""
    found: set[int] = set()
    for opener in openers:
        placed = [(opener.find(token), -len(token), token) for token in control_tokens if token and token in opener]
        if placed:
            ids = encode(min(placed)[2])
            found.update(ids if len(ids) == 1 else ())
    return frozenset(found)


def with_ends_held(
    request: TurnRequest, end_token_ids: frozenset[int], vocab_size: int, inner: TokenMask | None
) -> TokenMask | None:
    """The mask that holds back the end as the request asks, on top of `inner`; `inner` itself if it does not.
    `end_token_ids` are those that end a turn, or open another. Raises
    InvalidRequest for an answer that can never end and must have a form, which has an end."""
    sampling = request.sampling
    has_form = request.response_schema is not None or request.response_form is not None
    if sampling.ignore_eos and (
        has_form or request.tool_choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    ):
        raise InvalidRequest(
            "`ignore_eos` contradicts a form of the answer or a forced call, which has an end. Send one of them.",
            param="ignore_eos",
        )
    if not sampling.ignore_eos and not sampling.min_tokens:
        return inner
    return HeldEnds(end_token_ids, vocab_size, None if sampling.ignore_eos else sampling.min_tokens, inner)
