"""The server process: runs the app in uvicorn, and shuts down in order.

SIGTERM     -> no new connections, waiting requests get 503, the running answer ends or is cut at the deadline -> exit 0
engine lost -> the same, without a running answer -> exit 1
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import uvicorn

from parkd.proxy.app import create_app
from parkd.proxy.config import Services
from parkd.proxy.connections import Connection, Lobby
from parkd.proxy.half_closed import HalfClosedProtocol
from parkd.proxy.proxy import CUT_WAIT_S, Proxy

log = logging.getLogger(__name__)

EXIT_LOST = 1
ACCEPTS_A_TURN = 8
"""New connections that the event loop takes before everything else has its turn again. A request takes some thirty
turns of the loop: with asyncio's own bound, the length of the queue, a flood made it wait for 60,000 connections."""
CONNECTION_QUEUE = 2048
"""New connections that the system keeps for the event loop."""
TICKS_A_SWEEP = 10
"""uvicorn calls `on_tick` every tenth of a second."""
EXIT_MARGIN_S = 2 * CUT_WAIT_S
"""Added to the proxy's own shutdown deadline, so that uvicorn cancels only requests that the proxy could not end."""


class CutRequests(logging.Filter):
    """Replaces uvicorn's traceback for a request that it cancels by one line. uvicorn cancels running requests on a
    second stop signal, or at the deadline, and would report each as an exception of the application."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, asyncio.CancelledError):
            # uvicorn also cancels the application's lifespan then, and logs that traceback as text.
            return not record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError")
        log.warning("a running request was cut because the server stops")
        return False


class UpgradeAdvice(logging.Filter):
    """Drops uvicorn's warning about requests to upgrade the protocol, which advises installing a WebSocket library.
    `guard.http_error` answers such a request over HTTP, with the right advice."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Unsupported upgrade request", "No supported WebSocket library"))


class WritesToTheGone(logging.Filter):
    """Drops asyncio's warnings about writes to a connection that the client has reset, which repeat until the writer
    notices. The turn's log line says that the client left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("socket.send() raised exception")


class Server(uvicorn.Server):
    """uvicorn's server over one `Proxy`. Calls `on_started` with the base URL as soon as it answers requests."""

    def __init__(self, services: Services, *, on_started: Callable[[str], None] = lambda _url: None) -> None:
        app = create_app(services)
        self.proxy: Proxy = app.state.parkd
        self._on_started = on_started
        self._lobby = Lobby(services.config.idle_connection_s)
        super().__init__(
            uvicorn.Config(
                app,
                host=services.config.host,
                port=services.config.port,
                lifespan="on",
                # h11, and never httptools, even if it is installed: with it, a request that offers an upgrade to
                # HTTP/2, as Java's client does, loses its body.
                http=HalfClosedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                backlog=ACCEPTS_A_TURN,
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
        """The base URL, with the port that it really listens on."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also takes SIGHUP for a stop, since its terminal is gone; not where it is ignored (nohup)."""
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            if hangup is None or not is_main or signal.getsignal(hangup) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """The first signal requests an orderly stop, the second one forces it. Unlike uvicorn's handler, this does not
        raise the signal again at the end: the process ends with an exit code."""
        if self.should_exit:
            self.force_exit = True
            self.proxy.stops_at_once = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                # asyncio has one number for both; the queue can be lengthened later, through any handle of the socket.
                with listener.dup() as handle:
                    handle.listen(CONNECTION_QUEUE)
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
    """A context without libraries' log lines about events that are not faults, or that parkd reports itself."""
    filters = (("uvicorn.error", CutRequests()), ("uvicorn.error", UpgradeAdvice()), ("asyncio", WritesToTheGone()))
    for name, words in filters:
        logging.getLogger(name).addFilter(words)
    try:
        yield
    finally:
        for name, words in filters:
            logging.getLogger(name).removeFilter(words)


def leave_out_of_collections() -> None:
    """Excludes all present objects (libraries, the model's objects) from Python's garbage collection. They live as long
    as the process, and a full collection over them would block all streams and `/health` while it runs."""
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
