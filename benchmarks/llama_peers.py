"""Two other tools that save the slots of a llama-server, for comparison: `hearth-llm` and `stillwarm` from PyPI.

They are installed into a temporary folder without dependencies (they need none), and run in front of the same server as
parkd. Both keep whole slot files. Nothing else here may import them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat import REQUEST_TIMEOUT_S, Answer
from benchmarks.llama_server import OUTPUT_TOKENS, Messages, Rows
from benchmarks.servers import Server, free_port, running

PACKAGES = ("hearth-llm==0.1.1", "stillwarm==0.1.1")
INSTALL_TIMEOUT_S = 120


def install(folder: Path) -> str | None:
    """Installs both. Returns the reason if that failed, else None."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip did not install {' and '.join(PACKAGES)} within {INSTALL_TIMEOUT_S} s"
    if run.returncode:
        return f"pip cannot install {' and '.join(PACKAGES)} here"
    sys.path.append(str(folder))
    return None


@contextlib.contextmanager
def hearth_server(upstream: Server, slot_dir: Path, folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "hearth", "serve", "--upstream", upstream.base_url]
    command += ["--cache-dir", str(slot_dir), "--port", str(port)]
    with running("hearth-llm", command, port, environment={"PYTHONPATH": str(folder)}) as server:
        yield server


class StillwarmRows(Rows):
    """Answers through stillwarm's `Session`, which does not stream; the caller names the conversation.

    The time to the first token is its restore plus the server's reading. After each answer it saves, and has the server
    decode a probe of 64 tokens, which is not counted.
    """

    def __init__(self, name: str, slot_dir: Path, model: Path, context_tokens: int) -> None:
        super().__init__(name)
        self._slot_dir, self._context_tokens = slot_dir, context_tokens
        self._digest = hashlib.sha256(model.read_bytes()).hexdigest()
        self._sessions: dict[str, Any] = {}

    def send(self, server: Server, messages: Messages) -> Answer:
        session = self._session_of(server)
        client = httpx.Client(base_url=server.base_url, timeout=REQUEST_TIMEOUT_S)
        with client:
            reply = client.post("/apply-template", json={"messages": messages})
        prompt = reply.raise_for_status().json()["prompt"]
        name = messages[0]["content"].split()[2]  # the document's name, which identifies the conversation
        started = time.perf_counter()
        if session._loaded != name and session._bin_path(name).exists():
            session.restore(name)
        restored_s = time.perf_counter() - started
        result = session.ask(name, prompt, n_predict=OUTPUT_TOKENS)
        timings = result.timings
        reused, read = int(timings.get("cache_n", 0)), int(timings["prompt_n"])
        first_token_s = restored_s + timings["prompt_ms"] / 1e3
        output_tokens = int(timings["predicted_n"])
        total_s = first_token_s + timings["predicted_ms"] / 1e3
        return Answer(result.content, first_token_s, total_s, reused + read, reused, output_tokens, "")

    def _session_of(self, server: Server) -> Any:
        if server.base_url not in self._sessions:
            stillwarm = importlib.import_module("stillwarm")
            profile = importlib.import_module("stillwarm.compat").ServerProfile(
                self._digest, "on", "f16", "f16", swa_full=False, ctx_size=self._context_tokens
            )
            upstream = importlib.import_module("stillwarm.server").LlamaServer(server.base_url)
            self._sessions[server.base_url] = stillwarm.Session(upstream, profile, self._slot_dir)
        return self._sessions[server.base_url]
