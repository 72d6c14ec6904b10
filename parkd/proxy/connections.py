"""Connections without a request: how long they may stay, and how many at once.

    opened --headers--> request --answer--> idle --headers--> request
    |<-- here -->|                          |<-- here -->|

uvicorn closes a connection that sends nothing between two requests. It waits without end for the headers of the first
one, and for those of a later one once their first byte came. A body has a deadline of its own (`requests.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

MOST_WITHOUT_REQUEST = 512
"""Half of the files that a process may have open by default on most systems."""
LEAST_WAIT_S = 1.0
"""So long each of them may stay, however many there are: clients that all come at once need a moment to be read."""


class Connection(Protocol):
    """What is used of uvicorn's protocol classes."""

    transport: asyncio.Transport
    cycle: Any
    """The last request on it, None before the first; its `response_complete` says that the answer is out."""


@dataclass(frozen=True, slots=True)
class _Wait:
    behind: Any
    """The request before it: another one means that it is another wait."""
    since_s: float


class Lobby:
    """Closes what stays too long without a request. Lives on the event loop."""

    def __init__(self, deadline_s: float, most: int = MOST_WITHOUT_REQUEST) -> None:
        self._deadline_s = deadline_s
        self._most = most
        self._waits: dict[Connection, _Wait] = {}

    def sweep(self, connections: Iterable[Connection], now_s: float) -> None:
        """Called every now and then with all that are open."""
        waits = {}
        for connection in connections:
            behind = connection.cycle
            if behind is None or behind.response_complete:
                known = self._waits.get(connection)
                waits[connection] = known if known and known.behind is behind else _Wait(behind, now_s)
        self._waits = waits
        self._close([one for one, wait in waits.items() if now_s - wait.since_s >= self._deadline_s])
        self._make_room(now_s)

    def _make_room(self, now_s: float) -> None:
        """The oldest go where there are too many, so that others can still come in."""
        oldest = sorted(self._waits, key=lambda connection: self._waits[connection].since_s)
        surplus = oldest[: max(0, len(oldest) - self._most)]
        gone = [connection for connection in surplus if now_s - self._waits[connection].since_s >= LEAST_WAIT_S]
        if gone:
            log.warning("closed %d connections on which no request came: more than %d are open", len(gone), self._most)
        self._close(gone)

    def _close(self, connections: Collection[Connection]) -> None:
        for connection in connections:
            del self._waits[connection]
            connection.transport.close()
