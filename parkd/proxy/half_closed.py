"""Answers clients that close their sending side behind the request (`nc -N`, `shutdown(SHUT_WR)`), and still notices
those that leave.

To this side of a connection both look the same: the client will send no more. Only what is sent to it tells them apart:
a client that has left refuses it, and the next write fails. So as long as no answer has begun, `100 Continue` is sent
some times, which clients skip (RFC 9110, 15.2.1):

    request --> | end of input         | answer
                | 100 ..... 100 .. 100 |
                     refused: it left

Once an answer has begun, nothing can be sent in between, and the end of input means that the client left: one that
closes its side does so behind its request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PROBES_S = (0.02, 0.2, 1.0)
"""After the first, which is sent at once: how long each later one waits. A client here refuses within microseconds, one
far away within a second."""


class HalfClosedProtocol(H11Protocol):
    """uvicorn's protocol, which closes a connection at the end of its input."""

    def eof_received(self) -> Any:
        """True: the transport stays open for the answer."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or cycle.response_complete:
            return None
        cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.1":  # older clients know no answer before the answer
            self._probe(cycle, 0)
        return True

    def _probe(self, cycle: Any, number: int) -> None:
        """Lets the transport notice that the client has left, which then ends the request as ever."""
        if cycle.response_started or self.transport.is_closing() or self.conn.our_state is not h11.SEND_RESPONSE:
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        if number < len(PROBES_S):
            asyncio.get_running_loop().call_later(PROBES_S[number], self._probe, cycle, number + 1)
