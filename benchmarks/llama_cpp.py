"""Five ways to serve a model with llama.cpp: what is reused after another conversation and after a restart.

python -m benchmarks.llama_cpp [--tokens N] [--without-others]

They are llama.cpp's own server with its RAM cache; parkd with the library in process; and parkd, `hearth-llm` and
`stillwarm` in front of that server. Models: SmolLM2 and a tiny hybrid with random weights. benchmarks.llama_speed
measures plain speed, and benchmarks.llama_server the overhead in front of a server. Needs parkd[bench,llama-cpp].
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Goal, Result, finish, machine, progress
from benchmarks.llama_peers import StillwarmRows, hearth_server, install
from benchmarks.llama_server import CONTEXT_TOKENS, Rows, after, conversation, edited, opening, turns
from benchmarks.servers import Server, demo_model, free_port, peer_server, running, sidecar_server, upstream_server

CACHE_MIB = 1024
DISK_MIB = 4096
TINY = REPOSITORY / "tests" / "integration" / "llama" / "tiny_gguf.py"

Start = Callable[[], contextlib.AbstractContextManager[Server]]


@dataclass
class Compared:
    """All ways to serve one model, each with the rows that it must equal."""

    title: str
    served: list[tuple[Rows, Rows]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def in_process(model: Path, park_dir: Path | None) -> Iterator[Server]:
    port = free_port()
    flags: dict[str, object] = {
        "engine": "llama.cpp",
        "model": model,
        "ctx-size": CONTEXT_TOKENS,
        "port": port,
        "host": "127.0.0.1",
    }
    flags |= {"conversation-cache-mib": CACHE_MIB if park_dir else 0}
    if park_dir:
        flags |= {"conversation-cache-disk-mib": DISK_MIB, "park-dir": park_dir}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with running("parkd, llama.cpp in process", [sys.executable, "-m", "parkd", "serve", *words], port) as server:
        yield server


def rows_of(rows: Rows, start: Start, tokens: int) -> Rows:
    """Runs the whole conversation, then the next turn after the server was restarted."""
    with start() as server:
        a, said = conversation(rows, server, tokens)
    with start() as server:
        rows.ask(server, "A2 after a restart", after(a, said, "And last?"))
    return rows


def never_left(name: str, start: Start, tokens: int) -> Rows:
    """The same turns of A without another conversation in between."""
    rows = Rows(name)
    a = opening("alpha", tokens)
    with start() as server:
        said = rows.ask(server, "A cold", a).text
        rows.ask(server, "A2 after B", after(a, said, "And then?"))
        rows.ask(server, "branch of A", after(a, said, "Say it in other words."))
        # Before the edited message: after it, the answer would be read as part of a prompt instead of decoded.
        rows.ask(server, "A2 after a restart", after(a, said, "And last?"))
        rows.ask(server, "A, last message edited", edited(a))
    return rows


def compare(title: str, model: Path, tokens: int, folder: Path, others: Path | None) -> Compared:
    compared = Compared(title)
    sizes: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "model": model}

    def plain(cache_mib: int) -> Start:
        return lambda: peer_server(cache_ram_mib=cache_mib, **sizes)

    def behind(name: str, front: Callable[[Server, Path], contextlib.AbstractContextManager[Server]]) -> Start:
        slots = folder / name
        slots.mkdir()

        @contextlib.contextmanager
        def start() -> Iterator[Server]:
            with upstream_server(slots, **sizes) as upstream, front(upstream, slots) as server:
                yield server

        return start

    right = never_left("llama-server", plain(0), tokens)
    compared.served.append((rows_of(Rows("llama-server, --cache-ram"), plain(CACHE_MIB), tokens), right))
    right_here = never_left("parkd, nothing parked", lambda: in_process(model, None), tokens)
    here = rows_of(Rows("parkd, in process"), lambda: in_process(model, folder / "park"), tokens)
    compared.served.append((here, right_here))
    sidecar = behind("sidecar", lambda upstream, slots: sidecar_server(upstream.base_url, slots))
    compared.served.append((rows_of(Rows("parkd, before llama-server"), sidecar, tokens), right))
    if others is None:
        return compared
    hearth = behind("hearth", lambda upstream, slots: hearth_server(upstream, slots, others))
    warm = behind("stillwarm", lambda upstream, _slots: contextlib.nullcontext(upstream))
    stillwarm = StillwarmRows("stillwarm", folder / "stillwarm", model, CONTEXT_TOKENS)
    for rows, start in ((Rows("hearth-llm"), hearth), (stillwarm, warm)):
        try:
            compared.served.append((rows_of(rows, start, tokens), right))
        except (Exception, SystemExit) as error:  # another tool's failure is reported in the notes
            if isinstance(error, SystemExit) and not isinstance(error.code, str):
                raise  # this process was told to exit
            compared.notes.append(f"{rows.name} on {title} stopped: {str(error).splitlines()[0][:200]}")
            compared.served.append((rows, right))
    return compared


def goals(compared: list[Compared]) -> list[Goal]:
    found = []
    for each in compared:
        for rows, right in each.served:
            if rows.name.startswith("parkd"):
                wrong = [what for what, answer in right.answers.items() if rows.answers[what].text != answer.text]
                total = len(right.answers)
                claim = f"{each.title}: answers of {rows.name} are those of a conversation never left"
                found.append(Goal(claim, "all", f"{total - len(wrong)} of {total}", not wrong))
    return found


def raw(compared: list[Compared]) -> dict[str, Any]:
    return {
        each.title: {
            rows.name: {what: vars(answer) for what, answer in rows.answers.items()}
            for pair in each.served
            for rows in pair
        }
        for each in compared
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600, help="length of conversation A's opening, about")
    parser.add_argument("--without-others", action="store_true", help="neither install nor run the tools of others")
    options = parser.parse_args()
    started, begun = machine(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        others = folder / "others"
        why_not = "not asked for" if options.without_others else install(others)
        tiny = folder / "tiny.gguf"
        runpy.run_path(str(TINY))["write_tiny_hybrid"](tiny)
        compared = []
        # The hybrid's tokens are bytes, so its texts are shorter.
        for title, model, tokens in (
            ("SmolLM2", demo_model(), options.tokens),
            ("tiny hybrid", tiny, options.tokens // 2),
        ):
            park = folder / title.replace(" ", "-")
            park.mkdir()
            compared.append(compare(title, model, tokens, park, None if why_not else others))
    notes = [note for each in compared for note in each.notes]
    if why_not:
        notes.append(f"hearth-llm and stillwarm are not in the tables: {why_not}.")
    notes.append("stillwarm does not stream: its time is its restore plus the reading time that the server reports.")
    result = Result(
        name="llama_cpp",
        title="llama.cpp: in process, behind parkd, alone, and behind others",
        how=(
            f"SmolLM2-135M-Instruct Q4_1 and a tiny hybrid (Qwen3.5's kind, random weights, {tiny_tokens(compared)}), "
            f"one slot of {CONTEXT_TOKENS} tokens, f16 keys and values, greedy, on the CPU. The server is that of the "
            f"xllamacpp wheel, and the library in process that of llama-cpp-python, which are two builds. Equal means "
            f"equal to the same turn without another conversation in between, with the same build."
        ),
        tables=[turns(each.title, each.served) for each in compared],
        goals=goals(compared),
        notes=notes,
        raw=raw(compared),
    )
    progress(f"took {time.monotonic() - begun:.0f} s")
    finish(result, started)
    return 0


def tiny_tokens(compared: list[Compared]) -> str:
    cold = statistics.median(rows.answers["A cold"].prompt_tokens for rows, _ in compared[-1].served if rows.answers)
    return f"whose tokens are bytes: A is {cold:,.0f} of them"


if __name__ == "__main__":
    sys.exit(main())
