"""What is recorded for cards, run without graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from parkd_engine import Session
from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.cache_layers import ArenaLinearLayer
from parkd_engine.arenas.placed import TokenPlace
from parkd_engine.draft.graph import RecordedGuessing
from parkd_engine.forward import chunk_graphs
from parkd_engine.forward.decode_graph import DecodeGraph, LibraryDecoder
from parkd_engine.forward.handoff import HandOff
from torch.nn.functional import pad, scaled_dot_product_attention


def reference_attention(
    query: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    scale_rows: torch.Tensor | None = None,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> None:
    """What `parkd_engine.kernels.attend.DecodeAttention` does."""
    last, begin = int(position) + 1, 0 if first is None else int(first)
    seen = slice(max(begin, last - window) if window else begin, last)
    keys, values = key_rows[seen].float(), value_rows[seen].float()
    if scale_rows is not None:
        keys, values = (r * scale_rows[seen, part, :, None].float() for part, r in enumerate((keys, values)))
    heads = query.view(1, -1, 1, key_rows.shape[2]).float()
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    added = None
    if sinks is not None:  # a score without a value: that of a key and a value of zeros
        keys, values = (pad(states, (0, 0, 0, 1)) for states in (keys, values))
        added = pad(sinks.float().view(1, -1, 1, 1), (keys.shape[2] - 1, 0))
    out.copy_(scaled_dot_product_attention(heads, keys, values, added, scale=scale, enable_gqa=True).flatten())


class Replay:
    """Runs on replay what a graph would have recorded."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replays = 0
        self.run = run

    def replay(self) -> None:
        self.replays += 1
        self.run()


class StepReplay(Replay):
    """The same of a stage's step, for which the cache is as it was while the graph was recorded."""

    def __init__(self, decoder: LibraryDecoder) -> None:
        super().__init__(decoder.run)
        self._cache, self._place = decoder._cache, decoder._place

    def replay(self) -> None:
        _with_state(self._cache)
        self._cache.record(self._place)
        try:
            super().replay()
        finally:
            self._cache.record(None)


def _with_state(cache: StageCache) -> None:
    """As while a graph was recorded: there is state to go on from, wherever the timeline is now."""
    for layer in cache.layers:
        if isinstance(layer, ArenaLinearLayer):
            layer.begin(1)


def record_steps(session: Session) -> tuple[dict[int, list[StepReplay]], Replay | None]:
    """From now on steps of one token, and with a draft head those with all guesses, and the guesses, are replayed.
    Returns the graphs of all stages by the number of a step's tokens, and that of a guess."""
    draft, graphs = session.draft, {}
    steps: dict[int, list[LibraryDecoder]] = {}
    for tokens in {1, 1 + session.draft_tokens}:
        steps[tokens] = [
            LibraryDecoder(stage, cache, session.config, tokens, draft if stage is session.stages[-1] else None)
            for stage, cache in zip(session.stages, session.caches, strict=True)
        ]
        graphs[tokens] = [StepReplay(decoder) for decoder in steps[tokens]]
        for decoder, graph in zip(steps[tokens], graphs[tokens], strict=True):
            decoder._graph = graph
    guessing = None if draft is None else RecordedGuessing(draft)
    guess = None if guessing is None else Replay(guessing.run)
    if guessing is not None:
        guessing._graph = guess
    handoffs = [HandOff(one.device, other.device) for one, other in pairwise(session.stages)]
    session.forward.decode_graph = DecodeGraph(steps, handoffs, guessing)
    return graphs, guess


def _recorded(cache: StageCache, made: list[Replay], run: Callable[[], None], *_: Any) -> Replay:
    """In place of `parkd_engine.forward.graphs.recorded`; adds to `made`."""

    def replay() -> None:
        _with_state(cache)
        run()

    run()  # As while recording: whatever state there is is overwritten.
    made.append(Replay(replay))
    return made[-1]


def record_chunks(session: Session, tokens: int) -> list[Replay]:
    """From now on whole chunks go through recorded layers where `forward.chunk_graphs` knows them. Returns the graphs.
    Resets the timeline."""
    made: list[Replay] = []
    with pytest.MonkeyPatch.context() as patch:
        for stage, cache in zip(session.stages, session.caches, strict=True):
            patch.setattr(chunk_graphs, "recorded", partial(_recorded, cache, made))
            chunk_graphs.record_chunks(stage, cache, tokens)
    session.reset()
    return made


@contextmanager
def without_triton() -> Iterator[None]:
    """Inside, replayed steps attend by the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenPlace, "attention", lambda *_, codes: reference_attention)
        yield
