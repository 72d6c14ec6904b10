"""Closes connections without a request: limits how long they stay open, and how many there are.

    opened --headers--> request --answer--> idle --headers--> request
    |<-- here -->|                          |<-- here -->|

uvicorn closes a connection that is idle between two requests. But it waits forever for the headers of the first
request, and for those of a later request once their first byte has arrived. Bodies have their own deadline
(`requests.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

MOST_WITHOUT_REQUEST = 512
"""Half of the usual limit of open files per process."""
LEAST_WAIT_S = 1.0
"""Every connection may stay open at least this long, however many there are: if many clients connect at once, reading
their requests takes a moment."""


class Connection(Protocol):
    """The part of uvicorn's protocol classes that is used here."""

    transport: asyncio.Transport
    cycle: Any
    """The last request, None before the first. Its `response_complete` is true once the answer is sent."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """The time in which a connection has no request."""

    behind: Any
    """The previous request, which identifies the wait."""
    since_s: float


class Lobby:
    """Closes connections that are too long without a request. Lives on the event loop."""

    def __init__(self, deadline_s: float, most: int = MOST_WITHOUT_REQUEST) -> None:
        self._deadline_s = deadline_s
        self._most = most
        self._waits: dict[Connection, _Wait] = {}

    def sweep(self, connections: Iterable[Connection], now_s: float) -> None:
        """Called at regular intervals with all open connections."""
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
        """Closes the oldest waiting connections if there are too many, so that new clients can connect."""
        oldest = sorted(self._waits, key=lambda connection: self._waits[connection].since_s)
        surplus = oldest[: max(0, len(oldest) - self._most)]
        gone = [connection for connection in surplus if now_s - self._waits[connection].since_s >= LEAST_WAIT_S]
        if gone:
            log.warning(
                "closed %d connections without a request, because more than %d were open", len(gone), self._most
            )
        self._close(gone)

    def _close(self, connections: Collection[Connection]) -> None:
        for connection in connections:
            del self._waits[connection]
            connection.transport.close()
