"""Turns whose client has disconnected, for as long as it may come back.

A client that loses its connection often sends the same request again. For a grace time its turn goes on, in the queue
or in the lane, and the same request under the same key takes it over from its first event. After that the turn is given
up. A turn that runs while others wait for a place is given up at once, whichever comes first: that its client leaves,
that another turn comes to wait, or that it begins to run. What it has read is kept anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from parkd.lane.lane import Lane
from parkd.lane.turn import Turn
from parkd.types import TurnRequest
from parkd.types.identical import identical


class Resends:
    """Lives on the event loop."""

    def __init__(self, lane: Lane[Turn], grace_s: float, give_up: Callable[[Turn], None]) -> None:
        """`give_up` is called with a turn whose client did not come back."""
        self._lane = lane
        self._grace_s = grace_s
        self._give_up = give_up
        self._tasks: anyio.abc.TaskGroup | None = None
        self._alone: dict[Turn, anyio.CancelScope] = {}
        self.joined = 0

    def __len__(self) -> int:
        return len(self._alone)

    def serve_in(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """The task group for grace times; None: from now on turns are given up at once."""
        self._tasks = tasks

    def left(self, turn: Turn) -> None:
        """Called when the client of `turn` has disconnected."""
        is_kept = self._tasks is not None and bool(self._grace_s) and not self._lane.holds_up(turn)
        if self._tasks is None or not is_kept or turn.channel.closed or not turn.channel.can_rewind:
            self._give_up(turn)
            return
        scope = anyio.CancelScope()
        self._alone[turn] = scope
        self._tasks.start_soon(self._wait, turn, scope)

    def give_up(self, turn: Turn) -> None:
        """Called when the client of `turn` wants nothing of it any more, whatever becomes of its connection."""
        self._give_up(turn)

    def give_way(self) -> None:
        """Called when a turn comes to wait, and when one begins to run: ends the grace of a turn that holds others
        up."""
        for turn, scope in list(self._alone.items()):
            if self._lane.holds_up(turn):
                del self._alone[turn]
                scope.cancel()
                self._give_up(turn)

    def take(self, request: TurnRequest, owner: str) -> Turn | None:
        """The turn of an equal request under the same key whose client is gone, rewound to its first event; None: no
        such turn."""
        for turn, scope in self._alone.items():
            sent_by = turn.explained.owner if turn.explained is not None else None
            if sent_by == owner and identical(turn.request, request) and turn.channel.rewind():
                del self._alone[turn]
                scope.cancel()
                self.joined += 1
                return turn
        return None

    async def _wait(self, turn: Turn, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep(self._grace_s)
        if self._alone.pop(turn, None) is not None:
            self._give_up(turn)
