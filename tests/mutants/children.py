"""Runs the tests in forked children: once to see which test runs which line, and once for each mutant.

Nothing is written to the working tree. A child compiles the changed module from memory, and is killed when its time is
up. The parent never imports the project, so that each child imports it anew, but has imported all that is slow.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest
from hypothesis import Phase, settings

SLOW_TO_IMPORT = (
    "hypothesis.stateful",
    "hypothesis.strategies",
    "numpy",
    "xxhash",
)
TIMED_OUT = -1
OPTIONS = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--assert=plain",
    "-m",
    "not slow and not model and not gpu",
)


def warm() -> None:
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    # A failure is all that is asked for: the shortest history that leads to it takes far longer to find.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")


class _Changed(MetaPathFinder, Loader):
    """Imports one module from a tree in memory."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return ModuleSpec(fullname, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._path)
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


class _Lines:
    """A plugin that notes which of the watched lines each test runs, and how long it takes."""

    def __init__(self, watched: frozenset[str]) -> None:
        self._watched = watched
        self._met: set[tuple[str, int]] = set()
        self._is_watched: dict[CodeType, bool] = {}
        self.lines: dict[str, list[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        code = frame.f_code
        watched = self._is_watched.get(code)
        if watched is None:
            watched = self._is_watched[code] = code.co_filename in self._watched
        return self._on_line if watched else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        if event == "line":
            self._met.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: object) -> object:
        self._met = set()
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

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (collection)"


def watch(
    tests: Sequence[str], files: Sequence[Path], timeout_s: float
) -> tuple[dict[str, list[list[object]]], dict[str, float]]:
    """The lines of `files` that each test runs, as `[file, line]`, and its seconds. Raises RuntimeError if a test
    fails."""

    def child() -> tuple[int, object]:
        lines = _Lines(frozenset(map(str, files)))
        code = int(pytest.main([*OPTIONS, *tests], plugins=[lines]))
        return code, [lines.lines, lines.seconds]

    code, said = _forked(child, timeout_s)
    if code != 0 or not isinstance(said, list):
        raise RuntimeError(f"the tests do not pass as they are (exit status {code}): see to that first\n{said or ''}")
    return said[0], said[1]


def outcome(name: str, path: Path, tree: ast.Module, tests: Sequence[str], timeout_s: float) -> tuple[bool, str]:
    """Whether the tests notice the changed module, and which one did first."""

    def child() -> tuple[int, object]:
        sys.meta_path.insert(0, _Changed(name, path, tree))
        first = _FirstFailure()
        code = int(pytest.main([*OPTIONS, *tests], plugins=[first]))
        return code, first.name

    code, said = _forked(child, timeout_s)
    if code == TIMED_OUT:
        return True, f"no end within {timeout_s:.0f} s"
    return code != 0, str(said or f"exit status {code}") if code else ""


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
