"""The fixed state of all stages: the live state, and checkpoints, which are copies at earlier positions.

    timeline   0 ---- c0 -------- c1 --- c2 ------- position
                      |-- root    |      |          |-- live: arenas and caches
                      copies on the devices, one tensor for each stage

With linear layers, the state is exact only at the position and at checkpoints. With sliding windows alone, it is also
exact a little before the position. With neither, it is exact at every position and no checkpoint is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from parkd.state import KeptStates
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache import StageCache
from parkd_engine.failures import stage_failed

log = logging.getLogger("parkd.engine")

Copies = list[torch.Tensor]
"""One uint8 tensor `[fixed_bytes]` for each stage."""


class FixedState:
    """Keeps at most `limit` checkpoints, by the rule of `KeptStates`."""

    def __init__(
        self,
        arenas: Sequence[StageArena],
        caches: Sequence[StageCache],
        limit: int,
        is_read: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_read` says whether a running capture may still read checkpoints; their memory is then not reused."""
        self._is_read = is_read
        self._arenas = tuple(arenas)
        self._caches = tuple(caches)
        self._kept: KeptStates[Copies] = KeptStates(limit)
        self.exists = any(arena.layout.fixed_bytes for arena in arenas)
        self.is_exact_once = any(cache.has_linear_state for cache in caches)
        """Whether the state is exact at one position only, so that a failed forward pass loses it."""

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the checkpoints, ascending."""
        return self._kept.positions

    def floor(self, position: int) -> int:
        """The lowest position from which the state is exact, without a checkpoint, up to `position`, where the timeline
        is."""
        return max(cache.floor(position) for cache in self._caches)

    def live(self, position: int) -> Copies:
        """The arenas' own `fixed` tensors, brought up to date at `position`, where the timeline is."""
        for cache in self._caches:
            cache.pack(position)
        return [arena.fixed for arena in self._arenas]

    def at(self, position: int) -> Copies | None:
        """The checkpoint at `position`, or None."""
        return self._kept.get(position)

    def bytes_at(self, position: int) -> Copies:
        """The checkpoint at `position`, or the arenas' own tensors if `position` is the present one."""
        return self.at(position) or self.live(position)

    def copies_at(self, position: int) -> Copies:
        """The same, but never the arenas' own tensors: copies that later computing does not change."""
        return self.at(position) or [live.clone() for live in self.live(position)]

    def keep(self, position: int, *, is_packed: bool = False) -> None:
        """Takes a checkpoint at `position`, where the timeline is, if there is memory for it. Queues copies without
        waiting. `is_packed` says that the arenas' own tensors are up to date."""
        if not self.exists:
            return

        def copied(memory: Copies | None) -> Copies | None:
            if self._is_read():
                memory = None  # The capture frees it once it is done.
            live = [arena.fixed for arena in self._arenas] if is_packed else self.live(position)
            try:
                copies = [torch.empty_like(fixed) for fixed in live] if memory is None else memory
            except torch.OutOfMemoryError:
                log.info("no memory for a checkpoint at %d: prompts that go on from there will read more", position)
                return None
            for copy, fixed in zip(copies, live, strict=True):
                copy.copy_(fixed)
            return copies

        self._kept.keep(position, copied)

    def go_back(self, position: int) -> None:
        """Restores the checkpoint at `position` and drops those beyond it. Raises KeyError if there is none."""
        for arena, copy in zip(self._arenas, self._kept.use(position), strict=True):
            arena.fixed.copy_(copy)
        self.unpack(position)
        self.forget_beyond(position)

    def unpack(self, position: int) -> None:
        """Loads live state from the arenas' `fixed`, which is valid at `position`."""
        for cache in self._caches:
            cache.unpack(position)

    @contextmanager
    def recorded(self, position: int, count: int) -> Iterator[None]:
        """A context in which a step of `count` tokens runs at `position`; all but its first can then be taken back."""
        try:
            for cache in self._caches:
                cache.history.record(position, count)
            yield
        finally:
            for cache in self._caches:
                cache.history.finish()

    def check_step(self) -> None:
        """Called after the forward pass of a step. Raises StageFailed if a layer did not keep its state after each
        token of a step in `recorded`."""
        for stage, cache in enumerate(self._caches):
            try:
                cache.history.check()
            except RuntimeError as error:
                raise stage_failed(stage, "decode", error) from error

    def cut(self, position: int, at: int) -> None:
        """Cuts from `at`, where the timeline is, to `position`, not below the floor; the live state is then valid
        there."""
        for cache in self._caches:
            if position < at and not cache.history.is_empty:
                cache.history.go_back(position)
        self._kept.forget_beyond(position)

    def forget_beyond(self, position: int) -> None:
        """Drops checkpoints beyond `position` and the history of the last step: their rows and the live state are about
        to be overwritten."""
        for cache in self._caches:
            cache.history.forget()
        self._kept.forget_beyond(position)

    def last_before(self, position: int) -> int:
        """The position of the last checkpoint at or before `position`; 0 if there is none."""
        return self._kept.last(position)
