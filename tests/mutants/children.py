"""Runs tests in forked children: once to see which test runs which line, and once for each mutant.

    this process    imports and collects all tests once
        child       gives the broken function its new code, runs the tests that run its line, and ends

Nothing is written to the working tree. A child is killed when its time is up.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest
from hypothesis import Phase, settings

from tests.mutants.mutations import Mutant

TIMED_OUT = -1
OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--no-summary", "--assert=plain")
CALLS_WATCHED = 1000
"""Calls of a function in one test whose lines are noted: watching all of a random history would take minutes."""
FAST = "not slow and not model and not gpu"

Lines = dict[str, list[list[object]]]
"""The lines that each test runs, as `[file, line]`."""


class _Lines:
    """A plugin that notes which of the watched lines each test runs, and how long it takes."""

    def __init__(self, watched: frozenset[str]) -> None:
        self._watched = watched
        self._met: set[tuple[str, int]] = set()
        self._calls_left: dict[CodeType, int] = {}
        self.lines: dict[str, list[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        code = frame.f_code
        left = self._calls_left.get(code)
        if left is None:
            left = CALLS_WATCHED if code.co_filename in self._watched else 0
        self._calls_left[code] = max(0, left - 1)
        return self._on_line if left else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        if event == "line":
            self._met.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: object) -> object:
        self._met, self._calls_left = set(), {}
        began = time.monotonic()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)
        self.seconds[item.nodeid] = time.monotonic() - began
        self.lines[item.nodeid] = sorted(self._met)


class _FirstFailure:
    """A plugin that keeps the name of the test that failed first."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


class Trials:
    """The collected tests, to be run in children."""

    def __init__(self, session: pytest.Session) -> None:
        self._config = session.config
        self._items = {item.nodeid: item for item in session.items}
        self._functions: dict[tuple[str, str], list[FunctionType]] = {}
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                self._functions.setdefault((each.__code__.co_filename, each.__code__.co_qualname), []).append(each)
        gc.freeze()  # what is there now is shared with the children for as long as nobody writes to it

    def watch(self, files: Sequence[Path], timeout_s: float) -> tuple[Lines, dict[str, float]]:
        """The lines of `files` that each test runs, and its seconds. Raises RuntimeError if a test fails."""

        def child() -> tuple[int, object]:
            lines = _Lines(frozenset(map(str, files)))
            self._config.pluginmanager.register(lines)
            failed = self._run(list(self._items))
            return (1, failed) if failed else (0, [lines.lines, lines.seconds])

        code, said = _forked(child, timeout_s)
        if code != 0 or not isinstance(said, list):
            raise RuntimeError(
                f"the tests do not pass as they are (exit status {code}): see to that first\n{said or ''}"
            )
        return said[0], said[1]

    def outcome(
        self, mutant: Mutant, source: str, path: Path, tests: Sequence[str], timeout_s: float
    ) -> tuple[bool, str]:
        """Whether the tests notice the mutant of the module `source`, and which one did first."""

        def child() -> tuple[int, object]:
            self._break(mutant, source, path)
            failed = self._run(tests)
            return (1, failed) if failed else (0, "")

        code, said = _forked(child, timeout_s)
        if code == TIMED_OUT:
            return True, f"no end within {timeout_s:.0f} s"
        if code not in (0, 1):
            raise RuntimeError(f"{mutant.key} could not be tried:\n{said}")
        return code == 1, str(said)

    def _break(self, mutant: Mutant, source: str, path: Path) -> None:
        """Gives every function object of the mutant's function its broken code. Raises RuntimeError if there is
        none."""
        code = next(
            each
            for each in _codes(compile(mutant.tree(source), str(path), "exec"))
            if each.co_qualname == mutant.function
        )
        found = self._functions.get((str(path), mutant.function))
        if found is None:
            raise RuntimeError(f"{mutant.function} of {path} is nowhere: no test imports it")
        for each in found:
            each.__code__ = code

    def _run(self, names: Sequence[str]) -> str:
        """Runs tests until one fails. Returns its name; empty if none did."""
        first = _FirstFailure()
        self._config.pluginmanager.register(first)
        for name in names:
            item = self._items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if first.name:
                break
        return first.name


class _Loop:
    """A plugin that gives the collected tests to `work` in the place of running them."""

    def __init__(self, work: Callable[[Trials], None]) -> None:
        self._work = work
        self.has_run = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._work(Trials(session))
        self.has_run = True
        return True


def with_tests(paths: Sequence[str], work: Callable[[Trials], None]) -> None:
    """Imports and collects the fast tests of `paths`, and calls `work` with them. Raises RuntimeError if that fails."""
    # A failure is all that is asked for: the shortest history that leads to it takes far longer to find.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    sys.dont_write_bytecode = True
    loop = _Loop(work)
    code = pytest.main([*OPTIONS, "-m", FAST, *paths], plugins=[loop])
    if not loop.has_run:
        raise RuntimeError(
            f"the tests could not be collected (exit status {int(code)}): run pytest on {' '.join(paths)}"
        )


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _forked(call: Callable[[], tuple[int, object]], timeout_s: float) -> tuple[int, object]:
    """Calls in a child, without its output. Returns the exit status and what the child said; TIMED_OUT and None if its
    time was up."""
    assert threading.active_count() == 1, "a fork copies no other thread"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(reader)
            os.setsid()
            silence = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(silence, number)
            try:
                status, said = call()
            except BaseException:
                said = traceback.format_exc()
            with os.fdopen(writer, "w") as pipe:
                json.dump(said, pipe)
        finally:
            os._exit(status)
    os.close(writer)
    killer = threading.Timer(timeout_s, _kill, (pid,))
    killer.start()
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    killer.cancel()
    killer.join()
    if os.WIFSIGNALED(status):
        return TIMED_OUT if os.WTERMSIG(status) == signal.SIGKILL else 128 + os.WTERMSIG(status), None
    return os.WEXITSTATUS(status), json.loads(text) if text else None


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
