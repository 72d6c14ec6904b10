"""A server process is killed under load, again and again; the same conversations are then answered right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 5
NAMES = "abcdef"


@contextmanager
def serving(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fault.fake_server", str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "the server did not start"
        yield process, url
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()


class Client(threading.Thread):
    """Goes on with one conversation after another until the server is gone."""

    def __init__(self, url: str, talks: dict[str, list[dict[str, str]]], names: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.url, self.talks, self.names, self.random = url, talks, names, random.Random(seed)
        self.wrong: list[str] = []
        self.caches: list[str] = []

    def run(self) -> None:
        from tests.integration.api.test_api_switching import never_parked, turn_after

        with httpx.Client(base_url=self.url, timeout=20, trust_env=False) as client:
            while True:
                name = self.random.choice(self.names)
                messages = self.talks[name]
                body = {"messages": messages, "max_tokens": 8, "temperature": 0}
                try:
                    answer = client.post("/v1/chat/completions", json=body).json()
                except httpx.HTTPError:
                    return
                text = answer["choices"][0]["message"]["content"]
                self.caches.append(answer["timings"]["cache"])
                if text != never_parked(messages):
                    self.wrong.append(f"{name}: {text!r}")
                if len(messages) < 12:
                    self.talks[name] = turn_after(messages, text, f"Question {len(messages)}?")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_again_and_again_it_answers_right(tmp_path: Path) -> None:
    from tests.integration.api.test_api_switching import opening

    talks = {name: opening(name, 900, system=f"{name}: be brief.") for name in NAMES}
    caches: list[str] = []
    for turn in range(ROUNDS):
        with serving(tmp_path / "park") as (process, url):
            clients = [Client(url, talks, names, turn * 2 + i) for i, names in enumerate((NAMES[:3], NAMES[3:]))]
            for client in clients:
                client.start()
            time.sleep(1.0 + random.Random(turn).random())
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            for client in clients:
                client.join(30)
                assert not client.is_alive()
                assert client.wrong == []
                caches += client.caches
    assert "restored-disk" in caches, "nothing ever came back from disk, so nothing was tried"
    with serving(tmp_path / "park") as (process, url):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    names = [path.name for path in (tmp_path / "park").iterdir()]
    assert not [name for name in names if name.endswith(".tmp")]
