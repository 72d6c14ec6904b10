"""The file of the ledger, and the thread that it belongs to.

    note ──bounded queue──> thread ──> SQLite        never waits, and fails no turn
    ask  ──the same queue─> thread ──> answer

The ledger is a help, not a need: a file that is damaged, of another program, locked or full is left out from then on,
with one line in the log. The oldest turns make room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from parkd.ledger.bill import Sum
from parkd.ledger.turns import LedgerTurn
from parkd.private_files import private_opener

log = logging.getLogger(__name__)

LIMIT_BYTES = 64 << 20
"""Most bytes of the file."""
QUEUE_LIMIT = 1024
"""Turns and questions that wait for the thread."""
BATCH_LIMIT = 64
"""Turns that one transaction writes."""
ROOM_SHARE = 0.9
"""From this share of the limit on, the oldest tenth of the turns is removed."""
REMOVED_SHARE = 0.1
LOCK_WAIT_S = 2.0
STOP_WAIT_S = 5.0
ROWS_LIMIT = 500
"""Most turns in one answer."""
GROUPS_LIMIT = 100
"""Most clients, or days, in one answer: those that cost most."""
APPLICATION_ID = 0x7061726B
"""SQLite's field for the program that a file belongs to: `park`."""
VERSION = 1

_COLUMNS = tuple(field.name for field in dataclasses.fields(LedgerTurn))
_TEXTS = frozenset(field.name for field in dataclasses.fields(LedgerTurn) if field.type == "str")
_SCHEMA = (
    f"CREATE TABLE turns ({', '.join(name + (' TEXT' if name in _TEXTS else ' NUMERIC') for name in _COLUMNS)})",
    "CREATE INDEX turns_at ON turns (at_s)",
)
# Statements are made of this module's own names; what is asked for stands in their parameters.
_INSERT = f"INSERT INTO turns ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608
_SUMS = (
    "count(*), total(prompt_tokens), total(reused_tokens), total(read_tokens), total(needless_tokens), total(read_s), "
    "total(needless_s)"
)
GROUPS = {"cause": "cause", "client": "client", "day": "date(at_s, 'unixepoch')"}
"""By what turns are summed."""

T = TypeVar("T")
MakeTurn = Callable[[], LedgerTurn]


class LedgerLost(Exception):
    """The ledger was left out."""


class _Question(Generic[T]):
    def __init__(self, ask: Callable[[sqlite3.Connection], T]) -> None:
        self.ask = ask
        self.answer: Future[T] = Future()


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerStats:
    turns_total: int
    dropped_total: int
    """Turns that were not written: the thread was behind, or the row could not be made."""
    is_lost: bool


class Ledger:
    """`note` and `ask` are called from any thread; everything else happens on the ledger's own."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._work: queue.Queue[MakeTurn | _Question[Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._lost = False
        self._turns = self._dropped = 0
        self._thread = threading.Thread(target=self._serve, name="parkd-ledger", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._lost

    def stats(self) -> LedgerStats:
        return LedgerStats(self._turns, self._dropped, self._lost)

    def note(self, make: MakeTurn) -> None:
        """Writes a turn; `make` is called on the ledger's thread. Never waits: if the thread is behind, the turn is
        left out."""
        if self._lost:
            return
        try:
            self._work.put_nowait(make)
        except queue.Full:
            self._dropped += 1

    def turns(
        self,
        since_s: float,
        limit: int,
        *,
        owner: str | None = None,
        conversation: str | None = None,
        request_id: str | None = None,
    ) -> Future[list[LedgerTurn]]:
        """The latest turns, the newest first; of one key, or of all. The future raises LedgerLost."""
        wanted: list[tuple[str, Any]] = [("at_s >= ?", since_s)]
        named = (("owner", owner), ("conversation", conversation), ("request_id", request_id))
        wanted += [(f"{name} = ?", value) for name, value in named if value is not None]
        where, values = " AND ".join(text for text, _ in wanted), [value for _, value in wanted]
        query = f"SELECT {', '.join(_COLUMNS)} FROM turns WHERE {where} ORDER BY at_s DESC, rowid DESC LIMIT ?"  # noqa: S608

        def ask(db: sqlite3.Connection) -> list[LedgerTurn]:
            return [LedgerTurn(*row) for row in db.execute(query, (*values, min(limit, ROWS_LIMIT)))]

        return self.ask(ask)

    def sums(self, since_s: float, *, owner: str | None = None) -> Future[dict[str, list[Sum]]]:
        """The sums over all turns (`total`) and by each of GROUPS, what cost most first. The future raises
        LedgerLost."""
        where, values = ("at_s >= ?", [since_s]) if owner is None else ("at_s >= ? AND owner = ?", [since_s, owner])

        def ask(db: sqlite3.Connection) -> dict[str, list[Sum]]:
            total = f"SELECT '', {_SUMS} FROM turns WHERE {where}"  # noqa: S608
            found = {"total": [_sum(row) for row in db.execute(total, values)]}
            for name, by in GROUPS.items():
                query = (
                    f"SELECT {by}, {_SUMS} FROM turns WHERE {where} GROUP BY 1 "  # noqa: S608
                    f"ORDER BY total(needless_s) DESC, count(*) DESC LIMIT {GROUPS_LIMIT}"
                )
                found[name] = [_sum(row) for row in db.execute(query, values)]
            return found

        return self.ask(ask)

    def rules(self, since_s: float, *, owner: str | None = None) -> Future[list[tuple[str, int, int, float, str]]]:
        """The rules that were proposed, as JSON, each with its turns, their needless tokens and seconds, and the id of
        the latest request that proposed it; what would save most first. The future raises LedgerLost."""
        where, values = ("at_s >= ?", [since_s]) if owner is None else ("at_s >= ? AND owner = ?", [since_s, owner])
        query = (
            "SELECT rule, count(*), total(needless_tokens), total(needless_s), request_id, max(at_s) "  # noqa: S608
            f"FROM turns WHERE rule != '' AND {where} GROUP BY rule ORDER BY 4 DESC, 2 DESC LIMIT {GROUPS_LIMIT}"
        )

        def ask(db: sqlite3.Connection) -> list[tuple[str, int, int, float, str]]:
            rows = db.execute(query, values)
            return [(rule, turns, int(tokens), seconds, name) for rule, turns, tokens, seconds, name, _ in rows]

        return self.ask(ask)

    def forget(self, conversation: str, owner: str | None = None) -> None:
        """Removes the turns of a conversation: those of one key, or, if it is None, of all."""

        def ask(db: sqlite3.Connection) -> None:
            db.execute(
                "DELETE FROM turns WHERE conversation = ? AND (? IS NULL OR owner = ?)", (conversation, owner, owner)
            )

        self.ask(ask)

    def ask(self, ask: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Runs a question on the thread, after all turns that were noted before."""
        question = _Question(ask)
        if self._lost:
            question.answer.set_exception(LedgerLost())
            return question.answer
        try:
            self._work.put_nowait(question)
        except queue.Full:
            question.answer.set_exception(LedgerLost())
        return question.answer

    def close(self) -> None:
        """Writes what waits and ends the thread, within a deadline."""
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=STOP_WAIT_S)
        self._thread.join(STOP_WAIT_S)

    # -- on the thread --

    def _serve(self) -> None:
        db: sqlite3.Connection | None = None
        try:
            db = self._open()
        except (OSError, sqlite3.Error, ValueError) as error:
            self._give_up(error)
        ends = False
        while not ends:
            batch = [self._work.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH_LIMIT:
                    batch.append(self._work.get_nowait())
            ends = None in batch
            questions = [item for item in batch if isinstance(item, _Question)]
            turns = [item for item in batch if item is not None and not isinstance(item, _Question)]
            if db is not None and not self._lost:
                self._write(db, turns)
            for question in questions:
                self._answer(db, question)
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(private_opener(str(self.path), os.O_RDWR | os.O_CREAT))  # SQLite gives its other files the same mode
        db = sqlite3.connect(self.path, timeout=LOCK_WAIT_S, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")
            known = db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0]
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                db.execute("BEGIN IMMEDIATE")
                for statement in (
                    *_SCHEMA,
                    f"PRAGMA application_id = {APPLICATION_ID}",
                    f"PRAGMA user_version = {VERSION}",
                ):
                    db.execute(statement)
                db.execute("COMMIT")
            elif known != (APPLICATION_ID, VERSION):
                raise ValueError("it is not a ledger of this version of parkd")
            page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
            db.execute(f"PRAGMA max_page_count = {max(1, self._limit_bytes // page_bytes)}")
            return db
        except BaseException:
            db.close()
            raise

    def _write(self, db: sqlite3.Connection, makes: Sequence[MakeTurn]) -> None:
        rows = []
        for make in makes:
            try:
                rows.append(dataclasses.astuple(make()))
            except Exception:
                log.exception("a turn could not be written to the ledger")
                self._dropped += 1
        if not rows:
            return
        try:
            self._make_room(db)
            db.execute("BEGIN IMMEDIATE")
            db.executemany(_INSERT, rows)
            db.execute("COMMIT")
            self._turns += len(rows)
        except sqlite3.Error as error:
            self._dropped += len(rows)
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            self._give_up(error)

    def _make_room(self, db: sqlite3.Connection) -> None:
        pages, free, most = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "max_page_count")
        )
        if pages - free < ROOM_SHARE * most:
            return
        db.execute("BEGIN IMMEDIATE")
        count = db.execute("SELECT count(*) FROM turns").fetchone()[0]
        db.execute(
            "DELETE FROM turns WHERE rowid IN (SELECT rowid FROM turns ORDER BY rowid LIMIT ?)",
            (max(1, int(REMOVED_SHARE * count)),),
        )
        db.execute("COMMIT")

    def _answer(self, db: sqlite3.Connection | None, question: _Question[Any]) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        if db is None or self._lost:
            question.answer.set_exception(LedgerLost())
            return
        try:
            question.answer.set_result(question.ask(db))
        except sqlite3.Error as error:
            question.answer.set_exception(LedgerLost())
            self._give_up(error)
        except Exception as error:
            question.answer.set_exception(error)

    def _give_up(self, error: Exception) -> None:
        if not self._lost:
            log.warning("the ledger %s is left out from now on: %s", self.path, error)
        self._lost = True


def remove_ledger(path: Path) -> None:
    """Removes a ledger that no server uses, and the files that SQLite keeps beside it. Raises OSError."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _sum(row: tuple[Any, ...]) -> Sum:
    group, turns, prompt, reused, read, needless, read_s, needless_s = row
    return Sum(str(group or ""), turns, int(prompt), int(reused), int(read), int(needless), read_s, needless_s)
