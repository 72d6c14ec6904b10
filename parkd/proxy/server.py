"""The server process: uvicorn over the app, with an orderly end.

SIGTERM -> no new connections, waiting requests get 503, the running answer ends or is cut at the deadline -> exit 0
engine lost -> the same without a running answer -> exit 1
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import uvicorn
from starlette.applications import Starlette

from parkd.proxy.app import CUT_WAIT_S, Proxy, create_app
from parkd.proxy.config import Services
from parkd.proxy.connections import Connection, Lobby

log = logging.getLogger(__name__)

EXIT_LOST = 1
TICKS_A_SWEEP = 10
"""uvicorn ticks every tenth of a second."""
EXIT_MARGIN_S = 2 * CUT_WAIT_S
"""Over the proxy's own deadline, so that uvicorn cuts only what the proxy could not."""


class CutRequests(logging.Filter):
    """uvicorn reports a request that it cancels as an exception of the application, with a traceback. It cancels those
    that still run when the process is told a second time to stop, or at the deadline: one line says so."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, asyncio.CancelledError):
            # the application's own life is cancelled too then, and told as a text
            return not record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError")
        log.warning("a running request was cut, since the server stops")
        return False


class UpgradeAdvice(logging.Filter):
    """uvicorn reports a request for another protocol as a fault of the installation, and says what to install. Such a
    request is answered over HTTP (`guard.http_error`), which says what to know of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Unsupported upgrade request", "No supported WebSocket library"))


class WritesToTheGone(logging.Filter):
    """asyncio warns of each write to a connection that was reset, until its end is told to who writes. That the client
    left stands in the turn's own line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("socket.send() raised exception")


class Server(uvicorn.Server):
    """`on_started` is told the base URL once requests are answered."""

    def __init__(
        self, services: Services, *, app: Starlette | None = None, on_started: Callable[[str], None] = lambda _url: None
    ) -> None:
        app = app or create_app(services)
        self.proxy: Proxy = app.state.parkd
        self._on_started = on_started
        self._lobby = Lobby(services.config.idle_connection_s)
        super().__init__(
            uvicorn.Config(
                app,
                host=services.config.host,
                port=services.config.port,
                lifespan="on",
                # Also where httptools is installed: with it a request that offers HTTP/2, as in Java, loses its body.
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=services.config.idle_connection_s,
                timeout_graceful_shutdown=int(services.config.shutdown_deadline_s + EXIT_MARGIN_S),
            )
        )
        self.proxy.on_lost = self._stop

    @property
    def exit_code(self) -> int:
        return 0 if self.proxy.lost is None and self.started else EXIT_LOST

    @property
    def url(self) -> str:
        """Where it listens, with the real port."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """A first signal asks, a second one insists. uvicorn would raise it again at the end; here the process ends
        with a code instead."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started(self.url)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_A_SWEEP == 0:
            connections = cast(set[Connection], self.server_state.connections)
            self._lobby.sweep(connections, self.proxy.services.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.proxy.begin_shutdown()
        await super().shutdown(sockets)

    def _stop(self) -> None:
        self.should_exit = True


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries log of events that are no faults, or that are told better elsewhere."""
    filters = (("uvicorn.error", CutRequests()), ("uvicorn.error", UpgradeAdvice()), ("asyncio", WritesToTheGone()))
    for name, words in filters:
        logging.getLogger(name).addFilter(words)
    try:
        yield
    finally:
        for name, words in filters:
            logging.getLogger(name).removeFilter(words)


def leave_out_of_collections() -> None:
    """Takes what exists by now (libraries, the model's objects) out of Python's garbage collection: it stays as long as
    the process, and going through all of it would hold every stream and `/health` for the time of one full collection.
    """
    gc.collect()
    gc.freeze()


def serve(
    services: Services, *, listener: socket.socket | None = None, on_started: Callable[[str], None] = lambda _url: None
) -> int:
    """Serves until told to stop, on `listener` or on the configured address. Returns the process's exit code."""

    def started(url: str) -> None:
        leave_out_of_collections()
        on_started(url)

    server = Server(services, on_started=started)
    with quiet():
        server.run(sockets=None if listener is None else [listener])
    return server.exit_code
