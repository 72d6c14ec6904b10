"""Listens to the KV events of a server, on a thread of its own.

    SUB socket     [topic, number, batch] ... [topic, number, batch]      as they happen
    DEALER socket  [number] -> [topic, number, batch] ... [topic, -1]     what was missed, if the server repeats it

Servers older than vLLM 0.32 repeat without a topic.

Numbers ascend by one. If some are missing, they are asked for; if the server does not repeat them, what was known is
forgotten, since it may have given up any of it. A lower number of a later time is another server's start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from parkd.engine_adapter.remote.held import HeldBlocks
from parkd.engine_adapter.remote.kv_events import events_of, time_of
from parkd.errors import ConfigError

log = logging.getLogger(__name__)

WAIT_MS = 200
"""How often the thread looks whether it is to end."""
REPLAY_WAIT_MS = 2000
"""Longest wait for the next of the events that are repeated."""
MOST_UNREAD = 100_000
"""Messages that wait for the thread; the server's own default. More are dropped, and then missing."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
CLOSE_WAIT_S = 5.0


class KvListener:
    """`start` begins to listen, `close` ends it."""

    def __init__(self, held: HeldBlocks, endpoint: str, replay_endpoint: str | None = None) -> None:
        """Raises ConfigError if what it needs is not installed, or an address is none."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError("--upstream-events needs the extra kv-events: pip install parkd[kv-events]") from error
        self._zmq = zmq
        self._decode = msgspec.msgpack.decode
        self._unreadable = (msgspec.DecodeError, UnicodeDecodeError)
        self._held = held
        self._next = 0
        """The number that comes next, if nothing is missing."""
        self._at_s = 0.0
        """The time of the newest batch, by the server's clock."""
        self._ends = threading.Event()
        self._context = zmq.Context()
        try:
            self._events = self._context.socket(zmq.SUB)
            self._events.set_hwm(MOST_UNREAD)
            self._events.subscribe(b"")
            self._events.connect(endpoint)
            self._replay_endpoint = replay_endpoint
            if replay_endpoint is not None:
                self._asking().close(linger=0)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--upstream-events: {endpoint} {replay_endpoint or ''} cannot be listened to ({error}). Name it as "
                f"tcp://HOST:PORT."
            ) from error
        self._thread = threading.Thread(target=self._run, name="parkd-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """May be called again."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WAIT_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            self._repeat()  # what was before anybody listened
            while not self._ends.is_set():
                if self._events.poll(WAIT_MS):
                    frames = self._events.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == NUMBER_BYTES:
                        self._arrived(int.from_bytes(frames[1], "big"), frames[2])
        except self._zmq.ZMQError as error:
            if not self._ends.is_set():
                log.warning("the upstream server's KV events cannot be listened to any more: %s", error)
                self._held.forget()

    def _arrived(self, number: int, batch: bytes) -> None:
        if number < self._next:
            if time_of(self._decoded(batch)) <= self._at_s:
                return  # it was among those that were repeated
            log.info("the upstream server counts its KV events anew: what was known of it is forgotten")
            self._held.forget()
            self._next = 0
        if number > self._next and (not self._repeat() or self._next < number):
            if self._next:
                log.warning("KV events %d to %d of the upstream server were lost", self._next, number - 1)
                self._held.forget()
            self._next = number
        if number == self._next:
            self._take(number, batch)

    def _take(self, number: int, batch: bytes) -> None:
        decoded = self._decoded(batch)
        self._next, self._at_s = number + 1, max(self._at_s, time_of(decoded))
        if decoded is None:
            log.warning("an upstream server's KV event cannot be read, so what it holds is not known any more")
            self._held.forget()
        for event in events_of(decoded):
            self._held.take(event)

    def _decoded(self, batch: bytes) -> Any:
        """None if it cannot be read."""
        try:
            return self._decode(batch)
        except self._unreadable:
            return None

    def _repeat(self) -> bool:
        """Takes what the server repeats from the next number on. False if it repeats nothing."""
        if self._replay_endpoint is None:
            return False
        taken = False
        for number, batch in self._repeated(self._next):
            if number > self._next:
                if self._next:
                    self._held.forget()  # those between are not kept by the server any more
                self._next = number
            if number == self._next:
                self._take(number, batch)
                taken = True
        return taken

    def _repeated(self, first: int) -> Iterator[tuple[int, bytes]]:
        asking = self._asking()
        try:
            asking.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while not self._ends.is_set() and asking.poll(REPLAY_WAIT_MS):
                frames = asking.recv_multipart()
                number, batch = frames[-2:] if len(frames) in (3, 4) else (END, b"")
                if len(number) != NUMBER_BYTES or number == END:
                    return
                yield int.from_bytes(number, "big"), batch
        finally:
            asking.close(linger=0)

    def _asking(self) -> Any:
        assert self._replay_endpoint is not None
        socket = self._context.socket(self._zmq.DEALER)
        socket.connect(self._replay_endpoint)
        return socket
