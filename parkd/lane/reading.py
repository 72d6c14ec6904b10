"""Reading a prompt, a chunk at a time. Runs on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parkd.engine_adapter.base import Cancel
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.thread.work import NextChunk, Work
from parkd.types import TokenIds


class Reading:
    """Reads up to the end of what it is given, or to a pause, or until `cancel` is set. Where nobody waits for the
    thread, chunks follow each other without a gap, so that those of several devices overlap."""

    def __init__(self, live: LiveConversation, cancel: Cancel, pause: Cancel, monotonic: Callable[[], float]) -> None:
        """A `pause` that is set takes effect behind a chunk, also in engines that stop inside one, so that each slice
        gets on."""
        self._live = live
        self._cancel = cancel
        self._pause = pause
        self._monotonic = monotonic
        self.computed_s = 0.0
        """Seconds of the thread."""
        self.rests = False
        """Whether it ended behind a chunk because of `pause`."""

    def work(
        self,
        token_ids: TokenIds,
        checkpoint_at: Sequence[int] = (),
        on_chunk: Callable[[int], None] = lambda _position: None,
    ) -> Work[None]:
        """Reads `token_ids` from the seat's position on. `on_chunk` is told the position after each chunk. Raises as
        `Seat.extend` does."""
        live, seat = self._live, self._live.seat
        while seat.position < len(token_ids) and not self._cancel.is_set():
            yield NextChunk(len(token_ids) - seat.position)
            end = ChunkEnd(self._cancel, self._pause, lambda: live.is_shared)
            began_s, start = self._monotonic(), seat.position

            def chunk_read(position: int, end: ChunkEnd = end) -> None:
                end.passed()
                on_chunk(position)

            try:
                seat.extend(token_ids[start:], cancel=end, on_chunk=chunk_read, checkpoint_at=checkpoint_at)
            finally:
                self.computed_s += self._monotonic() - began_s
            if seat.position == start:
                return
            if self._pause.is_set() and end.is_set():
                self.rests = True
                return


class ChunkEnd:
    """The cancellation flag of a call that reads chunks: a pause takes effect behind a whole one, as does that others
    wait."""

    def __init__(self, cancel: Cancel, pause: Cancel, is_shared: Callable[[], bool] = lambda: False) -> None:
        self._cancel = cancel
        self._pause = pause
        self._is_shared = is_shared
        self._rests = False

    def passed(self) -> None:
        """Called behind each chunk."""
        self._rests = self._pause.is_set() or self._is_shared()

    def is_set(self) -> bool:
        return self._rests or self._cancel.is_set()
