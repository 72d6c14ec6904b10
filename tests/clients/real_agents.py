"""Real agents against a running server: one scripted turn and a resume of each. `make test-agents`.

Installs Claude Code, Codex and opencode from npm into a scratch folder, starts parkd, lets each agent ask and go on,
and checks that no request was refused and that the second turn reused nearly all of its prompt. The model is one of
random weights unless --model names another: what it answers does not matter, but that it ends by itself does, since
agents take an answer that was cut for a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import preset_tokenizer
from transformers import GenerationConfig

from parkd.demo.server import running_server
from tests.clients.client_kit import serving

PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai"}
LEAST_REUSED = 0.95
TURN_DEADLINE_S = 900
KEY = "parkd-agents"
LINE = re.compile(r"key=\S+ prompt=(\d+) reused=(\d+) cache=(\S+) .* why=(.*)$")
TERSE = "terse"
ONE_END_IN = 32
"""Tokens of the terse model: so many are its answers long, on the average."""
LONGEST_ANSWER = "1024"
FIRST, SECOND = "Say hello in one short sentence. Use no tools.", "And once more, in other words."


@dataclass
class Requests:
    """What the server says of each request, as it comes."""

    lines: list[tuple[int, int, str]] = field(default_factory=list)

    def see(self, line: str) -> None:
        found = LINE.search(line)
        if found:
            self.lines.append((int(found[1]), int(found[2]), f"{found[3]} {found[4]}"))


@dataclass(frozen=True)
class Place:
    """Where an agent runs: a home and a project folder of its own, and the server."""

    bin: Path
    home: Path
    project: Path
    url: str

    def run(self, words: list[str], more: Mapping[str, str]) -> str:
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "NO_COLOR": "1",
            "CI": "1",
            **more,
        }
        done = subprocess.run(
            words,
            cwd=self.project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(
                f"{words[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done.stdout


Turns = Callable[[Place], Iterator[str]]
"""Runs one turn each `next`, giving what the agent printed."""


def claude(place: Place) -> Iterator[str]:
    quiet = (
        "DISABLE_TELEMETRY",
        "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    )
    environment = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "parkd",
        "ANTHROPIC_SMALL_FAST_MODEL": "parkd",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": LONGEST_ANSWER,
        **dict.fromkeys(quiet, "1"),
    }
    told = place.run(["claude", "-p", FIRST, "--output-format", "json"], environment)
    yield told
    session = json.loads(told)["session_id"]
    yield place.run(["claude", "-p", SECOND, "--output-format", "json", "--resume", session], environment)


def codex(place: Place) -> Iterator[str]:
    settings = {
        "model_provider": "parkd",
        "model_providers.parkd.name": "parkd",
        "model_providers.parkd.base_url": f"{place.url}/v1",
        "model_providers.parkd.wire_api": "responses",
        "model_providers.parkd.env_key": "PARKD_AGENT_KEY",
        "model": "parkd",
    }
    flags = [word for name, value in settings.items() for word in ("-c", f'{name}="{value}"')]
    environment = {"CODEX_HOME": str(place.home / ".codex"), "PARKD_AGENT_KEY": KEY}
    (place.home / ".codex").mkdir(exist_ok=True)
    yield place.run(["codex", "exec", "--skip-git-repo-check", *flags, FIRST], environment)
    yield place.run(["codex", "exec", "--skip-git-repo-check", *flags, "resume", "--last", SECOND], environment)


def opencode(place: Place) -> Iterator[str]:
    model = {"name": "parkd", "limit": {"context": 200_000, "output": int(LONGEST_ANSWER)}, "tool_call": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "parkd",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": KEY},
        "models": {"parkd": model},
    }
    config = {
        "provider": {"parkd": provider},
        "model": "parkd/parkd",
        "small_model": "parkd/parkd",
        "autoupdate": False,
    }
    (place.project / "opencode.json").write_text(json.dumps(config))
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    yield place.run(["opencode", "run", "-m", "parkd/parkd", FIRST], environment)
    yield place.run(["opencode", "run", "-m", "parkd/parkd", "--continue", SECOND], environment)


AGENTS: Mapping[str, Turns] = {"claude": claude, "codex": codex, "opencode": opencode}


def install(folder: Path, names: list[str]) -> Path:
    """The folder of the agents' commands."""
    if not shutil.which("npm"):
        raise SystemExit("test-agents needs npm (Node.js 20 or newer)")
    wanted = [PACKAGES[name] for name in names if not (folder / "node_modules/.bin" / name).exists()]
    if wanted:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "node_modules/.bin"


def terse_model(folder: Path) -> str:
    """Files of a small random model, of whose tokens every so many ends an answer."""
    settings = preset_config("random:tiny-qwen3-long")
    model = random_model(settings, torch.float32, torch.device("cpu"))
    ends = [settings.eos_token_id, *range(ONE_END_IN, settings.vocab_size, ONE_END_IN)]
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.save_pretrained(folder)
    preset_tokenizer(settings).save_pretrained(folder)
    return str(folder)


@contextmanager
def server(model: str, context_tokens: int, requests: Requests) -> Iterator[str]:
    if model == "fake":  # the tests' engine without a model: for the agents' protocols alone
        handler = _Handler(requests)
        log = logging.getLogger("parkd.requests")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        with serving("Hello there.", context_tokens=context_tokens) as served:
            yield served.url
        log.removeHandler(handler)
        return
    flags = {
        "model": model,
        "port": "0",
        "ctx-size": str(context_tokens),
        "max-output-tokens": LONGEST_ANSWER,
        "conversation-cache-mib": "1024",
        "api-key": KEY,
    }
    with running_server(flags, requests.see) as url:
        yield url


class _Handler(logging.Handler):
    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self._requests = requests

    def emit(self, record: logging.LogRecord) -> None:
        self._requests.see(record.getMessage())


def refused(url: str) -> dict[str, float]:
    """Requests by what became of them, other than an answer or a client that left."""
    page = httpx.get(f"{url}/metrics", headers={"x-api-key": KEY}, trust_env=False).text
    found = re.findall(r'^parkd_requests_total\{outcome="([^"]+)"\} (\S+)', page, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found if outcome not in ("ok", "cancelled")}


def check(name: str, place: Place, requests: Requests) -> str:
    """One line for people. Raises AssertionError."""
    turns = AGENTS[name](place)
    next(turns)
    first = list(requests.lines)
    before = len(first)
    next(turns)
    second = requests.lines[before:]
    assert first, "no request came"
    assert second, "no request came with the second turn"
    prompt, reused, how = max(second)
    wrong = refused(place.url)
    assert not wrong, f"requests were refused: {wrong}"
    assert reused >= LEAST_REUSED * prompt, f"{reused} of {prompt} tokens were reused ({how}); all: {requests.lines}"
    tokens = f"{max(first)[0]} then {prompt} tokens, {reused} reused ({reused / prompt:.1%})"
    return f"{name}: {len(first)} + {len(second)} requests, {tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("agents", nargs="*", default=list(AGENTS), help="claude, codex, opencode (all)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where npm installs (a scratch folder that is removed)"
    )
    parser.add_argument("--model", default=TERSE, help="a model for parkd, or `fake` (a small one)")
    parser.add_argument("--ctx-size", type=int, default=131072)
    given = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="parkd-agents-") as scratch:
        model = terse_model(Path(scratch, "model")) if given.model == TERSE else given.model
        commands = install(given.folder or Path(scratch), given.agents).resolve()
        for name in given.agents:
            requests = Requests()
            home, project = Path(scratch, name, "home"), Path(scratch, name, "project")
            home.mkdir(parents=True)
            project.mkdir()
            with server(model, given.ctx_size, requests) as url:
                try:
                    print(check(name, Place(commands, home, project, url), requests), flush=True)
                except (AssertionError, subprocess.TimeoutExpired, ValueError) as error:
                    failures += 1
                    print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
