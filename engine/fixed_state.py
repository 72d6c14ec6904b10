"""The fixed state of all stages: what is live, and copies of it at earlier positions.

    timeline   0 ---- c0 -------- c1 --- c2 ------- position
                      |-- root    |      |          |-- live: arenas and caches
                      copies on the devices, one tensor a stage

With linear layers the state is exact at the position and at checkpoints only; with sliding windows also a little
before the position; without either everywhere, and then there is nothing to keep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.arena import StageArena
from engine.cache import StageCache
from engine.errors import StageFailed

log = logging.getLogger("parkd.engine")

Copies = list[torch.Tensor]
"""uint8 `[fixed_bytes]` of each stage."""


class FixedState:
    """At most `limit` checkpoints: the earliest stays, of the others the least recently used goes."""

    def __init__(
        self,
        arenas: Sequence[StageArena],
        caches: Sequence[StageCache],
        limit: int,
        is_read: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_read` says whether a capture under way may still read checkpoints: then their memory is not reused."""
        self._is_read = is_read
        self._arenas = tuple(arenas)
        self._caches = tuple(caches)
        self._limit = limit
        self._kept: dict[int, Copies] = {}
        """By position, least recently used first."""
        self.exists = any(arena.layout.fixed_bytes for arena in arenas)
        self.is_exact_once = any(cache.has_linear_state for cache in caches)
        """A forward that breaks midway leaves nothing to go on from."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Where a checkpoint is held, ascending."""
        return tuple(sorted(self._kept))

    def floor(self, position: int) -> int:
        """From here to `position`, where the timeline is, every position is exact without a checkpoint."""
        return max(cache.floor(position) for cache in self._caches)

    def live(self, position: int) -> Copies:
        """The arenas' own bytes, made true at `position`, where the timeline is."""
        for cache in self._caches:
            cache.pack(position)
        return [arena.fixed for arena in self._arenas]

    def at(self, position: int) -> Copies | None:
        """The checkpoint held for `position`, None if there is none."""
        return self._kept.get(position)

    def bytes_at(self, position: int) -> Copies:
        """Those of the checkpoint, or the arenas' own at the present position."""
        return self.at(position) or self.live(position)

    def copies_at(self, position: int) -> Copies:
        """The same as tensors that nothing changes."""
        return self.at(position) or [live.clone() for live in self.live(position)]

    def keep(self, position: int) -> None:
        """Takes a checkpoint at `position`, where the timeline is, if there is memory for it. Queues copies; waits for
        nothing."""
        if not self.exists:
            return
        if position in self._kept:
            self._kept[position] = self._kept.pop(position)
            return
        memory = self._kept.pop(self._oldest()) if len(self._kept) >= self._limit else None
        if self._is_read():
            memory = None  # It is freed by the capture, once that is done.
        live = self.live(position)
        try:
            copies = [torch.empty_like(fixed) for fixed in live] if memory is None else memory
        except torch.OutOfMemoryError:
            log.info("no memory for a checkpoint at %d: prompts that go on from there will read more", position)
            return
        for copy, fixed in zip(copies, live, strict=True):
            copy.copy_(fixed)
        self._kept[position] = copies

    def go_back(self, position: int) -> None:
        """Makes the checkpoint at `position` live and forgets those beyond it. Raises KeyError if there is none."""
        copies = self._kept.pop(position)
        self._kept[position] = copies
        for arena, copy in zip(self._arenas, copies, strict=True):
            arena.fixed.copy_(copy)
        self.unpack(position)
        self.forget_beyond(position)

    def unpack(self, position: int) -> None:
        """Goes on from the arenas' `fixed`, which is true at `position`."""
        for cache in self._caches:
            cache.unpack(position)

    @contextmanager
    def recorded(self, position: int, count: int) -> Iterator[None]:
        """Inside, a step of `count` tokens runs at `position`; afterwards all but its first can be taken back."""
        try:
            for cache in self._caches:
                cache.history.record(position, count)
            yield
        finally:
            for cache in self._caches:
                cache.history.finish()

    def check_step(self) -> None:
        """After the forward of a recorded step. Raises StageFailed where a layer's state in between was not kept."""
        for stage, cache in enumerate(self._caches):
            try:
                cache.history.check()
            except RuntimeError as error:
                raise StageFailed(stage, "decode", error) from error

    def cut(self, position: int, at: int) -> None:
        """From `at`, where the timeline is, to `position`, not below the floor: the live state becomes true there."""
        for cache in self._caches:
            if position < at and not cache.history.is_empty:
                cache.history.go_back(position)
        self._forget_checkpoints(position)

    def forget_beyond(self, position: int) -> None:
        """Their rows are about to be overwritten, and so is the live state."""
        for cache in self._caches:
            cache.history.forget()
        self._forget_checkpoints(position)

    def _forget_checkpoints(self, position: int) -> None:
        for place in [place for place in self._kept if place > position]:
            del self._kept[place]

    def last_before(self, position: int) -> int:
        """The deepest checkpoint at or before `position`; 0 if there is none."""
        return max((place for place in self._kept if place <= position), default=0)

    def _oldest(self) -> int:
        root = min(self._kept)
        return next((place for place in self._kept if place != root), root)
