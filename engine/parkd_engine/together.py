"""Steps of several seats at once: a token of each, with the bits that it has in a step of its own.

On cards, for models whose decoding is fused (`forward.dense`), one recorded step reads the weights for all seats. Other
models, and CPUs, run one seat after the other, which has those bits by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from parkd.errors import ContextFull, EngineFailure
from parkd_engine.failures import stage_failed
from parkd_engine.forward.graphs import GraphPools
from parkd_engine.forward.handoff import HandOff
from parkd_engine.forward.seats_decoder import SeatsDecoder
from parkd_engine.session import Session

WIDTHS = (1, 2, 4, 8, 16)
"""Seats in a recorded step. A step of fewer seats than it was recorded for repeats the last one."""


class Together:
    """The seats of one engine, which step together. Not thread-safe, as its sessions are not."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        """`sessions` are those of all seats."""
        self._sessions = tuple(sessions)
        first = self._sessions[0]
        self._handoffs = [HandOff(one.device, other.device) for one, other in pairwise(first.stages)]
        self._steps: Mapping[int, Sequence[SeatsDecoder]] = {}

    @property
    def is_recorded(self) -> bool:
        return bool(self._steps)

    def record(self) -> bool:
        """Records steps of as many seats as there are, and fewer. Overwrites the first rows, so all seats must be
        empty. Returns False if the model's decoding is not fused, or it has a draft head: nothing was tried. Call it
        after `use_kernels`."""
        first = self._sessions[0]
        if not first.forward.dense or first.draft is not None or first.arenas[0].base:
            return False
        assert not any(session.position for session in self._sessions), "all seats are empty"
        pools, steps = GraphPools(), {}
        most = next(width for width in WIDTHS if width >= len(self._sessions))
        for tokens in (width for width in WIDTHS if width <= most):
            steps[tokens] = [
                SeatsDecoder(stage, cache, first.config, tokens)
                for stage, cache in zip(first.stages, first.caches, strict=True)
            ]
            for decoder in steps[tokens]:
                with torch.inference_mode():
                    decoder.ready([0] * tokens, 0, 0)
                decoder.record(pools.of(decoder.stage.device))
        self._steps = steps
        return True

    def step_alone(self, session: Session, token_id: int) -> torch.Tensor:
        """`step` of one seat, given by its session: float32 `[vocab]`."""
        return self.step([self._sessions.index(session)], [token_id])[0]

    def step(self, seats: Sequence[int], token_ids: Sequence[int]) -> list[torch.Tensor]:
        """Decodes one token of each of `seats`, which are different ones. Returns the logits of each, float32
        `[vocab]`.

        Raises ContextFull, with nothing decoded, if one of them is full or their rows do not fit together; StageFailed.
        """
        assert len(set(seats)) == len(seats) == len(token_ids), "a token for each of different seats"
        sessions = [self._sessions[seat] for seat in seats]
        positions = [session.position for session in sessions]
        for session, position in zip(sessions, positions, strict=True):
            session.make_room(position + 1)
        for session, position in zip(sessions, positions, strict=True):
            if session.position != position:  # Its rows were taken for another of them.
                raise ContextFull(position, 1, session.context_tokens)
        if not self._steps or any(stage.has_hooks for stage in sessions[0].stages):
            return [session.step(token) for session, token in zip(sessions, token_ids, strict=True)]
        try:
            logits = self._run(sessions, token_ids)
        except EngineFailure:
            raise
        except Exception as error:
            raise stage_failed(len(sessions[0].stages) - 1, "decode", error) from error
        for session in sessions:
            session.has_stepped()
        return list(logits)

    def _run(self, sessions: Sequence[Session], token_ids: Sequence[int]) -> torch.Tensor:
        """Replays the recorded step; returns float32 `[seats, vocab]`."""
        width = next(width for width in self._steps if width >= len(sessions))
        # A repeated token writes the same bytes to the same row.
        filled = [*range(len(sessions)), *[len(sessions) - 1] * (width - len(sessions))]
        ids, positions, bases = (
            [values[index] for index in filled]
            for values in (token_ids, [each.position for each in sessions], [each.base for each in sessions])
        )
        decoders = self._steps[width]
        with torch.inference_mode():
            for index, decoder in enumerate(decoders):
                stream = torch.cuda.current_stream(decoder.stage.device)
                for session in sessions:
                    session.before_write(index, stream, session.position, session.position + 1)
                decoder.place(ids, positions, bases)
                if index:
                    self._handoffs[index - 1].into(decoders[index - 1].hidden, decoder.hidden)
                decoder.replay()
            logits = decoders[-1].logits
            assert logits is not None, "the last stage has the head"
            return logits[: len(sessions)].clone()
