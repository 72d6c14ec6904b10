"""How the process ends: by signals while it starts, and with a thread that is still inside a library."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[3]

BUSY = """
import ctypes, sys, threading
from parkd import cli

def serve(config):
    # Native code that holds no lock and does not come back: what a chunk of a large model looks like.
    nap = ctypes.CDLL(None).sleep
    threading.Thread(target=lambda: nap(60), name="parkd-engine", daemon=True).start()
    threading.Thread(target=lambda: nap(60), name="a copy").start()
    print("served", end="")
    return 0

cli.serve = serve
sys.argv = ["parkd"]
cli.entry()
"""


def test_a_thread_inside_a_library_does_not_hold_the_end() -> None:
    """Found by use 17: the second Ctrl-C ended in an abort."""
    ended = subprocess.run([sys.executable, "-c", BUSY], cwd=ROOT, capture_output=True, text=True, timeout=45)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "served", "")


IMPORTING = """
import sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "parkd.cli":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from parkd.__main__ import entry
entry()
"""


SIGNALS = [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_during_the_imports_ends_in_order(number: int, code: int) -> None:
    """Found by use 17: in the first second, SIGTERM gave -15 and Ctrl-C a traceback."""
    words, pipe = [sys.executable, "-c", IMPORTING], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == code


STARTING = """
import sys, time
from parkd import cli

def serve(config):
    print("loading", flush=True)
    try:
        time.sleep(60)
    finally:
        print("closed", flush=True)

cli.serve = serve
sys.argv = ["parkd"]
cli.entry()
"""


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_while_the_model_is_loaded_ends_in_order(number: int, code: int) -> None:
    """Found by use 17: SIGTERM while starting ended the process without closing anything."""
    words = [sys.executable, "-c", STARTING]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.stdout.read() == "closed\n"
        assert process.wait(30) == code


SERVING = """
import threading
from parkd import cli
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import make_services
from parkd.proxy.server import serve

stuck = threading.Event()

def hook(name, number):
    if name == "token" and number > 40:
        print("answering", flush=True)
        stuck.wait()

def main():
    services, _ = make_services(FakeEngine(hook=hook, end_odds=10**9))
    return serve(services, on_started=lambda url: print(url, flush=True))

cli.main = main
cli.entry()
"""


@pytest.mark.parametrize("numbers", [(signal.SIGINT,) * 2, (signal.SIGHUP, signal.SIGTERM)])
def test_two_signals_end_an_answer_at_once_and_without_a_traceback(numbers: tuple[int, ...]) -> None:
    """Found by use 17: the second Ctrl-C during an answer showed a traceback, and a terminal that was closed ended the
    server unsaved."""
    words, pipe = [sys.executable, "-c", SERVING], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "stream": True}
        ask = threading.Thread(target=_ask, args=(f"{url}/v1/chat/completions", body))
        ask.start()
        assert process.stdout.readline() == "answering\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)  # two that come together are one
        _, said = process.communicate(timeout=30)
        ask.join(10)
        assert process.returncode == 0
        assert "Traceback" not in said
        assert "ends without waiting" in said


def _ask(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url, json=body, timeout=30, trust_env=False)


INSIDE = """
import hashlib, sys
from parkd import cli

def open_engine(*given, **named):
    print("loading", flush=True)
    # Native code that no signal interrupts, for many minutes: what the weights of a large model look like.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

cli.open_engine = open_engine
sys.argv = ["parkd", *sys.argv[1:]]
cli.entry()
"""


@pytest.mark.parametrize("command", ["serve", "canary"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_that_is_inside_a_library(number: int, code: int, command: str, tmp_path: Path) -> None:
    """Found by use 17: a slow start took seconds to notice SIGTERM."""
    words = [sys.executable, "-c", INSIDE, command, "--model", "random:tiny-qwen3"]
    words += ["--port", "0", "--park-dir", str(tmp_path / "park"), "--conversation-cache-disk-mib", "8"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        try:
            assert process.wait(20) == code
        finally:
            process.kill()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
