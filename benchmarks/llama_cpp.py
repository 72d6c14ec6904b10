"""llama.cpp's own server, and parkd with llama.cpp in process, on one model: what switching costs, and plain speed.

python -m benchmarks.llama_cpp [--model FILE.gguf] [--words 250] [--context 4096]

One server after the other: A1, B1, A2 after B, a branch of A, an edited last message, and A2 once more after the server
was stopped and started (parkd with a park directory). Greedy answers; those of A are compared with what the same server
says without interruption. Writes benchmarks/results/llama_cpp-NAME.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.chat import Answer, ask
from benchmarks.common import REPOSITORY, commit, machine
from benchmarks.servers import Server, _free_port, _running, demo_model

Messages = list[dict[str, str]]
Start = Callable[[str], contextlib.AbstractContextManager[Server]]
"""Starts a server; the name is of the folder where it may park."""
OUTPUT_TOKENS = 24
RAM_MIB = 1024
THREADS = 2


def opening(name: str, words: int) -> Messages:
    text = " ".join(f"{name}{number}" for number in range(words))
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": f"{text}. Sum it up."}]


def turn(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


@contextlib.contextmanager
def parkd(model: Path, context: int, park_dir: Path, cache_mib: int = RAM_MIB) -> Iterator[Server]:
    port = _free_port()
    flags = {"engine": "llama.cpp", "model": model, "ctx-size": context, "threads": THREADS, "port": port}
    flags |= {"conversation-cache-mib": cache_mib}
    if cache_mib:
        flags |= {"conversation-cache-disk-mib": 4096, "park-dir": park_dir}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "parkd", *words]
    with _running("parkd, llama.cpp in process", command, port, None) as server:
        yield server


@contextlib.contextmanager
def plain(model: Path, context: int) -> Iterator[Server]:
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.peer_server", str(model), str(port), str(context), str(RAM_MIB)]
    with _running("llama.cpp's server", command, port, THREADS) as server:
        yield server


def steps(start: Start, words: int) -> dict[str, dict[str, object]]:
    a1, b1 = opening("a", words), opening("b", words)
    seen: dict[str, tuple[Messages, Answer]] = {}

    def step(server: Server, name: str, messages: Messages) -> Answer:
        answer = ask(server.base_url, messages, output_tokens=OUTPUT_TOKENS)
        seen[name] = (messages, answer)
        return answer

    with start("one") as server:
        first = step(server, "A1 cold", a1)
        step(server, "B1 cold", b1)
        a2 = turn(a1, first.text, "And the second half?")
        step(server, "A2 after B", a2)
        step(server, "B1 again", b1)
        step(server, "branch of A after B", turn(a1, first.text, "Say it in other words."))
        step(server, "A, last message edited", turn(a1, first.text, "And the first half?"))
    with start("one") as server:
        step(server, "A2 after a restart", a2)
    with start("other") as server:  # what an uninterrupted conversation says
        alone = [ask(server.base_url, messages, output_tokens=OUTPUT_TOKENS) for messages in (a1, a2)]
    equal = {"A1 cold": alone[0].text, "A2 after B": alone[1].text, "A2 after a restart": alone[1].text}
    return {
        name: {
            "first_token_s": round(answer.first_token_s, 3),
            "reused_tokens": answer.reused_tokens,
            "prompt_tokens": answer.prompt_tokens,
            "equals_uninterrupted": answer.text == equal[name] if name in equal else None,
        }
        for name, (_, answer) in seen.items()
    }


def speed(server: Server, words: int, runs: int) -> dict[str, float]:
    """Tokens a second, medians: reading a prompt that is new each time, and decoding."""
    read, decoded = [], []
    for number in range(runs):
        answer = ask(server.base_url, opening(f"s{number}x", words), output_tokens=64)
        read.append(answer.prompt_tokens / answer.first_token_s)
        if answer.output_tokens > 1:
            decoded.append((answer.output_tokens - 1) / (answer.total_s - answer.first_token_s))
    return {"read_tokens_per_s": statistics.median(read), "decode_tokens_per_s": statistics.median(decoded or [0.0])}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--words", type=int, default=250)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    model = given.model or demo_model()
    result: dict[str, object] = {
        "model": model.stem,
        "commit": commit(),
        "machine": machine(),
        "steps": {},
        "speed": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Start] = {
            "llama.cpp server": lambda _: plain(model, given.context),
            "parkd": lambda name: parkd(model, given.context, Path(folder) / name),
        }
        for name, start in kinds.items():
            result["steps"][name] = steps(start, given.words)
        for name, start in kinds.items():
            with start("speed") as server:
                result["speed"][name] = speed(server, given.words, given.runs)
    path = REPOSITORY / "benchmarks" / "results" / f"llama_cpp-{model.stem.lower()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, table in result["steps"].items():
        for step, row in table.items():
            print(
                f"{name:18} {step:24} {row['first_token_s']:8.3f} s  {row['reused_tokens']:5}/{row['prompt_tokens']:5} "
                f"{row['equals_uninterrupted']}"
            )
    print(json.dumps(result["speed"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
