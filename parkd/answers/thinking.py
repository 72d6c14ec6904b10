"""Limits how long a model thinks: a budget in tokens, enforced while the answer is generated.

    <think> a b c | \n</think> |  the answer goes on
            budget used up: only these tokens are allowed

The forced tokens are sampled like any others, so they are in the state, in the ids of the answer and in its text, and
nothing else has to know about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from parkd.answers.base import ReasoningMarks
from parkd.answers.formats import opens_reasoning
from parkd.answers.reasoning import ReasoningSplitter
from parkd.engine_adapter.base import TextStream
from parkd.types import ReasoningParams, TokenMask, TurnRequest

EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}
"""Tokens of thinking for an effort, if the template does not use efforts. Other efforts have no limit."""


def budget_of(reasoning: ReasoningParams, *, template_knows_effort: bool) -> int | None:
    """Most tokens of thinking; None: no limit."""
    if reasoning.enabled is False:
        return 0
    if reasoning.budget_tokens is not None or template_knows_effort or reasoning.effort is None:
        return reasoning.budget_tokens
    return EFFORT_BUDGETS.get(reasoning.effort)


CHARACTER_BYTES = 4
"""The longest character in UTF-8. A thought that never completes one is not waited for any longer."""


class ThinkingLimits:
    """Makes the masks that enforce thinking budgets for one model. Thread-safe."""

    def __init__(
        self,
        marks: ReasoningMarks | None,
        template_source: str | None,
        vocab_size: int,
        encode: Callable[[str], Sequence[int]],
        text_stream: Callable[[], TextStream],
    ) -> None:
        """`marks` is None for a model without thinking, where nothing is limited."""
        self._marks = marks
        self._template_knows_effort = "reasoning_effort" in (template_source or "")
        self._vocab_size = vocab_size
        self._encode = encode
        self._text_stream = text_stream

    def over(self, request: TurnRequest, prompt_tail: str, inner: TokenMask | None) -> TokenMask | None:
        """The mask that enforces the request's budget on top of `inner`; `inner` itself if there is no budget."""
        marks = self._marks
        budget = budget_of(request.reasoning, template_knows_effort=self._template_knows_effort)
        if marks is None or budget is None or request.prompt is not None:
            return inner
        close = f"\n{marks.close}" if marks.close.startswith("</") else marks.close
        splitter = ReasoningSplitter(marks, opened=opens_reasoning(prompt_tail, marks))
        return ThinkingBudget(budget, self._encode(close), splitter, self._text_stream(), self._vocab_size, inner)


class ThinkingBudget:
    """A `TokenMask` for one answer: allows what `inner` allows, until the budget of thinking is used up. The end of
    thinking is forced as soon as the last character is whole and `inner` allows it, which may be a few tokens later."""

    def __init__(
        self,
        budget_tokens: int,
        close_ids: Sequence[int],
        splitter: ReasoningSplitter,
        stream: TextStream,
        vocab_size: int,
        inner: TokenMask | None,
    ) -> None:
        self._left = budget_tokens
        self._close_ids = close_ids
        self._splitter: ReasoningSplitter | None = splitter
        """None once thinking is over."""
        self._stream = stream
        self._inner = inner
        self._vocab_size = vocab_size
        self._all = np.ones(vocab_size, dtype=np.bool_)
        self._forced: deque[int] = deque()
        self._force_if_due()

    def allowed(self) -> npt.NDArray[np.bool_]:
        allowed = self._all if self._inner is None else self._inner.allowed()
        if self._forced and allowed[self._forced[0]]:
            only = np.zeros(self._vocab_size, dtype=np.bool_)
            only[self._forced[0]] = True
            return only
        return allowed

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._splitter is None:
            return
        was_thinking = self._splitter.thinking
        begun = bool(self._splitter.push(self._stream.push([token_id])).body)
        self._left -= was_thinking
        closed = False
        if self._forced and self._forced[0] == token_id:
            self._forced.popleft()
            closed = not self._forced
        else:
            self._forced.clear()
        if closed or begun or (was_thinking and not self._splitter.thinking):
            self._splitter = None
            self._forced.clear()
        elif not self._forced:
            self._force_if_due()

    def _force_if_due(self) -> None:
        """Begins to force the end of thinking, unless a character is incomplete: neither a grammar nor a client's
        decoder takes another token in its place."""
        if self._splitter is None or not self._splitter.thinking or self._left > 0:
            return
        if self._left > -CHARACTER_BYTES and self._stream.mid_character:
            return
        if self._inner is None or self._inner.allowed()[self._close_ids[0]]:
            self._forced.extend(self._close_ids)
