"""Runs a parkd server in another process, as a user would start it, for the demo and for measurements."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import httpx

from parkd.config import SETTINGS
from parkd.errors import ParkdError

STARTUP_DEADLINE_S = 900
"""The first start converts weights, which takes minutes on a slow machine."""
STOP_DEADLINE_S = 30
KEPT_LINES = 40
_SERVING = re.compile(r"^serving\s+(https?://\S+?)/v1\b")


class ServerFailed(ParkdError):
    """The server ended, or did not answer in time. The message contains its last lines, unless they were shown."""

    code = "server_failed"


@contextlib.contextmanager
def running_server(flags: Mapping[str, str], show: Callable[[str], None] | None = None) -> Iterator[str]:
    """Starts a server and yields its URL once `/health` answers. At the end, stops the server and waits for it.

    `flags` maps setting names to texts. `show` is called with each line that the server prints, from another thread.
    Raises ServerFailed, with the server's last lines if they were not shown.
    """
    flags = {"ledger": "off", **flags}  # what it measures is nobody's bill
    switches = {setting.name for setting in SETTINGS if not setting.metavar}
    words = [f"--{name}" if name in switches else f"--{name}={text}" for name, text in flags.items()]
    command = [sys.executable, "-m", "parkd", "serve", *words]
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own flags
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    lines = _Lines(process, show)
    try:
        yield _wait_until_ready(process, lines)
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines.join()


class _Lines:
    """Reads the server's output, so that its pipe never fills up, and keeps the last lines."""

    def __init__(self, process: subprocess.Popen[str], show: Callable[[str], None] | None) -> None:
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self.url: str | None = None
        self._process = process
        self._show = show
        self._thread = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._thread.start()

    def last_words(self) -> str:
        """The last lines of the output; empty if they were shown."""
        self.join()
        return "" if self._show is not None else ":\n" + "\n".join(self._last)

    def join(self) -> None:
        self._thread.join(timeout=STOP_DEADLINE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._last.append(line.rstrip())
                if found := _SERVING.match(line):
                    self.url = found[1]
                if self._show is not None:
                    self._show(line.rstrip())


def _wait_until_ready(process: subprocess.Popen[str], lines: _Lines) -> str:
    deadline = time.monotonic() + STARTUP_DEADLINE_S
    with httpx.Client(timeout=5) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with exit code {process.returncode}{lines.last_words()}")
            if lines.url is not None:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{lines.url}/health").is_success:
                        return lines.url
            time.sleep(0.1)
    process.kill()
    raise ServerFailed(f"the server did not answer within {STARTUP_DEADLINE_S} s{lines.last_words()}")
