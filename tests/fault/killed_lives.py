"""parkd over llama.cpp, or before a llama-server, killed under load: `python -m tests.fault.killed_lives --lives 40`.

    restart   start what is down
    answer    two clients go on with their conversations, for a while
    crash     SIGKILL while they do
    end       one more turn of every conversation, SIGTERM: exit code 0 and no half-written file

These are steps of `tests.lives.life`, always in this order: what is chosen by the seed is whose turn it is and when the
kill comes. A life that goes wrong says both.

Whose process is killed is the way: parkd that computes in process, parkd before a server, the server, or both. Every
answer is compared with that of an engine, or a server, which holds nothing of the conversation when it is asked.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.servers import Server, free_port, running, upstream_server
from tests.lives.life import Choices, History, Step

WAYS = ("in process", "parkd", "upstream", "both")
CONTEXT_TOKENS = 2048
ANSWER_TOKENS = 6
NAMES = "abcdef"
DISK_MIB = 64
MOST_MESSAGES = 12
LIFE_S = (0.5, 1.5)
"""How long clients go on before the kill, at least and at most."""
CLIENT_DEADLINE_S = 30.0
RETRY_S = 0.05
UPSTREAM_TIMEOUT_S = 20

Messages = list[dict[str, str]]
Said = Callable[[Messages], str]


@dataclass
class Talks:
    """Conversations that outlive the processes, as their clients hold them."""

    by_name: dict[str, Messages] = field(default_factory=dict)
    told: list[tuple[Messages, str]] = field(default_factory=list)
    """Prompts and what was answered, still to be compared."""
    caches: Counter[str] = field(default_factory=Counter)
    why_cold: Counter[str] = field(default_factory=Counter)
    """The first words of why an answer was read from its start."""
    failures: Counter[int] = field(default_factory=Counter)
    """Statuses other than 200; 0 is a connection that broke."""


def opening(name: str) -> Messages:
    document = " ".join(f"{name}{number}" for number in range(60))
    return [{"role": "system", "content": f"{name}: be brief."}, {"role": "user", "content": document}]


def turn_after(messages: Messages, answer: str) -> Messages:
    question = f"Question {len(messages)}?"
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


class Client(threading.Thread):
    """Goes on with one of its conversations after another until told to stop; an error is asked again."""

    def __init__(self, url: str, talks: Talks, names: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._talks, self._names = url, talks, names
        self._choices = Choices(np.random.default_rng(seed))
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=CLIENT_DEADLINE_S, trust_env=False) as client:
            while not self.stop.is_set():
                if not ask(client, self._talks, self._choices.pick(self._names)):
                    self.stop.wait(RETRY_S)


def ask(client: httpx.Client, talks: Talks, name: str) -> bool:
    """One more turn of a conversation; False if it was not answered."""
    messages = talks.by_name[name]
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    try:
        answer = client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError:
        talks.failures[0] += 1
        return False
    if answer.status_code != 200:
        talks.failures[answer.status_code] += 1
        return False
    document = answer.json()
    text = document["choices"][0]["message"]["content"]
    timings = document["timings"]
    talks.caches[timings["cache"]] += 1
    if timings["cache"] == "cold":
        talks.why_cold[" ".join(timings["why"].split()[:4])] += 1
    talks.told.append((messages, text))
    if len(messages) < MOST_MESSAGES:
        talks.by_name[name] = turn_after(messages, text)
    return True


class Processes:
    """parkd, and the server it stands before, each at one port for all of its lives."""

    def __init__(self, way: str, folder: Path, model: Path) -> None:
        self.way, self._folder, self._model = way, folder, model
        self._ports = {"parkd": free_port(), "upstream": free_port()}
        self._up: dict[str, tuple[Server, ExitStack]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return ("parkd",) if self.way == "in process" else ("upstream", "parkd")

    @property
    def victims(self) -> tuple[str, ...]:
        return {"in process": ("parkd",), "both": ("upstream", "parkd")}.get(self.way, (self.way,))

    @property
    def park_dir(self) -> Path:
        return self._folder / "park" if self.way == "in process" else self._folder / "slots" / "parkd"

    @property
    def url(self) -> str:
        return self._up["parkd"][0].base_url

    def start(self) -> None:
        for name in self.names:
            if name not in self._up:
                stack = ExitStack()
                self._up[name] = stack.enter_context(self._process(name)), stack

    def crash(self) -> None:
        for name in self.victims:
            server, _ = self._up[name]
            server.process.send_signal(signal.SIGKILL)
        for name in self.victims:
            server, stack = self._up.pop(name)
            server.process.wait(20)
            stack.close()

    def end(self) -> int:
        """Stops all, parkd first as a user would; its exit code."""
        codes = {}
        for name in reversed(self.names):
            if name in self._up:
                server, stack = self._up.pop(name)
                server.process.send_signal(signal.SIGTERM)
                codes[name] = server.process.wait(40)
                stack.close()
        return codes.get("parkd", 0)

    @contextmanager
    def _process(self, name: str) -> Iterator[Server]:
        slots = self._folder / "slots"
        port = self._ports[name]
        if name == "upstream":
            slots.mkdir(exist_ok=True)
            given: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "slots": 2, "port": port, "model": self._model}
            with upstream_server(slots, threads=1, **given) as server:
                yield server
            return
        command = [sys.executable, "-m", "parkd", "--port", str(port)]
        command += ["--conversation-cache-disk-mib", str(DISK_MIB)]
        if self.way == "in process":
            command += ["--engine", "llama.cpp", "--model", str(self._model), "--park-dir", str(self.park_dir)]
            command += ["--ctx-size", str(CONTEXT_TOKENS), "--threads", "1", "--conversation-cache-mib", "8"]
        else:
            command += ["--upstream", f"http://127.0.0.1:{self._ports['upstream']}", "--slot-save-path", str(slots)]
            command += ["--upstream-timeout", str(UPSTREAM_TIMEOUT_S)]
        with running("parkd", command, port, 1) as server:
            yield server


@contextmanager
def alone(way: str, folder: Path, model: Path) -> Iterator[Said]:
    """Says what is answered by an engine of the same kind that was reset, or by a server that reuses nothing."""
    if way == "in process":
        from parkd.types import SamplingParams
        from tests.integration.llama import llama_cpp_kit

        with llama_cpp_kit.loaded("tiny", folder) as engine:

            def of_engine(messages: Messages) -> str:
                ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
                engine.reset()
                engine.extend(ids[:-1], cancel=threading.Event())
                said: list[int] = []
                engine.begin(ids, SamplingParams(temperature=0))
                for step in engine.generate():
                    said += step
                    if len(said) == ANSWER_TOKENS or said[-1] in engine.info.end_token_ids:
                        break
                return str(engine.tokenizer.decode([token for token in said if token not in engine.info.end_token_ids]))

            yield of_engine
        return
    slots = folder / "reference"
    slots.mkdir()
    with upstream_server(slots, context_tokens=CONTEXT_TOKENS, threads=1, model=model) as server:

        def of_server(messages: Messages) -> str:
            body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "cache_prompt": False}
            answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60).json()
            return str(answer["choices"][0]["message"]["content"])

        yield of_server


class KilledLife:
    """The processes, their clients, and the steps that happen to them."""

    def __init__(self, processes: Processes, talks: Talks, seed: int) -> None:
        self._processes, self._talks, self._seed = processes, talks, seed
        self._choices = Choices(np.random.default_rng(seed))
        self._clients: list[Client] = []
        self._begun = 0
        self.history = History(seed)

    def take(self, name: str) -> None:
        """One step, by its name."""
        step: Callable[[], None] = getattr(self, self.history.note(Step(name, 1.0)))
        step()

    def restart(self) -> None:
        self._processes.start()

    def answer(self) -> None:
        for names in (NAMES[:3], NAMES[3:]):
            self._begun += 1
            self._clients.append(Client(self._processes.url, self._talks, names, self._seed * 1000 + self._begun))
            self._clients[-1].start()
        least_s, most_s = LIFE_S
        time.sleep(least_s + (most_s - least_s) * self._choices.up_to(1000) / 1000)

    def crash(self) -> None:
        self._processes.crash()
        for client in self._clients:
            client.stop.set()
        for client in self._clients:
            client.join(CLIENT_DEADLINE_S + 10)
            assert not client.is_alive(), "a request of it hangs"
        self._clients.clear()


def live(way: str, folder: Path, lives: int, seed: int = 0) -> Talks:
    """Raises AssertionError where something is wrong."""
    from tests.integration.llama import tiny_gguf

    model = folder / "tiny.gguf"
    tiny_gguf.write_tiny_hybrid(model)
    talks = Talks({name: opening(name) for name in NAMES})
    processes = Processes(way, folder, model)
    life = KilledLife(processes, talks, seed)
    with alone(way, folder, model) as said, life.history.told():
        try:
            for _ in range(lives):
                for step in ("restart", "answer", "crash"):
                    life.take(step)
                compare(talks, said)
            life.take("restart")
            with httpx.Client(base_url=processes.url, timeout=CLIENT_DEADLINE_S, trust_env=False) as client:
                for name in NAMES:
                    assert ask(client, talks, name), f"{name} is not answered after the last life: {talks.failures}"
            compare(talks, said)
            assert processes.end() == 0
        finally:
            processes.end()
    left = [path.name for path in [*processes.park_dir.iterdir(), *processes.park_dir.parent.glob("parkd-*.slot")]]
    assert not [name for name in left if name.endswith((".tmp", ".slot"))], left
    return talks


def compare(talks: Talks, said: Said) -> None:
    for messages, text in talks.told:
        expected = said(messages)
        assert text == expected, f"{messages[0]['content']} turn {len(messages) // 2}: {text!r}, not {expected!r}"
    talks.told.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--way", choices=WAYS, action="append", help="may be repeated; all of them if left out")
    parser.add_argument("--lives", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for way in given.way or WAYS:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            talks = live(way, Path(folder), given.lives, given.seed)
        took_s, answers = time.monotonic() - began_s, sum(talks.caches.values())
        print(
            f"{way}: {given.lives} lives in {took_s:.0f} s, {answers} answers right: {dict(talks.caches)}", flush=True
        )
        print(f"    not answered (0: the connection broke): {dict(talks.failures)}", flush=True)
        print(f"    cold, since: {dict(talks.why_cold)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
