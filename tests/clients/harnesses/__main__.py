"""Harnesses and frameworks against a running server, each unchanged and in an environment of its own.
`make test-harnesses`.

    turns   openai-agents, pydantic-ai, the AI SDK, and the official SDKs through a LiteLLM proxy: three turns with a
            tool each, on every API that they speak
    load    cache-pressure, guidellm, aiperf: a short run of each

The server is the tests' engine without a model, which calls a tool after what a user says and answers after a result.
Whoever ends with an error, has a request refused, or reads its prompt again where it need not, fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from transformers import PreTrainedTokenizerFast

from tests.clients.client_kit import CALL, byte_tokenizer, serving

HERE = Path(__file__).parent
KEY = "parkd-harness"
ANSWER = "I found it."
LEAST_REUSED = 0.9
"""Of the prompt of each request but the first, in characters of the tests' engine."""
DEADLINE_S = 600
LINE = re.compile(r"prompt=(\d+) reused=(\d+) cache=(\S+)")
USER_LAST = re.compile(r"<\|im_start\|>user\n(?:(?!<\|im_start\|>).)*<\|im_start\|>assistant\n\Z", re.DOTALL)
OPENAI, MESSAGES = ("chat", "responses"), ("messages",)


def script(prompt: str) -> str:
    """What the engine says: a call after a user, an answer after a tool's result or where no tools are declared."""
    return CALL if USER_LAST.search(prompt) and prompt.startswith("<|im_start|>tools") else ANSWER


@dataclass
class Seen(logging.Handler):
    """The server's line for each request."""

    lines: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        if found := LINE.search(record.getMessage()):
            self.lines.append((int(found[1]), int(found[2]), found[3]))


@contextmanager
def server(seen: Seen) -> Iterator[str]:
    log = logging.getLogger("parkd.requests")
    log.addHandler(seen)
    log.setLevel(logging.INFO)
    try:
        with serving(script, context_tokens=65536) as served:
            yield served.url
    finally:
        log.removeHandler(seen)


@dataclass(frozen=True)
class Environment:
    """Packages apart from parkd's own, which they could not share."""

    folder: Path

    def python(self, name: str, packages: Sequence[str]) -> Path:
        """The interpreter of the environment of this name."""
        place = self.folder / name
        python = place / "bin" / "python"
        wanted = "\n".join(packages)
        noted = place / "wanted"
        if not noted.exists() or noted.read_text() != wanted:
            venv.create(place, with_pip=True, clear=True)
            command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages]
            subprocess.run(command, check=True, stdout=sys.stderr)
            noted.write_text(wanted)
        return python

    def node(self, packages: Sequence[str]) -> Path:
        """A folder with these packages of npm."""
        place = self.folder / "node"
        wanted, noted = "\n".join(packages), place / "wanted"
        if not noted.exists() or noted.read_text() != wanted:
            place.mkdir(exist_ok=True)
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), *packages]
            subprocess.run(command, check=True, stdout=sys.stderr)
            noted.write_text(wanted)
        return place


def run(words: Sequence[str | Path], *, cwd: Path, more: Mapping[str, str] | None = None) -> str:
    """What it printed. Raises AssertionError if it fails."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "NO_COLOR": "1", "CI": "1", **(more or {})}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


PROXY_KEY = "sk-parkd-harness-of-the-proxy"
Harness = Callable[[Environment, Path, str], Iterator[str]]
"""(environments, a scratch folder, the server's address): does one part each `next`, and names it."""


def openai_agents(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("openai-agents", ["openai-agents==0.24.0"])
    for dialect in OPENAI:
        run([python, HERE / "turns_openai_agents.py", url, KEY, dialect], cwd=scratch)
        yield dialect


def pydantic_ai(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("pydantic-ai", ["pydantic-ai-slim[anthropic,openai]==2.68.0"])
    for dialect in (*OPENAI, *MESSAGES):
        run([python, HERE / "turns_pydantic_ai.py", url, KEY, dialect], cwd=scratch)
        yield dialect


def ai_sdk(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    if not shutil.which("npm"):
        raise AssertionError("the AI SDK needs npm (Node.js 20 or newer)")
    folder = environment.node(["ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7"])
    turns = folder / "turns_ai_sdk.mjs"  # packages are looked for beside a script
    shutil.copyfile(HERE / turns.name, turns)
    for dialect in (*OPENAI, *MESSAGES):
        run(["node", turns, url, KEY, dialect], cwd=scratch)
        yield dialect


def litellm(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("litellm", ["litellm[proxy]==1.106.0", "anthropic==2.14.0"])
    settings = {"model": "openai/parkd", "api_base": f"{url}/v1", "api_key": KEY}
    config = scratch / "litellm.yaml"
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": "parkd", "litellm_params": settings}],
                "general_settings": {"master_key": PROXY_KEY},
            }
        )
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python.parent / "litellm", "--config", config, "--port", str(port), "--host", "127.0.0.1"]
    said = scratch / "litellm.log"
    with said.open("w") as log, subprocess.Popen(list(map(str, command)), cwd=scratch, stdout=log, stderr=log) as proxy:
        try:
            address = f"http://127.0.0.1:{port}"
            await_answer(f"{address}/health/liveliness", proxy, said)
            for dialect in (*OPENAI, *MESSAGES):
                run([python, HERE / "turns_sdk.py", address, PROXY_KEY, dialect], cwd=scratch)
                yield dialect
        finally:
            proxy.terminate()


def await_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        assert process.poll() is None, f"the proxy ended:\n{log.read_text()[-2000:]}"
        try:
            if httpx.get(url, trust_env=False, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError("the proxy does not answer")


def cache_pressure(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("cache-pressure", ["cache-pressure==0.6.3"])
    command = [python.parent / "cache-pressure", "--base-url", f"{url}/v1", "--api-key", KEY, "--model", "parkd"]
    sizes = ["--kv-size", "8000", "--context-tokens", "2000", "--num-contexts", "4", "--skip-calibrate"]
    run([*command, *sizes, "--hit-threshold", "30", "--output", scratch / "pressure.json"], cwd=scratch)
    yield "4 contexts"


def guidellm(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("guidellm", ["torch==2.13.0", "guidellm==0.8.1"])
    prompts = scratch / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(6)))
    backend = f"kind=openai_http,target={url},model=parkd,api_key={KEY}"
    command = [python.parent / "guidellm", "run", "--disable-progress", "--backend", backend]
    shape = ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=6"]
    run([*command, *shape, "--data", f"kind=json_file,path={prompts}"], cwd=scratch)
    yield "6 requests"


def aiperf(environment: Environment, scratch: Path, url: str) -> Iterator[str]:
    python = environment.python("aiperf", ["aiperf==0.13.0"])
    command = [python.parent / "aiperf", "profile", "--model", "parkd", "--url", url, "--endpoint-type", "chat"]
    words = scratch / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(words)
    shape = ["--streaming", "--request-count", "6", "--isl", "64", "--osl", "8", "--ui", "none"]
    run([*command, *shape, "--api-key", KEY, "--tokenizer", words], cwd=scratch)
    yield "6 requests"


TURNS: Mapping[str, Harness] = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "ai-sdk": ai_sdk,
    "litellm": litellm,
}
LOAD: Mapping[str, Harness] = {"cache-pressure": cache_pressure, "guidellm": guidellm, "aiperf": aiperf}


def refused(url: str) -> dict[str, float]:
    """Requests by what became of them, other than an answer or a client that left."""
    page = httpx.get(f"{url}/metrics", headers={"x-api-key": KEY}, trust_env=False).text
    found = re.findall(r'^parkd_requests_total\{outcome="([^"]+)"\} (\S+)', page, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found if outcome not in ("ok", "cancelled")}


def check(name: str, environment: Environment, scratch: Path) -> str:
    """One line for people. Raises AssertionError."""
    seen = Seen()
    told = []
    with server(seen) as url:
        before = 0
        for part in {**TURNS, **LOAD}[name](environment, scratch, url):
            lines = seen.lines[before:]
            assert lines, f"{part}: no request came"
            before = len(seen.lines)
            if name in TURNS:
                assert len(lines) == 6, f"{part}: three turns with a tool each are six requests, not {len(lines)}"
                short = [line for line in lines[1:] if line[1] < LEAST_REUSED * lines[0][0]]
                assert not short, f"{part}: read again: {short} of {lines}"
            reused, prompts = sum(line[1] for line in lines[1:]), sum(line[0] for line in lines[1:])
            told.append(f"{part} {len(lines)} requests, {reused / max(prompts, 1):.0%} reused")
        wrong = refused(url)
        assert not wrong, f"requests were refused: {wrong}"
    return f"{name}: {'; '.join(told)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.harnesses")
    parser.add_argument("names", nargs="*", default=[*TURNS, *LOAD], help=f"{', '.join([*TURNS, *LOAD])} (all)")
    parser.add_argument("--folder", type=Path, help="where environments are kept (a scratch folder that is removed)")
    given = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="parkd-harnesses-") as scratch:
        environment = Environment((given.folder or Path(scratch, "environments")).absolute())
        environment.folder.mkdir(parents=True, exist_ok=True)
        for name in given.names:
            place = Path(scratch, name)
            place.mkdir()
            try:
                print(check(name, environment, place), flush=True)
            except (AssertionError, subprocess.SubprocessError) as error:
                failures += 1
                print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
