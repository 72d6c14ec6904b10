"""parkd in an environment of exactly what pip installs for it, as a process: a folder of links to the packages that its
requirements name, and theirs in turn. Nothing is fetched, so every test run can do it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import Requirement

from tests.unit.llama_server.upstream_kit import URL, FakeLlama

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 90.0
SERVING = re.compile(r"^serving\s+(https?://\S+?)/v1\b")


def requirements(extra: str | None) -> list[Requirement]:
    """What pip is asked for by `parkd` or `parkd[EXTRA]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    return [Requirement(text) for text in texts]


def environment(folder: Path, extra: str | None = None) -> Path:
    """A folder for PYTHONPATH."""
    folder.mkdir()
    (folder / "parkd").symlink_to(ROOT / "parkd")
    (folder / "parkd_engine").symlink_to(ROOT / "engine" / "parkd_engine")
    waiting, done = requirements(extra), set()
    while waiting:
        asked = waiting.pop()
        found = distribution(asked.name)
        extras = frozenset(asked.extras)
        if (asked.name.lower(), extras) in done:
            continue
        done.add((asked.name.lower(), extras))
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
        for text in found.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in extras or {""}):
                waiting.append(needed)
    return folder


def command(*words: str) -> list[str]:
    """Without the packages of the environment that runs the tests."""
    return [sys.executable, "-S", "-m", "parkd", *words]


def variables(path: str, home: Path) -> dict[str, str]:
    return {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Process:
    url: str
    pid: int


@contextmanager
def serving(
    words: Sequence[str], env: Mapping[str, str], folder: Path, *, deadline_s: float = START_DEADLINE_S
) -> Iterator[Process]:
    """A server, once it answers."""
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        until_s = time.monotonic() + deadline_s
        while not (found := [match[1] for line in log.read_text().splitlines() if (match := SERVING.match(line))]):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        yield Process(found[0], process.pid)
    finally:
        process.terminate()
        process.wait(30)


def chat(url: str, messages: list[dict[str, Any]], **more: Any) -> tuple[str, str]:
    """The answer, and where its state came from."""
    body = {"model": "any", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    return str(message["content"]), response.headers["x-parkd-cache"]


@contextmanager
def llama_server(slot_dir: Path) -> Iterator[str]:
    """The tests' llama-server without a model, behind a socket. Yields its address."""
    fake = FakeLlama(slot_dir, slots=1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            answer = fake._answer(httpx.Request(self.command, URL + self.path, content=body))
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.send_header("connection", "close")
            self.end_headers()
            for part in answer.stream:  # type: ignore[union-attr]
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
