"""The engine and the meaning of its state, always changed together. Parking and restoring are in `parking.py`.

Engine calls run on the engine's thread; `conversation` changes only on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from parkd.engine_adapter.base import Engine, RemoteEngine
from parkd.errors import EngineFailure, EngineLost, ParkdError, RestoreFailed
from parkd.lane.engine_thread import EngineThread
from parkd.lane.live_rows import LiveRows
from parkd.types import ConversationKey, Units

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class LiveEngine:
    """The engine, and the conversation that its rows hold."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self.engine = engine
        self.thread = thread
        self._conversation = LiveRows()
        self.checkpoints: tuple[int, ...] = ()
        """Positions below `rewind_floor` that the live state can be cut to, as of the last engine call. From
        `rewind_floor` on, it can be cut anywhere."""
        self.rewind_floor = 0

    @property
    def conversation(self) -> LiveRows:
        return self._conversation

    @conversation.setter
    def conversation(self, conversation: LiveRows) -> None:
        self._conversation = conversation
        if conversation.position == 0:
            self.checkpoints, self.rewind_floor = (), 0
        self._rows_lost(conversation.position)

    def _rows_lost(self, kept: int) -> None:
        """Called when live rows from `kept` on change."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One engine call. Raises only ParkdError: after any other error the engine is reset and EngineFailure
        raised."""
        try:
            return await self.thread.run(function, *args, **kwargs)
        except ParkdError:
            raise
        except Exception as error:
            log.exception("the engine raised an unexpected error and is reset")
            await self.reset()
            raise EngineFailure(
                "The engine failed unexpectedly; the server's log has the details. Try again."
            ) from error

    async def wake(self) -> None:
        """Called before a turn decides how to start: an engine that is another process may have lost its live state."""
        if isinstance(self.engine, RemoteEngine) and not self.engine.is_awake:
            _, position = await self._call_and_refresh(self.engine.awake)
            await self._reconcile(position)

    async def advance(self, key: ConversationKey, units: Units) -> None:
        """Adopts the engine's position after it read from `units`. Resets the engine if that position is impossible."""
        position = await self._refresh()
        if position > len(units):
            log.error("the engine is at %d but only %d tokens are known; it is reset", position, len(units))
            await self.reset()
            return
        self.conversation = self.conversation.advance(key, units, position)

    async def check(self) -> None:
        """Called after a failure: keeps only what the engine still holds."""
        await self._reconcile(await self._refresh())

    async def truncate(self, position: int) -> None:
        try:
            await self._call_and_refresh(self.engine.truncate, position)
        except RestoreFailed:  # it is empty now
            self.conversation = LiveRows()
            raise
        self.conversation = self.conversation.truncate(position)

    async def checkpoint(self) -> None:
        """Takes a checkpoint at the engine's position, if the model has fixed state."""
        if self.engine.info.layout.resume.needs_checkpoints and self.conversation.position not in self.checkpoints:
            await self._call_and_refresh(self.engine.checkpoint)

    async def _reconcile(self, position: int) -> None:
        """Cuts the conversation to the engine's `position`; resets the engine if it claims more than is known."""
        if position > self.conversation.position:
            await self.reset()
        else:
            self.conversation = self.conversation.truncate(position)

    async def _refresh(self) -> int:
        """Asks the engine for its checkpoints and rewind floor. Returns its position."""
        _, position = await self._call_and_refresh(lambda: None)
        return position

    async def _call_and_refresh(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
        """Calls `function`, then reads the engine's position, checkpoints and rewind floor in the same visit to its
        thread.

        Returns the result and the position.
        """

        def both() -> tuple[T, int, tuple[int, ...], int]:
            result, engine = function(*args, **kwargs), self.engine
            return result, engine.position, engine.checkpoints, engine.rewind_floor

        result, position, self.checkpoints, self.rewind_floor = await self.call(both)
        return result, position

    async def reset(self) -> None:
        """Empties the engine. Raises EngineLost if that fails."""
        self.conversation = LiveRows()
        try:
            await self.thread.run(self.engine.reset)
        except Exception as error:
            raise EngineLost("The engine cannot be made valid again; the server stops.") from error

    async def forget(self, keep_rows: int) -> None:
        """Cuts the live state to `keep_rows`, or to the last position before it that it can be cut to."""
        position = self.conversation.position
        kept = keep_rows
        if keep_rows < min(position, self.rewind_floor):
            kept = max((place for place in self.checkpoints if place <= keep_rows), default=0)
        if kept == 0:
            await self.reset()
        elif kept < position:
            await self.truncate(kept)
