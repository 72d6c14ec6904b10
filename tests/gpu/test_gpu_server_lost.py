"""A server whose card fails under it: who waits is told at once, the process ends, what is on disk survives."""

from __future__ import annotations

import json
import random
import re
import string
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(240),
]

SERVER = """
import sys
import torch
from parkd_engine.session import Session
from parkd.cli import main

read = Session.extend

def extend(session, token_ids, **rest):
    if len(token_ids) > 3000:  # longer than what a start reads to warm up
        outside = torch.tensor([5], device="cuda:0")
        torch.zeros(1, device="cuda:0")[outside].sum()  # an assertion on the device, which poisons its context
    return read(session, token_ids, **rest)

Session.extend = extend
sys.exit(main(sys.argv[1:]))
"""
START_S, LOST_S = 100, 30


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def ask(self, text: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def figure(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])


@contextmanager
def server(tmp_path: Path) -> Iterator[Running]:
    flags = {
        "--model": "random:tiny-qwen3",
        "--devices": "cuda:0",
        "--port": "0",
        "--conversation-cache-mib": "64",
        "--conversation-cache-disk-mib": "64",
        "--park-dir": str(tmp_path / "park"),
    }
    words = [word for pair in flags.items() for word in pair]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(process)
    started = threading.Event()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found is not None and not running.url:
                running.url = found[0]
                started.set()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        assert started.wait(START_S), "".join(running.lines)
        yield running
    finally:
        process.kill()
        process.wait(30)
        follower.join(10)
        if process.stdout is not None:
            process.stdout.close()


def message(seed: int, letters: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_uppercase, k=letters))


def test_a_lost_card_ends_the_server_and_spares_what_is_on_disk(tmp_path: Path) -> None:
    first = message(1, 900)
    with server(tmp_path) as running:
        answer = running.ask(first)
        until_s = time.monotonic() + 30
        while running.figure("parkd_disk_conversations") < 1 and time.monotonic() < until_s:
            time.sleep(0.2)
        replies: list[tuple[str, int, str, float]] = []

        def ask(name: str, text: str) -> None:
            try:
                running.ask(text)
                replies.append((name, 200, "", time.monotonic()))
            except urllib.error.HTTPError as error:
                replies.append((name, error.code, error.read().decode(), time.monotonic()))
            except OSError as error:
                replies.append((name, 0, str(error), time.monotonic()))

        texts = {"poison": message(2, 3600), "waiting 1": message(3, 50), "waiting 2": message(4, 50)}
        began_s = time.monotonic()
        threads = [threading.Thread(target=ask, args=pair) for pair in texts.items()]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join(60)
        assert running.process.wait(LOST_S) == 1, "".join(running.lines)
    assert len(replies) == 3
    for name, status, text, at_s in replies:
        if status != 200:  # One that came before the poison was read has its answer.
            assert status >= 500, (name, status, text)
            assert "error" in json.loads(text), (name, text)
        assert at_s - began_s < LOST_S
    failed = {name for name, status, _, _ in replies if status != 200}
    assert "poison" in failed
    log = "".join(running.lines)
    assert "the engine is lost: The device stopped working" in log
    assert "device-side assert" in log or "CUDA error" in log

    with server(tmp_path) as running:
        again = running.ask(first)
        assert again["choices"][0]["message"] == answer["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
