"""Which turn has which seat of the engine.

    free    what was live stays so, until a turn takes the seat or its rows
    held    by the turn that is under way there; the engine gives none of its rows to another

Lives on the event loop. Who waits for the engine between looking at free seats and taking one holds `changing`
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from parkd.lane.live_conversation import LiveConversation
from parkd.lane.turn import Turn


class Seats:
    """The live conversations in the engine's seats."""

    def __init__(self, lives: Sequence[LiveConversation]) -> None:
        self._lives = list(lives)
        """The least recently used first."""
        self._turns: dict[LiveConversation, Turn] = {}
        self.changing = anyio.Lock()

    @property
    def all(self) -> tuple[LiveConversation, ...]:
        """The least recently used first."""
        return tuple(self._lives)

    @property
    def free(self) -> tuple[LiveConversation, ...]:
        """The least recently used first."""
        return tuple(live for live in self._lives if live not in self._turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Those that have a seat."""
        return tuple(self._turns.values())

    def of(self, turn: Turn) -> LiveConversation | None:
        """The seat of a turn; None: it has none now."""
        return next((live for live, holder in self._turns.items() if holder is turn), None)

    def turn_in(self, live: LiveConversation) -> Turn | None:
        return self._turns.get(live)

    def take(self, live: LiveConversation, turn: Turn, *, keeps: bool = True) -> None:
        """Gives a free seat to a turn that has none. Unless it `keeps` rows that are live there, others may have them
        until `hold`: a turn has no more rows than it was promised, and what it finds in its seat may be more."""
        assert live not in self._turns
        assert self.of(turn) is None
        self._turns[live] = turn
        live.seat.is_held = keeps
        self._lives.remove(live)
        self._lives.append(live)

    def hold(self, live: LiveConversation) -> None:
        """What is live in a seat is its turn's from now on."""
        live.seat.is_held = True

    def give_back(self, turn: Turn) -> None:
        """Frees the turn's seat, if it has one."""
        live = self.of(turn)
        if live is not None:
            del self._turns[live]
            live.seat.is_held = False
