"""llama.cpp on a card: parking and restoring over the link, and turns over HTTP beside llama.cpp's own server.

python -m benchmarks.gpu.llama file PATH [--size small|8b|moe]        a GGUF file of random Q4_0 weights
python -m benchmarks.gpu.llama link PATH [--tokens N] [--kv TYPE]     copies of a conversation; its bits must come back
python -m benchmarks.gpu.llama turns PATH [--a N] [--b N] [--server LLAMA_SERVER]
python -m benchmarks.gpu.llama restart PATH [--a N]                   A again, by a server started over the same files

`turns` asks parkd, and the server if one is named, the same: A, B, A grown by a turn, B again at once behind a grown
A, and A with its last message edited. Each prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

from benchmarks.servers import free_port
from tests.integration.llama.tiny_gguf import add_vocabulary

SIZES = {
    "small": {"layers": 4, "embed": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512},
    "8b": {"layers": 36, "embed": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 12288},
    "moe": {"layers": 12, "embed": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 768, "experts": 128},
}
"""`8b`: the layers of Qwen3-8B; `moe`: a quarter of those of Qwen3-30B-A3B. The vocabulary is that of bytes, so that a
text has as many tokens as letters."""
EXPERTS_USED = 8
BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18
"""Of Q4_0: a half-precision scale and 32 codes of 4 bits."""
REPEATS = 3
TAIL_TOKENS = 64
ANSWER_TOKENS = 16
START_DEADLINE_S = 150.0
STOP_DEADLINE_S = 60.0
TURN_DEADLINE_S = 120.0


def write_model(path: Path, size: str, seed: int = 0) -> None:
    shape, rng = SIZES[size], np.random.default_rng(seed)
    experts = shape.get("experts", 0)
    writer = gguf.GGUFWriter(path, "qwen3moe" if experts else "qwen3")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(EXPERTS_USED)
        writer.add_expert_feed_forward_length(shape["ffn"])
    writer.add_name(f"random-{size}")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(shape["embed"])
    writer.add_feed_forward_length(shape["ffn"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    vocabulary = add_vocabulary(writer)
    blocks = rng.integers(0, 256, (1 << 20, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.004).tobytes(), dtype=np.uint8)

    def add(name: str, *shape: int) -> None:
        """`shape` outermost first."""
        count = math.prod(shape) // BLOCK_WEIGHTS
        start = int(rng.integers(0, len(blocks) // 2))
        data = np.resize(blocks[start:], (count, BLOCK_BYTES)).reshape(*shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name: str, count: int) -> None:
        writer.add_tensor(name, np.ones(count, dtype=np.float32))

    embed, inner = shape["embed"], shape["heads"] * shape["head_dim"]
    kv = shape["kv_heads"] * shape["head_dim"]
    add("token_embd.weight", vocabulary, embed)
    ones("output_norm.weight", embed)
    for layer in range(shape["layers"]):
        block = f"blk.{layer}"
        for norm, count in (("attn_norm", embed), ("ffn_norm", embed)):
            ones(f"{block}.{norm}.weight", count)
        for norm in ("attn_q_norm", "attn_k_norm"):
            ones(f"{block}.{norm}.weight", shape["head_dim"])
        add(f"{block}.attn_q.weight", inner, embed)
        add(f"{block}.attn_k.weight", kv, embed)
        add(f"{block}.attn_v.weight", kv, embed)
        add(f"{block}.attn_output.weight", embed, inner)
        if experts:
            router = rng.standard_normal((experts, embed)).astype(np.float32) * 0.02
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
            add(f"{block}.ffn_gate_exps.weight", experts, shape["ffn"], embed)
            add(f"{block}.ffn_up_exps.weight", experts, shape["ffn"], embed)
            add(f"{block}.ffn_down_exps.weight", experts, embed, shape["ffn"])
            continue
        add(f"{block}.ffn_gate.weight", shape["ffn"], embed)
        add(f"{block}.ffn_up.weight", shape["ffn"], embed)
        add(f"{block}.ffn_down.weight", embed, shape["ffn"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def link_bytes_per_s() -> dict[str, float] | None:
    """Page-locked copies of 1 GiB by torch, in a process of its own; None without a card."""
    code = (
        "import torch, time, json\n"
        "h=torch.empty(1<<30,dtype=torch.uint8,pin_memory=True); d=torch.empty(1<<30,dtype=torch.uint8,device='cuda')\n"
        "def t(a,b):\n"
        "    a.copy_(b); torch.cuda.synchronize(); s=time.perf_counter()\n"
        "    for _ in range(5): a.copy_(b,non_blocking=True)\n"
        "    torch.cuda.synchronize(); return 5*(1<<30)/(time.perf_counter()-s)\n"
        "print(json.dumps({'out':t(h,d),'in':t(d,h)}))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError):
        return None


class Calls:
    """Seconds spent in the library's calls of a move, by name; those of several threads are added up."""

    NAMES = ("share", "adopt", "drop", "read_state", "write_state")

    def __init__(self, sequence: Any) -> None:
        self.spent: dict[str, float] = {}
        for name in self.NAMES:
            setattr(sequence, name, self._timed(name, getattr(sequence, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            found = call(*given, **named)
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began_s
            return found

        return timed


def link(path: Path, tokens: int, kv: str, copy_bytes: int, ways: list[tuple[int, int]]) -> dict[str, Any]:
    """`copy_bytes` and, in turn, each of `ways` (blocks copied at once, threads that sum) stand in for parkd's own, to
    see what they are worth."""
    from parkd.config import LlamaSettings, ModelConfig
    from parkd.engine_adapter.llama_cpp import cards
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine
    from parkd.engine_adapter.llama_cpp.ranges import CellRanges
    from parkd.engine_adapter.llama_cpp.row_moves import RowMoves
    from parkd.identity.chain import prefix_hashes
    from parkd.state import EngineConfig
    from parkd.store.records import Capture, CaptureRequest, StoreConfig
    from parkd.store.store import ConversationStore

    cards.COPY_BYTES = copy_bytes
    cards.COPIES_AT_ONCE = max(copies for copies, _ in ways)
    never = threading.Event()
    llama = LlamaSettings(cache_type_k=kv, cache_type_v=kv)
    with tempfile.TemporaryDirectory() as home:
        sizes = EngineConfig(context_tokens=tokens + 4096, batch_tokens=2048)
        config = ModelConfig(str(path), Path(home), llama=llama, layout=sizes)
        engine = LlamaCppEngine.load(config)
        layout, hooks = engine.info.layout, engine.host_memory_hooks()
        whole = layout.block_bytes(tokens + layout.block_tokens, -(-tokens // layout.block_tokens) + 1)
        budget = 2 * whole + (256 << 20)
        store = ConversationStore(StoreConfig(budget, layout.block_tokens), layout, time.monotonic, slab_hooks=hooks)
        ids = np.random.default_rng(1).integers(33, 120, tokens + TAIL_TOKENS).astype(np.int64)
        other = np.random.default_rng(2).integers(33, 120, tokens).astype(np.int64)
        began_s = time.perf_counter()
        engine.extend(ids[:tokens], cancel=never)
        read_s = time.perf_counter() - began_s
        units = ids[:tokens].astype(np.uint64)
        key = b"k" * 16
        hashes = prefix_hashes(units, key, layout.block_tokens)

        def go_on() -> np.ndarray:
            engine.extend(ids[tokens:], cancel=never)
            rows = []
            for token in (40, 41):
                engine.timeline.decode(np.array([token], dtype=np.int64), None)
                rows.append(engine.sequence.logits().copy())
            return np.array(rows)

        def park(number: int) -> tuple[Any, dict[str, float]]:
            capture = store.begin_capture(CaptureRequest(key, units, hashes, (), layout.digest))
            assert isinstance(capture, Capture), capture
            if number == 0 and hooks is not None:
                assert hooks.settle(120), "memory is still being locked"
            began_s = time.perf_counter()
            in_flight = engine.start_capture(capture.transfer)
            copied_s = time.perf_counter() - began_s
            sums = engine.capture(capture.transfer) if in_flight is None else in_flight.wait()
            took_s = time.perf_counter() - began_s
            return store.commit(capture, sums), {"copied": copied_s, "parked": took_s, "bytes": capture.transfer.bytes}

        moves, number, calls = engine._moves, 0, Calls(engine.sequence)
        seen: list[dict[str, Any]] = []

        def take(copies: int, sum_threads: int) -> None:
            if isinstance(moves, RowMoves):
                moves.close()
                moves._threads = ThreadPoolExecutor(sum_threads)
                moves._ranges = CellRanges(engine.sequence, moves._ranges.form, min(copies, engine.model.copies))

        for way in ways:
            take(*way)
            took = []
            for _ in range(REPEATS):
                calls.spent.clear()
                parked, measured = park(number)
                took.append(measured)
                number += 1
            seen.append({"copies": way[0], "sum_threads": way[1], "park": took, "restore_s": []})
            seen[-1]["park_calls_s"] = dict(calls.spent)
        stayed = go_on()
        engine.reset()
        engine.extend(other[: min(tokens, 8192)], cancel=never)
        equal = []
        for way, each in zip(ways, seen, strict=True):
            take(*way)
            for _ in range(REPEATS):
                engine.reset()
                calls.spent.clear()
                with store.lease(parked.id, tokens, 0) as lease:
                    began_s = time.perf_counter()
                    engine.restore(lease.transfer)
                    each["restore_s"].append(time.perf_counter() - began_s)
            each["restore_calls_s"] = dict(calls.spent)
            equal.append(bool(np.array_equal(go_on(), stayed)))
        for each in seen:
            state_bytes = each["park"][0]["bytes"]
            each["park_gb_per_s"] = state_bytes / min(one["parked"] for one in each["park"]) / 1e9
            each["park_copied_gb_per_s"] = state_bytes / min(one["copied"] for one in each["park"]) / 1e9
            each["restore_gb_per_s"] = state_bytes / min(each["restore_s"]) / 1e9
        decode_s = []
        for _ in range(32):
            began_s = time.perf_counter()
            engine.timeline.decode(np.array([40], dtype=np.int64), None)
            engine.sequence.logits()
            decode_s.append(time.perf_counter() - began_s)
        finite = bool(np.isfinite(stayed).all())
        engine.close()
    return {
        "tokens": tokens,
        "kv": kv,
        "copy_bytes": copy_bytes,
        "grain": layout.grain.value,
        "block_tokens": layout.block_tokens,
        "page_locks": hooks is not None,
        "read_s": read_s,
        "ways": seen,
        "decode_ms": statistics.median(decode_s) * 1e3,
        "logits_equal": equal,
        "logits_finite": finite,
    }


@contextmanager
def served(name: str, command: list[str], port: int, log: Path) -> Iterator[httpx.Client]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TURN_DEADLINE_S) as client:
                deadline = time.monotonic() + START_DEADLINE_S
                while True:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}")
                    try:
                        if client.get("/health").status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    time.sleep(0.2)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One turn: seconds to the first token and between tokens, and what was reused."""
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    usage: dict[str, Any] = {}
    began_s, at, text = time.perf_counter(), [], ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(response.read().decode()[:1000])
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            timings = chunk.get("timings") or {}
            usage = {**usage, **({"cache_n": timings["cache_n"]} if "cache_n" in timings else {})}
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta") or {}
                piece = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                if piece:
                    at.append(time.perf_counter())
                    text += piece
    done_s = time.perf_counter()
    between = [later - earlier for earlier, later in itertools.pairwise(at)]
    return {
        "first_token_s": (at[0] if at else done_s) - began_s,
        "whole_s": done_s - began_s,
        "token_ms": statistics.median(between) * 1e3 if between else None,
        "prompt_tokens": usage.get("prompt_tokens"),
        "reused": usage.get("cache_n", (usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
        "text": text,
    }


def letters(count: int, seed: int) -> str:
    return bytes(np.random.default_rng(seed).integers(97, 123, count, dtype=np.uint8)).decode()


def conversation(client: httpx.Client, a_tokens: int, b_tokens: int) -> dict[str, Any]:
    """`settled`: a pause in which what the turn before left may be saved; else the next is asked at once."""
    a = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": letters(a_tokens, 1)}]
    b = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": letters(b_tokens, 2)}]
    c = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": letters(b_tokens, 3)}]
    seen: dict[str, Any] = {"warm": ask(client, [{"role": "user", "content": "Begin."}])}

    def after(messages: list[dict[str, str]], answer: dict[str, Any], words: str) -> list[dict[str, str]]:
        return [*messages, {"role": "assistant", "content": answer["text"]}, {"role": "user", "content": words}]

    seen["B alone"] = ask(client, c)
    seen["A1"] = ask(client, a)
    seen["B at once behind A1"] = ask(client, b)
    a2 = after(a, seen["A1"], "And then?")
    seen["A2 after B"] = ask(client, a2)
    seen["A2 edited"] = ask(client, after(a, seen["A1"], "And what now?"))
    a3 = after(a2, seen["A2 after B"], "Go on.")
    seen["A3"] = ask(client, a3)
    time.sleep(2.0)
    seen["B2 settled"] = ask(client, after(b, seen["B at once behind A1"], "And then?"))
    time.sleep(2.0)
    seen["A4 settled"] = ask(client, after(a3, seen["A3"], "More."))
    for each in seen.values():
        del each["text"]
    return seen


def turns(path: Path, a_tokens: int, b_tokens: int, server: str | None, cache_mib: int) -> dict[str, Any]:
    context = a_tokens + b_tokens + 4096
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if server is not None:
            port = free_port()
            command = [server, "-m", str(path), "-c", str(context), "-ngl", "99", "-np", "1", "--port", str(port)]
            command += ["--host", "127.0.0.1", "--cache-ram", str(cache_mib), "-b", "2048"]
            with served("llama-server", command, port, Path(folder) / "llama-server.log") as client:
                found["llama-server"] = conversation(client, a_tokens, b_tokens)
        with parkd(path, context, cache_mib, Path(folder)) as client:
            found["parkd"] = conversation(client, a_tokens, b_tokens)
            page = client.get("/metrics").text
            found["moved"] = [line for line in page.splitlines() if line.startswith("parkd_moved")]
        found["log"] = (Path(folder) / "parkd.log").read_text()[-3000:]
    return found


@contextmanager
def parkd(path: Path, context: int, cache_mib: int, folder: Path, *more: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "parkd", "serve", "--engine", "llama.cpp", "--model", str(path)]
    command += ["--ctx-size", str(context), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--conversation-cache-mib", str(cache_mib), "--batch-size", "2048", *more]
    with served("parkd", command, port, folder / "parkd.log") as client:
        yield client


def restart(path: Path, a_tokens: int, cache_mib: int) -> dict[str, Any]:
    """A and its next turn, with the server stopped and started in between."""
    found: dict[str, Any] = {}
    a = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": letters(a_tokens, 1)}]
    with tempfile.TemporaryDirectory() as folder:
        disk = ["--park-dir", f"{folder}/parked", "--conversation-cache-disk-mib", str(cache_mib)]
        with parkd(path, a_tokens + 4096, cache_mib, Path(folder), *disk) as client:
            found["A1"] = ask(client, a)
            began_s = time.perf_counter()
        found["stopped_s"] = time.perf_counter() - began_s
        a += [{"role": "assistant", "content": found["A1"]["text"]}, {"role": "user", "content": "And then?"}]
        began_s = time.perf_counter()
        with parkd(path, a_tokens + 4096, cache_mib, Path(folder), *disk) as client:
            found["started_s"] = time.perf_counter() - began_s
            found["A2"] = ask(client, a)
    for turn in ("A1", "A2"):
        del found[turn]["text"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("file", "link", "turns", "restart"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--copy-bytes", type=int, default=2 << 20)
    parser.add_argument("--ways", default="3:8", help="blocks copied at once and threads that sum; several are tried")
    parser.add_argument("--a", type=int, default=85_600)
    parser.add_argument("--b", type=int, default=14_500)
    parser.add_argument("--cache-mib", type=int, default=40_000)
    parser.add_argument("--server")
    asked = parser.parse_args()
    if asked.what == "file":
        write_model(asked.path, asked.size)
        return 0
    if asked.what == "link":
        pairs = [way.split(":") for way in asked.ways.split(",")]
        ways = [(int(copies), int(threads)) for copies, threads in pairs]
        found = {"link": link_bytes_per_s(), **link(asked.path, asked.tokens, asked.kv, asked.copy_bytes, ways)}
    elif asked.what == "restart":
        found = restart(asked.path, asked.a, asked.cache_mib)
    else:
        found = turns(asked.path, asked.a, asked.b, asked.server, asked.cache_mib)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
