"""Samples the tokens of one answer: one for each step, or several with a draft head (speculative decoding).

    step     token t       -> guesses g1 g2                     the draft head
             t g1 g2       -> logits after each                 the model, in one forward pass
             g1 accepted, g2 rejected -> emitted: g1, and the model's token in place of g2
    state    holds t g1, as if g2 had never been read; the next step reads the last emitted token

Greedy answers equal those of single steps; sampled ones have the same distribution (`Sampler.judge`). Grammars and
penalties apply to the model's tokens, so no guess gets around them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from parkd.errors import LogitsNotFinite, NothingAllowed
from parkd.state import DraftCounts
from parkd.words.distribution import Distribution
from parkd.words.logprobs import TokenLogprobs, logprobs_of
from parkd_engine.draft.pace import DraftPace
from parkd_engine.session import Session
from parkd_engine.words.sampling import TensorSampler

Allowed = npt.NDArray[np.bool_]


class Mask(Protocol):
    """Constrains the next token, as a grammar does."""

    def allowed(self) -> Allowed: ...
    def accept(self, token_id: int) -> None: ...


class Decoder:
    """Decodes one answer at the end of a session's timeline. Each answer needs its own."""

    def __init__(
        self,
        session: Session,
        sampler: TensorSampler,
        *,
        mask: Mask | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        top_logprobs: int | None = None,
        step: Callable[[Session, int], torch.Tensor] = Session.step,
    ) -> None:
        """An accepted guess among `end_token_ids` ends its step: tokens after it are rarely wanted. With `top_logprobs`
        logprobs of every token are kept, with those of so many others. `step` decodes a token of a session without
        guesses, as `Session.step` does."""
        self._session = session
        self._plain_step = step
        self._sampler = sampler
        self._mask = mask
        self._end_token_ids = end_token_ids
        self._top_logprobs = top_logprobs
        self.logprobs: list[TokenLogprobs] = []
        """Of each token that `tokens` yielded, and of those that it will yield next; empty if not asked for."""
        self.counts = DraftCounts()
        self._pace = DraftPace() if session.draft_pauses else None
        self._next_id: int | None = None
        """The token that the next step reads; None: that is not known yet, or no longer."""
        self._ahead: torch.Tensor | None = None
        """The logits of the next step, if it was made ahead."""

    def tokens(self, last_token_id: int) -> Generator[int, None, None]:
        """Yields the answer's tokens; first reads `last_token_id`, the prompt's last. Ends when the context is full.

        When closed, and after each step, the session's state covers all tokens before the last one yielded. Raises
        StageFailed, LogitsNotFinite, NothingAllowed; the session then holds a prefix of the conversation so far, or is
        empty.
        """
        self._next_id = last_token_id
        try:
            while self._ahead is not None or self._session.position < self._session.context_tokens:
                start = self._session.position - (self._ahead is not None)
                said, given = self._step(self._next_id), 0
                self._next_id = said[-1]
                try:
                    for token in said:
                        given += 1
                        yield token
                finally:
                    if given < len(said):
                        self._session.truncate(start + given)
        finally:
            self._next_id = None
            if self._ahead is not None:  # nobody asks for the token
                self._ahead = None
                self._session.truncate(self._session.position - 1)

    @property
    def steps_next(self) -> int | None:
        """The token that the next step reads, if it is a plain step of one; None: it guesses, or none follows."""
        if self._session.draft_tokens or self._session.position >= self._session.context_tokens:
            return None
        return self._next_id

    def stepped_ahead(self, logits: torch.Tensor) -> None:
        """The session has read the token `steps_next`, with these logits after it: the next step takes them. Only where
        the session can be cut anywhere, since the answer may end before."""
        assert self._ahead is None
        self._ahead = logits

    def move_to(self, session: Session) -> None:
        """The answer goes on in another session, which holds the same state. Between two steps only."""
        self._session = session

    def _step(self, token_id: int) -> list[int]:
        """Returns the tokens that follow `token_id`; the session has then read all of them but the last."""
        session = self._session
        allowed = None if self._mask is None else self._mask.allowed()
        wanted = session.draft_tokens > 0 and (self._pace is None or self._pace.guesses())
        guesses = self._guesses(token_id, allowed) if wanted else []
        if not guesses:
            scores, self._ahead = self._plain_step(session, token_id) if self._ahead is None else self._ahead, None
            with self._emptied_by(scores[None]):
                return [self._said(self._sampler.pick(scores, allowed), scores)]
        start, accepted = session.position, self.counts.accepted
        logits = session.verify([token_id, *(guess for guess, _ in guesses)])
        self.counts += DraftCounts(len(guesses), 0)
        said: list[int] = []
        with self._emptied_by(logits):
            try:
                self._check(guesses, logits, allowed, said)
            except BaseException:
                session.truncate(start + 1)  # No token of this step was yielded yet.
                raise
        session.truncate(start + len(said))
        if self._pace is not None:
            self._pace.note(len(guesses), self.counts.accepted - accepted)
        return said

    @contextmanager
    def _emptied_by(self, logits: torch.Tensor) -> Iterator[None]:
        """Resets the session if LogitsNotFinite is raised inside and a token has no finite logit: the state is then not
        finite either, so nothing could be generated from it now or after a restore."""
        try:
            yield
        except LogitsNotFinite:
            if not torch.isfinite(logits).any(dim=-1).all():
                self._session.reset()
            raise

    def _check(
        self, guesses: list[tuple[int, Distribution]], logits: torch.Tensor, allowed: Allowed | None, said: list[int]
    ) -> None:
        """Appends to `said` the accepted guesses, and the model's token after them unless an end token was accepted."""
        for (guess, guessed_from), scores in zip(guesses, logits, strict=False):
            wanted = self._sampler.distribution(scores, allowed)
            token = self._sampler.remember(self._sampler.judge(guess, guessed_from, wanted))
            said.append(self._said(token, scores))
            if token != guess:
                return
            self.counts += DraftCounts(0, 1)
            if token in self._end_token_ids:
                return
            allowed = None if self._mask is None else self._mask.allowed()
        said.append(self._said(self._sampler.pick(logits[-1], allowed), logits[-1]))

    def _guesses(self, token_id: int, allowed: Allowed | None) -> list[tuple[int, Distribution]]:
        """The guesses, each with the distribution it was drawn from. The mask is known for the first only; the model
        may reject others because of it."""
        sources: list[Distribution] = []
        ahead: list[int] = []

        def choose(logits: torch.Tensor) -> int:
            sources.append(self._sampler.distribution(logits, None if ahead else allowed, ahead))
            ahead.append(self._sampler.draw(sources[-1]))
            return ahead[-1]

        with suppress(LogitsNotFinite, NothingAllowed):  # A head without usable logits makes no more guesses.
            self._session.guess(token_id, self._session.draft_tokens, choose)
        return list(zip(ahead, sources, strict=True))

    def _said(self, token_id: int, scores: torch.Tensor) -> int:
        """Notes that the token was sampled from these logits, and returns it."""
        if self._top_logprobs is not None:
            self.logprobs.append(logprobs_of(scores.float().cpu().numpy(), token_id, self._top_logprobs))
        if self._mask is not None:
            self._mask.accept(token_id)
        return token_id
