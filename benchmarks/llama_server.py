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

import psutil

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
DECODE_TOKENS = 200
DECODE_ROUNDS = 5
DECODE_GOAL = 0.03
"""Most of the tokens a second that parkd may cost."""
KINDS = ("parkd", "llama-server", "both")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95}}
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


@dataclass
class Decoded:
    """Long answers of one way to serve."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Of each answer, after its first token."""
    processor_ms: list[float] = field(default_factory=list)
    """Of each answer a token, of the server and, where it is in front of it, of parkd."""


def decode(sampling: dict[str, Any], threads: int | None) -> dict[str, Decoded]:
    """Long answers of a conversation that is live, directly and through parkd, alternating: each has a slot."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        slots = Path(folder)
        upstream = stack.enter_context(upstream_server(slots, context_tokens=CONTEXT_TOKENS, slots=2, threads=threads))
        parkd = stack.enter_context(sidecar_server(upstream.base_url, slots))
        ways = {DIRECT: (upstream, (upstream,)), PARKD: (parkd, (upstream, parkd))}
        found = {name: Decoded() for name in ways}
        messages = opening("epsilon", 100)
        for number in range(1 + DECODE_ROUNDS):
            for name, (server, processes) in ways.items():
                extra = {"ignore_eos": True, **sampling}
                if name == DIRECT:
                    extra |= {"id_slot": 1, "cache_prompt": True}  # parkd uses the other one
                before_s = sum(map(processor_s, processes))
                answer = ask(server.base_url, messages, output_tokens=DECODE_TOKENS, extra=extra)
                used_s = sum(map(processor_s, processes)) - before_s
                if number:  # the first ones are cold
                    generated_s = answer.total_s - answer.first_token_s
                    found[name].tokens_per_s.append((answer.output_tokens - 1) / generated_s)
                    found[name].processor_ms.append(used_s * 1e3 / answer.output_tokens)
                time.sleep(0.5)  # parking behind the reply is not measured here
    return found


def processor_s(server: Server) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


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
    decoded = {
        (cores, how): decode(sampling, threads)
        for cores, threads in ((ALL_CORES, None), (SPARE_CORE, spare))
        for how, sampling in SAMPLING.items()
    }
    rows = compare(options.tokens)
    result = Result(
        name="llama_server",
        title="parkd in front of a llama-server",
        how=(
            f"SmolLM2-135M-Instruct Q4_1, one slot of {CONTEXT_TOKENS} tokens, greedy, {OUTPUT_TOKENS} tokens per "
            f"answer, on the CPU. The server is that of the xllamacpp wheel. Equal means equal to the same turn on a "
            f"server that served no other conversation."
        ),
        tables=[turns_table(rows), overhead_table(times), decode_table(decoded), kills_table(outcomes)],
        goals=[*goals(times, outcomes), *decode_goals(decoded)],
        raw={
            "times_ms": times,
            "decode": {
                f"{cores}, {how}": {name: vars(way) for name, way in ways.items()}
                for (cores, how), ways in decoded.items()
            },
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


def decode_table(decoded: dict[tuple[str, str], dict[str, Decoded]]) -> Table:
    lines = tuple(
        (
            cores,
            how,
            name,
            f"{statistics.median(way.tokens_per_s):.1f}",
            f"{statistics.median(way.processor_ms):.2f}",
        )
        for (cores, how), ways in decoded.items()
        for name, way in ways.items()
    )
    columns = ("the model has", "sampling", "server", "tokens a second", "ms of processors a token")
    return Table(f"Answers of {DECODE_TOKENS} tokens, alternating", columns, lines)


def decode_goals(decoded: dict[tuple[str, str], dict[str, Decoded]]) -> list[Goal]:
    found = []
    for (cores, how), ways in decoded.items():
        direct, parkd = (statistics.median(ways[name].tokens_per_s) for name in (DIRECT, PARKD))
        cost = 1 - parkd / direct
        what = f"what parkd costs of decode speed, {how}, {cores}"
        found.append(Goal(what, f"<= {DECODE_GOAL:.0%}", f"{cost:.1%}", cost <= DECODE_GOAL))
    return found


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
