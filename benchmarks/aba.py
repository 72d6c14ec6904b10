"""Leaving a conversation and returning to it: parkd and llama.cpp's server over HTTP, with the same GGUF file.

    python -m benchmarks.aba [--runs 3] [--output-tokens 48] [--a-characters 12200] [--b-characters 4000] [--threads N]

Every run uses new texts, so that no run profits from an earlier one. Each step is sent to one server and then to the
other, so that other load on the machine affects both. Steps of a run, in order:

    A1               cold            a document of about 3,000 tokens and a question
    A2               same conversation: one more turn
    B1               cold            another document, about 1,000 tokens
    A2 after B       the request A2 again, as from a client that retries
    B2 after A       one more turn of B
    A3 after B       one more turn of A
    A2 cold, A3 cold the same messages, with nothing of them cached
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from benchmarks import servers, texts
from benchmarks.chat import Answer, ask
from benchmarks.common import MIB, Goal, Result, Table, finish, machine, progress

STEPS = ("A1", "A2", "B1", "A2 after B", "B2 after A", "A3 after B", "A2 cold", "A3 cold")
COMPARED = {"A2": "A2 cold", "A2 after B": "A2 cold", "A3 after B": "A3 cold"}
"""Step answered from the cache -> step that reads the same messages cold."""
A_CHARACTERS = 12_200
B_CHARACTERS = 4_000
CONTEXT_TOKENS = 8192
CACHE_MIB = 2048
MIN_COMPARED_TOKENS = 32
QUESTIONS = (
    "Summarise the document in your own words, in at least ten sentences.",
    "Now list, with numbers, every amount and time that the reports name.",
    "Which of the licence's conditions matters most to someone who sells copies? Explain at length.",
)

Asker = Callable[[list[dict[str, str]]], Answer]


@dataclass(frozen=True)
class Contender:
    name: str
    ask: Asker
    ask_cold: Asker


@dataclass
class Conversations:
    """The messages sent to one server in one run, including its own answers."""

    a: list[dict[str, str]]
    b: list[dict[str, str]]
    a2: list[dict[str, str]]


def run_steps(contender: Contender, run: int, a_characters: int, b_characters: int) -> Callable[[str], Answer]:
    """A function that runs the step of the given name. Call it once for each of STEPS, in order."""
    seen = Conversations(
        a=texts.opening("Ada", 1000 + run, a_characters, QUESTIONS[0]),
        b=texts.opening("Boris", 2000 + run, b_characters, QUESTIONS[0]),
        a2=[],
    )

    def take(step: str) -> Answer:
        match step:
            case "A1":
                answer = contender.ask(seen.a)
                seen.a = seen.a2 = texts.next_turn(seen.a, answer.text, QUESTIONS[1])
            case "A2":
                answer = contender.ask(seen.a2)
                seen.a = texts.next_turn(seen.a2, answer.text, QUESTIONS[2])
            case "B1":
                answer = contender.ask(seen.b)
                seen.b = texts.next_turn(seen.b, answer.text, QUESTIONS[1])
            case "B2 after A":
                answer = contender.ask(seen.b)
            case "A2 after B":
                answer = contender.ask(seen.a2)
            case "A3 after B":
                answer = contender.ask(seen.a)
            case "A2 cold":
                answer = contender.ask_cold(seen.a2)
            case "A3 cold":
                answer = contender.ask_cold(seen.a)
            case _:
                raise ValueError(step)
        return answer

    return take


Measured = dict[str, dict[str, list[Answer]]]
"""Contender's name -> step -> one answer per run."""


def measure(
    contenders: list[Contender], runs: int, a_characters: int = A_CHARACTERS, b_characters: int = B_CHARACTERS
) -> Measured:
    measured: Measured = {contender.name: {step: [] for step in STEPS} for contender in contenders}
    for run in range(runs):
        takers = {c.name: run_steps(c, run, a_characters, b_characters) for c in contenders}
        for step in STEPS:
            for name, take in takers.items():
                answer = take(step)
                measured[name][step].append(answer)
                progress(
                    f"run {run + 1}/{runs} {step:11} {name:10} {answer.first_token_s:7.2f} s to the first token, "
                    f"{answer.reused_tokens}/{answer.prompt_tokens} reused {answer.cache}"
                )
    return measured


def first_token_s(answers: list[Answer]) -> float:
    return statistics.median(answer.first_token_s for answer in answers)


def equal_answers(steps: dict[str, list[Answer]], cached: str) -> tuple[int, int]:
    """(runs whose answer from the cache equals the cold one in every character, all runs)."""
    pairs = list(zip(steps[cached], steps[COMPARED[cached]], strict=True))
    return sum(one.text == other.text for one, other in pairs), len(pairs)


def report(measured: Measured, result: Result) -> None:
    for name, steps in measured.items():
        rows = []
        for step in STEPS:
            one = steps[step][-1]
            same = "of".join(f" {n} " for n in equal_answers(steps, step)).strip() if step in COMPARED else ""
            cold = (
                f"{first_token_s(steps[COMPARED[step]]) / first_token_s(steps[step]):.1f}x" if step in COMPARED else ""
            )
            spread = [answer.first_token_s for answer in steps[step]]
            rows.append(
                (
                    step,
                    f"{one.prompt_tokens:,}",
                    f"{one.reused_tokens:,}",
                    f"{first_token_s(steps[step]):.3f}",
                    f"{min(spread):.3f}-{max(spread):.3f}",
                    cold,
                    same,
                )
            )
        columns = ("step", "prompt", "reused", "median s to first token", "min-max", "faster than cold", "equals cold")
        result.tables.append(Table(f"{name} (tokens of the last run)", columns, tuple(rows)))
    result.raw["answers"] = {
        name: {step: [asdict(answer) for answer in answers] for step, answers in steps.items()}
        for name, steps in measured.items()
    }


def judge(measured: Measured, result: Result) -> None:
    ours = measured["parkd"]
    shortest = min(answer.output_tokens for step in COMPARED for answer in ours[step])
    result.goals.append(
        Goal("tokens in the shortest answer compared", f">= {MIN_COMPARED_TOKENS}", str(shortest), shortest >= 32)
    )
    for name, steps in measured.items():
        for cached in COMPARED:
            same, of = equal_answers(steps, cached)
            claim = f"answer of '{cached}' equals the cold one"
            if name == "parkd":
                result.goals.append(Goal(claim, f"{of} of {of}", f"{same} of {of}", same == of))
            else:
                result.notes.append(f"{name}: {claim} in {same} of {of} runs.")
    for step in ("A2 after B", "A3 after B"):
        reread = max(answer.prompt_tokens - answer.reused_tokens for answer in ours[step])
        share = min(
            after.reused_tokens / first.prompt_tokens for after, first in zip(ours[step], ours["A1"], strict=True)
        )
        result.goals.append(
            Goal(f"'{step}' reuses A1", ">= 99 %", f"{min(share, 1):.1%}, {reread} read", share >= 0.99)
        )
    for name, steps in measured.items():
        if name == "parkd":
            continue
        for step in ("A2 after B", "A3 after B", "A2", "B2 after A"):
            ratio = first_token_s(ours[step]) / first_token_s(steps[step])
            claim = f"seconds to first token of '{step}', parkd / {name}"
            result.goals.append(Goal(claim, "<= 1", f"{ratio:.2f}", ratio <= 1))


def memory(server: servers.Server, result: Result) -> None:
    """Compares peak resident memory with what the server reports in its start-up lines and metrics."""
    metrics = server.metrics()
    peak = server.peak_rss_bytes() / MIB
    parts = {
        "weights": server.started_with("weights"),
        "arenas (live state)": server.started_with("live state"),
        f"conversation cache at its largest, of {CACHE_MIB:,}": metrics["parkd_store_peak_bytes_allocated"] / MIB,
    }
    parts["everything else (interpreter, libraries, activations)"] = peak - sum(parts.values())
    rows = [(name, f"{size:,.0f}") for name, size in (*parts.items(), ("peak", peak))]
    result.tables.append(Table("parkd: resident memory at its peak", ("part", "MiB"), tuple(rows)))
    result.raw["memory"] = {"peak_rss_mib": peak, "parts_mib": parts, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description="A, B, A over HTTP")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--a-characters", type=int, default=A_CHARACTERS)
    parser.add_argument("--b-characters", type=int, default=B_CHARACTERS)
    parser.add_argument("--threads", type=int, help="for every server; default: all cores")
    options = parser.parse_args()
    started = machine()
    result = Result("aba", "Leaving a conversation and coming back", HOW)
    tiny = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Say hi."}]

    def asker(server: servers.Server, **extra: bool) -> Asker:
        return lambda messages: ask(server.base_url, messages, output_tokens=options.output_tokens, extra=extra)

    threads = options.threads
    with ExitStack() as stack:
        ours = stack.enter_context(
            servers.parkd_server(cache_mib=CACHE_MIB, context_tokens=CONTEXT_TOKENS, threads=threads)
        )
        unparked = stack.enter_context(
            servers.parkd_server(
                cache_mib=0, name="parkd without parking", context_tokens=CONTEXT_TOKENS, threads=threads
            )
        )

        def ask_ours_cold(messages: list[dict[str, str]]) -> Answer:
            ask(unparked.base_url, tiny, output_tokens=1)
            return asker(unparked)(messages)

        contenders = [Contender("parkd", asker(ours), ask_ours_cold)]
        if servers.peer_installed():
            peer = stack.enter_context(
                servers.peer_server(cache_ram_mib=CACHE_MIB, context_tokens=CONTEXT_TOKENS, threads=threads)
            )
            contenders.append(Contender("llama.cpp", asker(peer), asker(peer, cache_prompt=False)))
        else:
            result.notes.append("llama.cpp was not measured: pip install xllamacpp.")
        for contender in contenders:
            contender.ask(tiny)
        measured = measure(contenders, options.runs, options.a_characters, options.b_characters)
        report(measured, result)
        judge(measured, result)
        memory(ours, result)
    finish(result, started)


HOW = (
    "parkd on two stages (cpu,cpu, fp32) and llama.cpp's server (Q4_1 weights, f16 state, RAM cache enabled) serve the "
    "same SmolLM2-135M-Instruct GGUF file with 8,192 tokens of context. Each step is sent to one and then to the "
    "other. Answers are greedy. Cold means: a parkd without parking that has just served another request; "
    "`cache_prompt: false` for llama.cpp. Figures are medians over the runs."
)

if __name__ == "__main__":
    main()
