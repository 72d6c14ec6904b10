"""One answer's tokens: sampled one a step, or several where a draft head guesses well.

    step     token t       -> guesses g1 g2                     the head, from what is behind t
             t g1 g2       -> what follows each                 the model, all at once
             g1 kept, g2 not -> said: g1, and what the model says in place of g2
    state    t g1 are in it, g2 never was; the token said last is read by the next step

Greedy answers are those of single steps; drawn ones have their distribution (`Sampler.judge`). What a grammar or a
penalty asks of a token is asked of what the model says, so a guess can only ever be late, not wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.distribution import Distribution
from engine.draft_pace import DraftPace
from engine.errors import BadLogits
from engine.sampling import Sampler
from engine.session import Session

Allowed = npt.NDArray[np.bool_]


class Mask(Protocol):
    """Constrains what may be said next."""

    def allowed(self) -> Allowed: ...
    def accept(self, token_id: int) -> None: ...


@dataclass(slots=True)
class DraftCounts:
    """Of one answer."""

    drafted: int = 0
    """Tokens guessed."""
    accepted: int = 0
    """Guesses that the model said too."""


class Decoder:
    """Decodes behind a session's timeline; one a answer."""

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        *,
        mask: Mask | None = None,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Nothing is guessed behind one of `end_token_ids`: mostly nobody asks for it."""
        self._session = session
        self._sampler = sampler
        self._mask = mask
        self._end_token_ids = end_token_ids
        self.counts = DraftCounts()
        self._pace = DraftPace() if session.draft_pauses else None

    def tokens(self, last_token_id: int) -> Generator[int, None, None]:
        """Says one token each `next`; first reads `last_token_id`, the prompt's last. Ends where the context does.

        Once closed, and whenever a step is over, the state is that of all tokens before the last one said. Raises
        StageFailed, BadLogits; then the state is that of tokens that were said, an earlier one, or none.
        """
        session, token = self._session, last_token_id
        while session.position < session.context_tokens:
            start, said, given = session.position, self._step(token), 0
            try:
                for token in said:
                    given += 1
                    yield token
            finally:
                if given < len(said):
                    session.truncate(start + given)

    def _step(self, token_id: int) -> list[int]:
        """Tokens said behind `token_id`; the session is then behind all of them but the last."""
        session = self._session
        allowed = None if self._mask is None else self._mask.allowed()
        wanted = session.draft_tokens > 0 and (self._pace is None or self._pace.guesses())
        guesses = self._guesses(token_id, allowed) if wanted else []
        if not guesses:
            scores = session.step(token_id)
            with self._emptied_by(scores[None]):
                return [self._said(self._sampler.pick(scores, allowed))]
        start, accepted = session.position, self.counts.accepted
        logits = session.verify([token_id, *(guess for guess, _ in guesses)])
        self.counts.drafted += len(guesses)
        said: list[int] = []
        with self._emptied_by(logits):
            try:
                self._check(guesses, logits, allowed, said)
            except BaseException:
                session.truncate(start + 1)  # nobody has heard what was found until then
                raise
        session.truncate(start + len(said))
        if self._pace is not None:
            self._pace.note(len(guesses), self.counts.accepted - accepted)
        return said

    @contextmanager
    def _emptied_by(self, logits: torch.Tensor) -> Iterator[None]:
        """Empties the session if the answer breaks off inside, where a token has no score that is a number: then the
        state has none either, and whoever asks again, or restored it, would get no further."""
        try:
            yield
        except BadLogits:
            if not torch.isfinite(logits).any(dim=-1).all():
                self._session.reset()
            raise

    def _check(
        self, guesses: list[tuple[int, Distribution]], logits: torch.Tensor, allowed: Allowed | None, said: list[int]
    ) -> None:
        """Adds to `said` the guesses that hold, and the first token that is not one."""
        for (guess, guessed_from), scores in zip(guesses, logits, strict=False):
            wanted = self._sampler.distribution(scores, allowed)
            token = self._sampler.remember(self._sampler.judge(guess, guessed_from, wanted))
            said.append(self._said(token))
            if token != guess:
                return
            self.counts.accepted += 1
            if token in self._end_token_ids:
                return
            allowed = None if self._mask is None else self._mask.allowed()
        said.append(self._said(self._sampler.pick(logits[-1], allowed)))

    def _guesses(self, token_id: int, allowed: Allowed | None) -> list[tuple[int, Distribution]]:
        """Each with what it was drawn from. A grammar is known for the first only: others may turn out forbidden."""
        sources: list[Distribution] = []
        ahead: list[int] = []

        def choose(logits: torch.Tensor) -> int:
            sources.append(self._sampler.distribution(logits, None if ahead else allowed, ahead))
            ahead.append(self._sampler.draw(sources[-1]))
            return ahead[-1]

        with suppress(BadLogits):  # A head that gives no usable scores guesses nothing.
            self._session.guess(token_id, self._session.draft_tokens, choose)
        return list(zip(ahead, sources, strict=True))

    def _said(self, token_id: int) -> int:
        if self._mask is not None:
            self._mask.accept(token_id)
        return token_id
