"""Five agents with titles beside long answers: how long each waits, under `--schedule fair` and `fifo`.

    python -m benchmarks.schedule [--rounds 2]

Two servers of the same model, one with each schedule, answer the same trace in turns, one at a time. Five agents start
a second apart. Each sends a long request (a prompt of about 500 tokens, an answer of at most 96), and half a second
later a title for it (an answer of at most 8); then it goes on with a second long request and its title. Measured are
the first tokens of both kinds, the time until all is answered, and what pauses there were. Then one long answer runs
alone, and a title is asked for in its middle. Answers are greedy, and compared between the schedules.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.common import Goal, Result, Table, finish, machine, percentile, progress
from benchmarks.servers import Server, demo_model, free_port, running

SCHEDULES = ("fair", "fifo")
MODELS = {"SmolLM2-135M-Instruct": "", "a tiny hybrid": "random:tiny-qwen3.5"}
"""By title; the first is found where it is installed."""
AGENTS = 5
TURNS = 2
PROMPT_WORDS = 330
ANSWER_TOKENS = 96
TITLE_TOKENS = 8
LONG_TOKENS = 300
GOAL_SHARE = 0.5


@dataclass(frozen=True)
class Heard:
    kind: str
    who: str
    first_s: float
    whole_s: float
    text: str
    pauses: int


@contextlib.contextmanager
def served(model: str, schedule: str) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "parkd", "serve", "--model", model, "--devices", "cpu", "--ctx-size", "4096"]
    command += ["--conversation-cache-mib", "1024", "--schedule", schedule, "--port", str(port)]
    with running(f"parkd, {schedule}", command, port) as server:
        yield server


async def ask(client: httpx.AsyncClient, kind: str, who: str, messages: list[dict[str, str]], tokens: int) -> Heard:
    body: dict[str, Any] = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["metadata"] = {"parkd_class": "side" if kind == "title" else "interactive"}
    began_s, first_s, text, pauses = time.perf_counter(), 0.0, "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first_s = first_s or (time.perf_counter() - began_s if piece else 0.0)
            text += piece
            pauses = chunk.get("timings", {}).get("pauses", pauses)
    whole_s = time.perf_counter() - began_s
    return Heard(kind, who, first_s or whole_s, whole_s, text, pauses)


async def agent(client: httpx.AsyncClient, run: str, number: int) -> list[Heard]:
    heard: list[Heard] = []
    words = " ".join(f"Fact {place} of agent {number} in {run}." for place in range(PROMPT_WORDS // 8))
    messages = [{"role": "user", "content": f"{words} Explain all of them at length."}]
    for turn in range(TURNS):
        title = [{"role": "user", "content": f"A title of three words for talk {turn} of agent {number} in {run}."}]
        long = asyncio.create_task(ask(client, "long", f"{number} {turn}", messages, ANSWER_TOKENS))
        await asyncio.sleep(0.5)
        heard.append(await ask(client, "title", f"{number} {turn} title", title, TITLE_TOKENS))
        heard.append(await long)
        messages = [*messages, {"role": "assistant", "content": heard[-1].text}, {"role": "user", "content": "And?"}]
    return heard


async def trace(url: str, run: str) -> tuple[list[Heard], float]:
    """What all agents heard, and the seconds until the last has."""
    async with httpx.AsyncClient(base_url=url, timeout=900, trust_env=False) as client:
        began_s, tasks = time.perf_counter(), []
        for number in range(AGENTS):
            tasks.append(asyncio.create_task(agent(client, run, number)))
            await asyncio.sleep(1.0)
        heard = [each for several in await asyncio.gather(*tasks) for each in several]
        return heard, time.perf_counter() - began_s


async def beside(url: str, run: str) -> float:
    """Seconds to the first token of a title that is asked for while one long answer runs."""
    async with httpx.AsyncClient(base_url=url, timeout=900, trust_env=False) as client:
        story = [{"role": "user", "content": f"Tell the longest story that you know. {run}"}]
        long = asyncio.create_task(ask(client, "long", "", story, LONG_TOKENS))
        await asyncio.sleep(3.0)
        title = await ask(client, "title", "", [{"role": "user", "content": f"A title. {run}"}], TITLE_TOKENS)
        await long
        return title.first_s


async def warm_up(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=900, trust_env=False) as client:
        await ask(client, "title", "", [{"role": "user", "content": "Are you there?"}], TITLE_TOKENS)


def measure(model: str, rounds: int) -> dict[str, Any]:
    """All measurements of one model, by schedule."""
    heard: dict[str, list[Heard]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    titles: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(served(model, name)) for name in SCHEDULES}
        for server in servers.values():
            asyncio.run(warm_up(server.base_url))
        for number in range(rounds):
            for name in SCHEDULES if number % 2 == 0 else reversed(SCHEDULES):
                progress(f"  round {number + 1}, {name} ...")
                some, end_s = asyncio.run(trace(servers[name].base_url, f"round {number}"))
                heard[name] += some
                ends[name].append(end_s)
                titles[name].append(asyncio.run(beside(servers[name].base_url, f"round {number}")))
    return {"heard": dict(heard), "ends": dict(ends), "titles": dict(titles)}


def rows_of(name: str, seen: dict[str, Any]) -> tuple[str, ...]:
    first = {kind: [each.first_s for each in seen["heard"][name] if each.kind == kind] for kind in ("long", "title")}
    whole = [each.whole_s for each in seen["heard"][name] if each.kind == "long"]
    return (
        name,
        f"{statistics.mean(first['title']):.2f}",
        f"{percentile(first['title'], 0.95):.2f}",
        f"{statistics.mean(first['long']):.2f}",
        f"{percentile(first['long'], 0.95):.2f}",
        f"{statistics.mean(whole):.2f}",
        f"{statistics.mean(seen['ends'][name]):.1f}",
        f"{statistics.median(seen['titles'][name]):.2f}",
        f"{sum(each.pauses for each in seen['heard'][name])}",
    )


COLUMNS = (
    "schedule",
    "title: first token, s",
    "p95",
    "long: first token, s",
    "p95",
    "long: whole, s",
    "all, s",
    "title beside one long answer, s",
    "pauses",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="fair against fifo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="(all)")
    options = parser.parse_args()
    started = machine()
    result = Result("schedule", "Who runs next", " ".join(__doc__.split("\n\n")[2].split()))
    for title in options.model or MODELS:
        progress(f"{title} ...")
        seen = measure(MODELS[title] or str(demo_model()), options.rounds)
        result.tables.append(Table(title, COLUMNS, tuple(rows_of(name, seen) for name in SCHEDULES)))
        texts = {name: sorted((each.who, each.text) for each in seen["heard"][name]) for name in SCHEDULES}
        different = sum(one != other for one, other in zip(texts["fair"], texts["fifo"], strict=True))
        result.goals.append(Goal(f"{title}: answers that differ", "0", str(different), different == 0))
        mean = {
            name: statistics.mean(each.first_s for each in seen["heard"][name] if each.kind == "title")
            for name in SCHEDULES
        }
        share = mean["fair"] / mean["fifo"]
        claim = f"{title}: first token of a title, of fifo's"
        result.goals.append(Goal(claim, f"<= {GOAL_SHARE:.0%}", f"{share:.0%}", share <= GOAL_SHARE))
        end = statistics.mean(seen["ends"]["fair"]) / statistics.mean(seen["ends"]["fifo"])
        result.goals.append(Goal(f"{title}: time for all, of fifo's", "<= 105%", f"{end:.0%}", end <= 1.05))
        result.raw[title] = {
            "heard": {
                name: [vars(each) | {"text": len(each.text)} for each in seen["heard"][name]] for name in SCHEDULES
            },
            "ends_s": seen["ends"],
            "titles_s": seen["titles"],
        }
    finish(result, started)


if __name__ == "__main__":
    main()
