"""The draft head in recorded decoding: bringing its rows up to date after a step, and guessing.

    the last stage's graph     hidden states of the step -> the head's rows of its tokens, its last hidden state
    the head's graph           a token, the hidden state before it -> its row, the hidden state after it, logits

Token embeddings are copied from the first stage's device before a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from parkd_engine.arenas.placed import TokenPlace
from parkd_engine.draft.head import Choose, DraftHead
from parkd_engine.forward.graphs import recorded
from parkd_engine.forward.one_token import few_kernels


class RecordedReading:
    """The head's reading of the tokens that the model has just read; part of the last stage's graph."""

    def __init__(self, draft: DraftHead, tokens: int) -> None:
        self._draft = draft
        self._place = TokenPlace(draft.device, tokens, has_neighbours=draft.has_neighbours)
        self._embedded: torch.Tensor | None = None

    @property
    def model(self) -> Any:
        return self._draft.model

    def ready(self, token_ids: Sequence[int], position: int, turn: int) -> None:
        """Prepares a replay; `position` is that of the first token and must not be 0."""
        embedded = self._draft.embed(token_ids)
        if self._embedded is None:
            self._embedded = embedded.clone()
        else:
            self._embedded.copy_(embedded)
        self._draft.ready(position, turn, self._place)

    def run(self, hidden: torch.Tensor) -> None:
        """Queues the reading; `hidden` is the model's hidden states of the tokens, `[1, tokens, hidden]`."""
        assert self._embedded is not None, "ready first"
        self._draft.read_placed(self._embedded, hidden, self._place)


class RecordedGuessing:
    """A graph of one guess, replayed for each guess."""

    def __init__(self, draft: DraftHead) -> None:
        self._draft = draft
        self._place = TokenPlace(draft.device, has_neighbours=draft.has_neighbours)
        self._behind = draft.kept_hidden.clone().view(1, 1, -1)
        """The hidden state before the token, `[1, 1, hidden]`; a guess replaces it with the one after the token."""
        self._embedded = torch.zeros_like(self._behind)
        self._logits: torch.Tensor | None = None
        self._graph: Any = None

    def record(self, pool: Any = None) -> None:
        self._draft.ready(1, 1, self._place)
        self._graph = recorded(self.run, self._draft.device, pool)

    def run(self) -> None:
        """Queues one guess."""
        model, head = self._draft.model, self._draft.output
        with few_kernels(model, head) if self._draft.device.type == "cuda" else nullcontext():
            hidden = self._draft.placed(self._embedded, self._behind, self._place)
            logits = self._draft.logits(hidden)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits.copy_(logits)
            self._behind.copy_(hidden)

    def guess(self, token_id: int, position: int, offset: int, count: int, choose: Choose) -> list[int]:
        """As `DraftHead.guess`, at a position that is not 0; `offset` is added to get rotary positions."""
        self._behind.copy_(self._draft.kept_hidden.view(1, 1, -1))
        guesses: list[int] = []
        for row in range(position, position + count):
            self._embedded.copy_(self._draft.embed([guesses[-1] if guesses else token_id]))
            self._draft.ready(row, row + offset, self._place)
            self._graph.replay()
            assert self._logits is not None, "recorded first"
            guesses.append(choose(self._logits.clone()))
        return guesses
