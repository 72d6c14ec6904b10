"""Whether the server that answers is the one that was looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable

from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.llama_server.start import (
    Incarnation,
    LlamaServerConfig,
    Upstream,
    fingerprint_of,
    incarnation_of,
)
from parkd.errors import EngineLost

log = logging.getLogger(__name__)

FRESH_S = 1.0
"""A server that answered so lately, on a connection that still stands, is the one that it was."""


class RunWatch:
    """Remembers one run of the server. Its connections end with it, so a new one may lead to another run."""

    def __init__(self, upstream: Upstream, config: LlamaServerConfig, monotonic: Callable[[], float]) -> None:
        self._client: UpstreamClient = upstream.client
        self._config = config
        self._info = upstream.info
        self._monotonic = monotonic
        self.run: Incarnation = upstream.incarnation
        self._heard_s = monotonic()
        self.in_doubt = False
        """Something was not as expected: it is to be looked at before anything is believed."""
        self._connections = upstream.client.connections

    @property
    def is_fresh(self) -> bool:
        same = self._client.connections == self._connections and not self.in_doubt
        return same and self._monotonic() - self._heard_s < FRESH_S

    def heard(self) -> None:
        """An answer ended well."""
        self._heard_s = self._monotonic()

    def doubt(self) -> None:
        self.in_doubt = True

    def look(self) -> bool:
        """True if this is another run, which knows nothing of what was live. Two requests.

        Raises UpstreamFailed; EngineLost if it serves something else now: what is parked would not fit it.
        """
        now = incarnation_of(self._client)
        self._connections = self._client.connections
        self.heard()
        self.in_doubt = False
        if now == self.run:
            return False
        log.warning("the llama-server was started anew, or changed; what was live there is forgotten")
        self.in_doubt = True
        fingerprint = fingerprint_of(now, self._client.models(), self._config.cache_dir, None)
        if now.context_tokens < self._info.context_tokens or fingerprint != self._info.fingerprint:
            raise EngineLost(
                "The llama-server now serves another model, adapter or context than when parkd was started: start "
                "parkd again."
            )
        self.run, self.in_doubt = now, False
        return True
