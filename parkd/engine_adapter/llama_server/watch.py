"""Detects that the llama-server was restarted or replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable

from parkd.config import UpstreamConfig
from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.llama_server.start import (
    Incarnation,
    Upstream,
    fingerprint_of,
    incarnation_of,
)
from parkd.errors import EngineLost

log = logging.getLogger(__name__)

FRESH_S = 1.0
"""For this long after an answer, a server whose connections are still open is assumed not to have restarted."""


class RunWatch:
    """Remembers one run of the server. Connections close when it ends, so a new connection may lead to a new run."""

    def __init__(self, upstream: Upstream, config: UpstreamConfig, monotonic: Callable[[], float]) -> None:
        self._client: UpstreamClient = upstream.client
        self._config = config
        self._info = upstream.info
        self._monotonic = monotonic
        self.run: Incarnation = upstream.incarnation
        self.slots_before = upstream.incarnation.slots
        """Slots of the run before this one, or of this one if it is the first."""
        self.restarts = 0
        self._heard_s = monotonic()
        self.in_doubt = False
        """Something unexpected happened: the server must be checked before its slots are trusted."""
        self._connections = upstream.client.connections

    @property
    def is_fresh(self) -> bool:
        same = self._client.connections == self._connections and not self.in_doubt
        return same and self._monotonic() - self._heard_s < FRESH_S

    def heard(self) -> None:
        """Notes that the server has just completed an answer."""
        self._heard_s = self._monotonic()

    def doubt(self) -> None:
        self.in_doubt = True

    def look(self) -> bool:
        """Checks the server, with two requests. Returns True if this is a new run, whose slots hold nothing known.

        Raises UpstreamFailed, and EngineLost if it now serves something that the parked state does not fit.
        """
        now = incarnation_of(self._client)
        self._connections = self._client.connections
        self.heard()
        self.in_doubt = False
        if now == self.run:
            return False
        log.warning("the llama-server was restarted or changed; its live conversations are forgotten")
        self.in_doubt = True
        fingerprint = fingerprint_of(now, self._client.models(), self._config.cache_dir, None)
        if now.context_tokens < self._info.context_tokens or fingerprint != self._info.fingerprint:
            raise EngineLost(
                "The llama-server now serves another model, adapter or context than when parkd was started: restart "
                "parkd."
            )
        self.slots_before, self.restarts = self.run.slots, self.restarts + 1
        self.run, self.in_doubt = now, False
        return True
