"""A store of chunks and the threads that run its jobs, for an engine that polls.

    the engine's thread     offer, load, poll: decisions, never a file
    one thread              writes and removals, one job at a time
    one thread              loads, in their order; the calls of each on a few more

All methods are for one thread, and none but `drain` and `close` waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from parkd.store.chunks import Chunk, ChunkStore, Done, Key
from parkd.store.files.disk_jobs import MarkJob, ReadJob, RemoveJob, WriteJob, mark, on_pool, read, remove, write
from parkd.store.files.fs import FileSystem
from parkd_tier.files import put_file

log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 4
"""Calls of one job that run at once: enough to keep a drive busy while checksums are computed."""
MARK_STEP_S = 60.0
"""How often is looked whether last uses are to be written down."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load."""

    load: int
    is_right: bool
    """Every buffer has been filled with what was stored. Else their content is undefined."""
    bytes: int
    seconds: float


class Tier:
    """`store` belongs to it from now on, and so does `fs`."""

    def __init__(self, store: ChunkStore, fs: FileSystem, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._fs = fs
        self._monotonic = monotonic
        self._pool = ThreadPoolExecutor(CALLS_IN_FLIGHT, "parkd-tier")
        self._writer = ThreadPoolExecutor(1, "parkd-tier-write")
        self._reader = ThreadPoolExecutor(1, "parkd-tier-read")
        self._run_all = on_pool(self._pool)
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What the engine's thread has to note about jobs that ended on other threads."""
        self._is_writing = False
        self._loads = 0
        self._outcomes: list[Loaded | Done] = []
        self._mark_at_s = monotonic() + MARK_STEP_S

    @property
    def fs(self) -> FileSystem:
        """To read small files of it at the start."""
        return self._fs

    def has(self, key: Key) -> bool:
        return self.store.has(key)

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file, behind what is being written. A failure is only logged."""

        def write() -> None:
            try:
                put_file(self._fs, name, data)
            except OSError as error:
                log.warning("%s could not be written: %s", name, error)

        self._writer.submit(write)

    def follow(self, talk: str, chain: Iterable[Key]) -> None:
        """As of the store, like the next two."""
        self.store.follow(talk, chain)

    def offer(self, number: int, talk: str, chunks: Sequence[Chunk]) -> None:
        self.store.offer(number, talk, chunks)
        self._go_on()

    def ended(self, talk: str) -> None:
        self.store.ended(talk)
        self._go_on()

    def load(self, number: int, chunks: Sequence[Chunk]) -> None:
        """Begins to fill buffers. Nobody may use them before `poll` has told how it ended."""
        began_s = self._monotonic()
        job = self.store.begin_read(chunks)
        if job is None:
            self._outcomes.append(Loaded(number, False, 0, 0.0))
            return
        self._loads += 1
        self._reader.submit(self._read, number, job, began_s)

    def poll(self) -> list[Loaded | Done]:
        """What ended since the last call."""
        while True:
            try:
                self._ended.get_nowait()()
            except Empty:
                break
        self._go_on()
        self._outcomes += self.store.take_done()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def is_busy(self) -> bool:
        """Files are being read or written."""
        return self._is_writing or self._loads > 0

    def drain(self) -> None:
        """Waits until nothing uses the engine's memory. How everything ended is among what the next `poll` returns."""
        self.store.write_all()
        self._go_on()
        while self.is_busy:
            self._ended.get()()
            self._go_on()

    def close(self) -> None:
        """Waits for what is under way, writes down last uses, and gives the directory up."""
        self.drain()
        marks = self.store.next_marks(stops=True)
        if marks is not None:
            mark(self._fs, marks)
        for pool in (self._writer, self._reader, self._pool):
            pool.shutdown()
        self._fs.close()

    def _go_on(self) -> None:
        """Hands the next job to the writer, if it is free."""
        if self._is_writing:
            return
        job: WriteJob | RemoveJob | MarkJob | None = self.store.next_job()
        if job is None and self._monotonic() > self._mark_at_s:
            self._mark_at_s = self._monotonic() + MARK_STEP_S
            job = self.store.next_marks()
        if job is not None:
            self._is_writing = True
            self._writer.submit(self._write, job)

    def _write(self, job: WriteJob | RemoveJob | MarkJob) -> None:
        error: Exception | None = None
        left: tuple[str, ...] = ()
        try:
            if isinstance(job, RemoveJob):
                left = remove(self._fs, job)
            elif isinstance(job, MarkJob):
                mark(self._fs, job)
            else:
                write(self._fs, job, self._run_all)
        except Exception as raised:
            error = raised
        self._ended.put(partial(self._written, job, error, left))

    def _written(self, job: WriteJob | RemoveJob | MarkJob, error: Exception | None, left: tuple[str, ...]) -> None:
        self._is_writing = False
        if not isinstance(job, MarkJob):
            self.store.finished(job, error, left)

    def _read(self, number: int, job: ReadJob, began_s: float) -> None:
        error: Exception | None = None
        try:
            read(self._fs, job, self._run_all)
        except Exception as raised:
            error = raised
        self._ended.put(partial(self._filled, number, job, began_s, error))

    def _filled(self, number: int, job: ReadJob, began_s: float, error: Exception | None) -> None:
        self._loads -= 1
        self.store.finished_read(job, error)
        took_s = self._monotonic() - began_s
        self._outcomes.append(Loaded(number, error is None, job.bytes if error is None else 0, took_s))
