"""parkd in front of a llama-server, compared with that server alone: what is reused after what, and the overhead.

python -m benchmarks.llama_server [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chat import Answer, ask
from benchmarks.common import Goal, Result, Table, finish, machine, percentile, progress
from benchmarks.servers import Server, bare_proxy, free_port, peer_server, sidecar_server, upstream_server

CONTEXT_TOKENS = 2048
OUTPUT_TOKENS = 8
OVERHEAD_GOAL_MS = 3.0
OVERHEAD_REQUESTS = 60
OVERHEAD_PAUSE_S = 0.1
"""Pause between two requests. parkd's work behind a reply takes 20 ms, which must not count in the next request."""
DIRECT, PARKD, BARE = "llama-server", "parkd", "a proxy that does nothing"
WORDS_A_TOKEN = 0.55
KINDS = ("parkd", "llama-server", "both")
ALL_CORES, SPARE_CORE = "every core", "all cores but one"
"""The cores of the server's model: does the proxy in front have to share them?"""

Messages = list[dict[str, str]]


def document(name: str, tokens: int) -> str:
    return " ".join(f"{name} {number}" for number in range(max(1, int(tokens * WORDS_A_TOKEN / 2))))


def opening(name: str, tokens: int) -> Messages:
    return [{"role": "user", "content": f"Read this.\n{document(name, tokens)}\nWhat is it about?"}]


def after(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def edited(messages: Messages) -> Messages:
    """The same opening with another ending."""
    return [{"role": "user", "content": messages[0]["content"].replace("What is it about?", "How long is it?")}]


@dataclass
class Rows:
    """The answers of one way to serve, by turn."""

    name: str
    answers: dict[str, Answer] = field(default_factory=dict)

    def ask(self, server: Server, what: str, messages: Messages) -> Answer:
        answer = self.send(server, messages)
        progress(f"{self.name}: {what}: {answer.reused_tokens} of {answer.prompt_tokens}, {answer.first_token_s:.2f} s")
        self.answers[what] = answer
        time.sleep(0.5)  # parking behind the reply is not measured here
        return answer

    def send(self, server: Server, messages: Messages) -> Answer:
        return ask(server.base_url, messages, output_tokens=OUTPUT_TOKENS)


def conversation(rows: Rows, server: Server, tokens: int) -> tuple[Messages, str]:
    """Runs all turns except for the one after a restart. Returns the opening and its answer."""
    a, b = opening("alpha", tokens), opening("beta", tokens // 2)
    said = rows.ask(server, "A cold", a).text
    rows.ask(server, "B cold", b)
    rows.ask(server, "A2 after B", after(a, said, "And then?"))
    rows.ask(server, "branch of A", after(a, said, "Say it in other words."))
    rows.ask(server, "A, last message edited", edited(a))
    rows.ask(server, "B again", b)
    return a, said


def compare(tokens: int) -> list[Rows]:
    cold, plain, sidecar = Rows("never left"), Rows("llama-server, --cache-ram"), Rows("parkd before llama-server")
    with peer_server(cache_ram_mib=2048, context_tokens=CONTEXT_TOKENS) as server:
        a, said = conversation(plain, server, tokens)
    with peer_server(cache_ram_mib=2048, context_tokens=CONTEXT_TOKENS) as server:
        plain.ask(server, "A2 after a restart", after(a, said, "And last?"))
    with peer_server(cache_ram_mib=0, context_tokens=CONTEXT_TOKENS) as server:
        assert cold.ask(server, "A cold", a).text == said, "the same prompt was answered otherwise"
        for what, question in (("A2 after B", "And then?"), ("A2 after a restart", "And last?")):
            cold.ask(server, what, after(a, said, question))
    with tempfile.TemporaryDirectory() as folder:
        slots, port = Path(folder), free_port()
        with ExitStack() as parkd:
            with upstream_server(slots, context_tokens=CONTEXT_TOKENS, port=port) as upstream:
                server = parkd.enter_context(sidecar_server(upstream.base_url, slots))
                a, said = conversation(sidecar, server, tokens)
            with upstream_server(slots, context_tokens=CONTEXT_TOKENS, port=port):
                sidecar.ask(server, "A2 after a restart", after(a, said, "And last?"))
    return [cold, plain, sidecar]


def overhead(tokens: int, threads: int | None) -> dict[str, list[float]]:
    """Milliseconds to the first token of one warm conversation: directly, through parkd, and through a proxy that only
    forwards bytes, alternating."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        slots = Path(folder)
        upstream = stack.enter_context(upstream_server(slots, context_tokens=CONTEXT_TOKENS, slots=2, threads=threads))
        servers = {
            DIRECT: upstream,
            PARKD: stack.enter_context(sidecar_server(upstream.base_url, slots)),
            BARE: stack.enter_context(bare_proxy(upstream.base_url)),
        }
        times: dict[str, list[float]] = {name: [] for name in servers}
        messages = opening("gamma", tokens)
        own_slot = {"id_slot": 1, "cache_prompt": True}  # parkd uses the other one
        for number in range(1 + OVERHEAD_REQUESTS):
            for name, server in servers.items():
                answer = ask(server.base_url, messages, output_tokens=1, extra=None if name == PARKD else own_slot)
                if number:  # the first ones are cold
                    times[name].append(answer.first_token_s * 1e3)
                time.sleep(OVERHEAD_PAUSE_S)
    return times


def kills(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Kills one or both right after an answer, and compares the next turn with a server that was never killed."""
    questions = [f"Question {number}?" for number in range(rounds * len(KINDS))]
    with peer_server(cache_ram_mib=0, context_tokens=CONTEXT_TOKENS) as server:
        expected, history = [], opening("delta", tokens)
        for question in questions:
            said = ask(server.base_url, history, output_tokens=OUTPUT_TOKENS).text
            expected.append(said)
            history = [history[0], *after([], said, question)]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        slots, ports = Path(folder), (free_port(), free_port())
        upstream = stack.enter_context(upstream_server(slots, context_tokens=CONTEXT_TOKENS, port=ports[0]))
        server = stack.enter_context(sidecar_server(upstream.base_url, slots, port=ports[1]))
        history = opening("delta", tokens)
        for number, question in enumerate(questions):
            kind = KINDS[number % len(KINDS)]
            answer = ask(server.base_url, history, output_tokens=OUTPUT_TOKENS)
            outcomes.append(
                {
                    "killed before": KINDS[(number - 1) % len(KINDS)] if number else "nothing",
                    "cache": answer.cache,
                    "reused": answer.reused_tokens,
                    "prompt": answer.prompt_tokens,
                    "equal": answer.text == expected[number],
                }
            )
            progress(f"kill loop: {outcomes[-1]}")
            history = [history[0], *after([], answer.text, question)]
            time.sleep(1.0)  # a kill before the manifest is synced loses the turn, but nothing else
            if kind in ("parkd", "both"):
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
            if kind in ("llama-server", "both"):
                upstream.process.send_signal(signal.SIGKILL)
                upstream.process.wait()
                upstream = stack.enter_context(upstream_server(slots, context_tokens=CONTEXT_TOKENS, port=ports[0]))
            if kind in ("parkd", "both"):
                server = stack.enter_context(sidecar_server(upstream.base_url, slots, port=ports[1]))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1200, help="length of conversation A's opening, about")
    parser.add_argument("--rounds", type=int, default=3, help="of the kill loop: each kills parkd, the server, both")
    options = parser.parse_args()
    started = machine()
    outcomes = kills(options.rounds, min(200, options.tokens))
    spare = max(1, (os.cpu_count() or 1) - 1)
    times = {ALL_CORES: overhead(min(200, options.tokens), None), SPARE_CORE: overhead(min(200, options.tokens), spare)}
    rows = compare(options.tokens)
    result = Result(
        name="llama_server",
        title="parkd in front of a llama-server",
        how=(
            f"SmolLM2-135M-Instruct Q4_1, one slot of {CONTEXT_TOKENS} tokens, greedy, {OUTPUT_TOKENS} tokens per "
            f"answer, on the CPU. The server is that of the xllamacpp wheel. Equal means equal to the same turn on a "
            f"server that served no other conversation."
        ),
        tables=[turns_table(rows), overhead_table(times), kills_table(outcomes)],
        goals=goals(times, outcomes),
        raw={
            "times_ms": times,
            "kills": outcomes,
            "turns": {row.name: {what: vars(answer) for what, answer in row.answers.items()} for row in rows},
        },
    )
    finish(result, started)


def turns_table(rows: list[Rows]) -> Table:
    cold, *served = rows
    return turns("Turns", [(row, cold) for row in served])


def turns(title: str, served: list[tuple[Rows, Rows]]) -> Table:
    """Each way to serve beside the one without interruptions, whose answers are the reference."""
    lines = []
    for row, cold in served:
        for what, answer in row.answers.items():
            reference = cold.answers.get(what)
            same = "" if reference is None else "yes" if reference.text == answer.text else "no"
            reused = f"{answer.reused_tokens:,} of {answer.prompt_tokens:,}"
            lines.append((row.name, what, f"{answer.first_token_s:.2f}", reused, same))
    return Table(title, ("server", "turn", "s to first token", "reused", "equal"), tuple(lines))


def overhead_table(times: dict[str, dict[str, list[float]]]) -> Table:
    lines = tuple(
        (cores, name, f"{statistics.median(values):.1f}", f"{percentile(values, 0.9):.1f}")
        for cores, measured in times.items()
        for name, values in measured.items()
    )
    return Table("Warm single conversation, ms to the first token", ("the model has", "server", "median", "p90"), lines)


def kills_table(outcomes: list[dict[str, Any]]) -> Table:
    lines = []
    for kind in KINDS:
        turns = [outcome for outcome in outcomes if outcome["killed before"] == kind]
        reused, prompt = (sum(turn[what] for turn in turns) for what in ("reused", "prompt"))
        equal = sum(turn["equal"] for turn in turns)
        lines.append((kind, str(len(turns)), str(equal), f"{reused:,} of {prompt:,}"))
    return Table("kill -9, then the next turn", ("killed", "turns", "equal", "tokens reused"), tuple(lines))


def goals(times: dict[str, dict[str, list[float]]], outcomes: list[dict[str, Any]]) -> list[Goal]:
    equal = sum(outcome["equal"] for outcome in outcomes)
    later = outcomes[1:]
    restored = sum(outcome["reused"] > 0 for outcome in later)
    bound = f"<= {OVERHEAD_GOAL_MS} ms"
    added = {
        cores: statistics.median(measured[PARKD]) - statistics.median(measured[DIRECT])
        for cores, measured in times.items()
    }
    return [
        *(
            Goal(f"what parkd adds to a warm turn, {cores}", bound, f"{ms:.1f} ms", ms <= OVERHEAD_GOAL_MS)
            for cores, ms in added.items()
        ),
        Goal("answers after a kill are right", "all", f"{equal} of {len(outcomes)}", equal == len(outcomes)),
        Goal("turns after a kill are restored", "all", f"{restored} of {len(later)}", restored == len(later)),
    ]


if __name__ == "__main__":
    main()
