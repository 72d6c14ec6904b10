"""The ledger's file: what is written is told again, and no fault of it is anyone else's."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.errors import InvalidRequest
from parkd.ledger.bill import Price
from parkd.ledger.ledger import LIMIT_BYTES, QUEUE_LIMIT, ROWS_LIMIT, Ledger, LedgerLost
from parkd.ledger.since import since_s
from parkd.ledger.turns import LedgerTurn

WAIT_S = 10.0
DAY_S = 86400.0
TURN = LedgerTurn(
    at_s=1000.0,
    request_id="r1",
    owner="anna",
    conversation="c1",
    client="cli",
    key_name="anna",
    api="/v1/messages",
    cache="cold",
    prompt_tokens=100,
    reused_tokens=0,
    read_tokens=100,
    needless_tokens=60,
    output_tokens=5,
    wait_s=0.0,
    restore_s=0.0,
    read_s=2.0,
    needless_s=1.2,
    decode_s=0.5,
    end="stop",
    cause="clock",
    why="differs",
    place=12,
    segment="system",
    text="",
    known_text="",
    rule="",
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "state" / "ledger.sqlite3")
    yield ledger
    ledger.close()


def note(ledger: Ledger, *turns: LedgerTurn) -> None:
    for turn in turns:
        ledger.note(lambda turn=turn: turn)  # type: ignore[misc]


def names(ledger: Ledger, since: float = 0.0, limit: int = 100, **of: str) -> list[str]:
    return [turn.request_id for turn in ledger.turns(since, limit, **of).result(WAIT_S)]


def test_turns_are_told_as_they_were_noted_the_newest_first(ledger: Ledger) -> None:
    second = replace(TURN, at_s=2000.0, request_id="r2", owner="ben", conversation="c2", place=None)
    note(ledger, TURN, second)
    assert ledger.turns(0, 10).result(WAIT_S) == [second, TURN]
    assert names(ledger, 1500) == ["r2"]
    assert names(ledger, limit=1) == ["r2"]
    assert names(ledger, owner="anna") == ["r1"]
    assert names(ledger, conversation="c2") == ["r2"]
    assert names(ledger, request_id="r1") == ["r1"]
    ledger.forget("c1")
    assert names(ledger) == ["r2"]


def test_the_file_lasts_and_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ledger.sqlite3"
    first = Ledger(path)
    note(first, TURN)
    assert names(first) == ["r1"]
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    first.close()
    again = Ledger(path)
    assert again.turns(0, 10).result(WAIT_S) == [TURN]
    again.close()


def test_sums_are_those_of_the_rows(ledger: Ledger) -> None:
    other = replace(TURN, at_s=1000.0 + DAY_S, client="chat", cause="evicted", needless_tokens=10, needless_s=3.0)
    free = replace(TURN, client="chat", cause="", needless_tokens=0, needless_s=0.0, owner="ben")
    note(ledger, TURN, other, free)
    sums = ledger.sums(0).result(WAIT_S)
    (total,) = sums["total"]
    assert (total.turns, total.needless_tokens, total.read_tokens, total.read_s) == (3, 70, 300, 6.0)
    assert [(each.group, each.needless_s) for each in sums["cause"]] == [("evicted", 3.0), ("clock", 1.2), ("", 0.0)]
    assert [(each.group, each.turns) for each in sums["client"]] == [("chat", 2), ("cli", 1)]
    assert [(each.group, each.turns) for each in sums["day"]] == [("1970-01-02", 1), ("1970-01-01", 2)]
    assert ledger.sums(0, owner="ben").result(WAIT_S)["total"][0].turns == 1
    assert ledger.sums(9e9).result(WAIT_S)["total"][0].turns == 0


def test_rules_that_would_save_most_come_first(ledger: Ledger) -> None:
    one, other = replace(TURN, rule="{}", request_id="x"), replace(TURN, rule='{"a":1}', needless_s=9.0, at_s=5.0)
    note(ledger, TURN, one, replace(one, at_s=2000.0, request_id="y"), other)
    assert ledger.rules(0).result(WAIT_S) == [('{"a":1}', 1, 60, 9.0, "r1"), ("{}", 2, 120, 2.4, "y")]
    assert ledger.rules(0, owner="ben").result(WAIT_S) == []


def test_an_answer_is_bounded(ledger: Ledger) -> None:
    note(ledger, *(replace(TURN, request_id=f"r{n}") for n in range(ROWS_LIMIT + 20)))
    assert len(names(ledger, limit=10**6)) == ROWS_LIMIT


def test_the_oldest_make_room_and_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    limit, path = 256 * 1024, tmp_path / "ledger.sqlite3"
    ledger = Ledger(path, limit)
    for number in range(4000):
        while ledger._work.qsize() > QUEUE_LIMIT // 2:
            threading.Event().wait(0.001)
        note(ledger, replace(TURN, at_s=float(number), request_id=f"r{number}", why="x" * 200))
    kept = names(ledger)
    assert kept[0] == "r3999"
    assert ledger.stats().turns_total == 4000
    assert not ledger.is_lost
    ledger.close()
    assert path.stat().st_size <= limit
    with contextlib.closing(sqlite3.connect(path)) as db:
        oldest, count = db.execute("SELECT min(at_s), count(*) FROM turns").fetchone()
    assert (oldest, count) == (4000 - count, count), "what is left are the latest, without gaps"
    assert count > 300


FAULTS = ("damaged", "of another program", "of another version", "a link", "a directory", "read-only", "full", "locked")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_be_used_is_left_out_with_one_line(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, limit, lock = tmp_path / "ledger.sqlite3", LIMIT_BYTES, None
    if fault == "damaged":
        path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    elif fault == "of another program":
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE mine (a)")
    elif fault == "of another version":
        first = Ledger(path)
        assert names(first) == []
        first.close()
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 99")
    elif fault == "a link":
        (tmp_path / "elsewhere").write_bytes(b"")
        path.symlink_to(tmp_path / "elsewhere")
    elif fault == "a directory":
        path.mkdir()
    elif fault == "read-only":
        monkeypatch.setattr("parkd.ledger.ledger.private_opener", _refuses)
    elif fault == "full":
        limit = 3 * 4096
    elif fault == "locked":
        monkeypatch.setattr("parkd.ledger.ledger.LOCK_WAIT_S", 0.05)
        lock = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        lock.execute("CREATE TABLE t (a)")
        lock.execute("BEGIN EXCLUSIVE")
        lock.execute("INSERT INTO t VALUES (1)")
    ledger = Ledger(path, limit)
    for _ in range(50):
        note(ledger, replace(TURN, why="x" * 2000))
    with pytest.raises(LedgerLost):
        ledger.turns(0, 10).result(WAIT_S)
    assert ledger.is_lost
    assert ledger.stats().is_lost
    note(ledger, TURN)
    ledger.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "is left out from now on" in lines[0]
    if fault == "a link":
        assert (tmp_path / "elsewhere").read_bytes() == b""
    if lock is not None:
        lock.close()


def _refuses(path: str, _flags: int) -> int:
    raise PermissionError(13, "Permission denied", path)


def test_a_row_that_cannot_be_made_costs_no_other(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> LedgerTurn:
        raise RuntimeError("no row")

    ledger.note(broken)
    note(ledger, TURN)
    assert names(ledger) == ["r1"]
    assert (ledger.stats().turns_total, ledger.stats().dropped_total) == (1, 1)
    assert "could not be written" in caplog.text


def test_a_thread_that_is_behind_costs_rows_and_no_time(ledger: Ledger) -> None:
    gate = threading.Event()

    def slow() -> LedgerTurn:
        assert gate.wait(WAIT_S)
        return TURN

    ledger.note(slow)
    for _ in range(2 * QUEUE_LIMIT):
        note(ledger, TURN)
    assert ledger.stats().dropped_total > QUEUE_LIMIT // 2
    with pytest.raises(LedgerLost):
        ledger.turns(0, 1).result(0)
    gate.set()


KILLED = """
import sys
from dataclasses import replace
from pathlib import Path
from parkd.ledger.ledger import Ledger
from tests.unit.ledger.test_ledger import TURN
ledger = Ledger(Path(sys.argv[1]))
number = 0
while True:
    ledger.note(lambda number=number: replace(TURN, request_id=f"r{number}", at_s=float(number)))
    number += 1
    if number % 100 == 0:
        ledger.turns(0, 1).result(10)
        print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_a_file_that_goes_on(tmp_path: Path) -> None:
    path, root = tmp_path / "ledger.sqlite3", Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "engine")])}
    command = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    told = 0
    while told < 300:
        told = int(process.stdout.readline())
    process.kill()
    process.communicate()
    again = Ledger(path)
    rows = [turn.request_id for turn in again.turns(0, ROWS_LIMIT).result(WAIT_S)]
    assert int(rows[0][1:]) >= told - 1, "what was told is there"
    assert not again.is_lost
    again.close()


NOW_S = 1_796_119_471.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW_S - 90),
        ("15m", NOW_S - 900),
        ("24h", NOW_S - DAY_S),
        ("7d", NOW_S - 7 * DAY_S),
        ("2w", NOW_S - 14 * DAY_S),
        ("1796000000", 1_796_000_000.0),
        ("1796000000.25", 1_796_000_000.25),
        ("2026-12-01", 1_796_083_200.0),
    ],
)
def test_since(text: str, expected: float) -> None:
    assert since_s(text, NOW_S) == expected


@pytest.mark.parametrize(
    "text",
    ["", "7", "7 d", "-7d", "d", "7y", "2026-13-01", "99999w", "1e9", "nan", "\N{ARABIC-INDIC DIGIT SEVEN}d", "7d\n"],
)
def test_since_is_strict(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        since_s(text, NOW_S)
    assert refused.value.param == "since"


@given(st.text(max_size=20))
def test_any_text_is_a_time_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert -1e11 < since_s(text, NOW_S) < 1e12


def test_a_price_needs_watts() -> None:
    assert Price().of(3600) == {}
    assert Price(500).of(3600) == {"kwh": 0.5}
    assert Price(500, 0.4).of(3600) == {"kwh": 0.5, "money": 0.2}
