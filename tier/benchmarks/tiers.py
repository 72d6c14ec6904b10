"""vLLM without a tier, with its tier in memory, with its tier of files, and with parkd-tier, in one run.

    .venv-vllm/bin/python tier/benchmarks/tiers.py --out tier/benchmarks/results/tiers.json     after make test-vllm

First token of a prompt A that was read before: with everything still on the device, from memory after other prompts
have pushed it off the device, and from disk after memory was emptied too. Bytes that were written. And, on a smaller
model, flips: one random bit of one random chunk of A on disk, then A is asked for again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from engine_kit import CHUNK_TOKENS, Answer, Engine, make_model, parkd_tier, running, stock_fs_tier, tokens

MIB = 1 << 20
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
LARGE |= {"num_key_value_heads": 4, "initializer_range": 0.05}
PROMPT_TOKENS = 2000
REPEATS = 3


def memory_tier(directory: Path, ram_mib: int) -> dict[str, Any]:
    config = stock_fs_tier(directory, ram_mib)
    config["kv_connector_extra_config"]["secondary_tiers"] = []
    return config


def proved_tier(directory: Path, ram_mib: int = 64) -> dict[str, Any]:
    return parkd_tier(directory, ram_mib, disk_mib=256)


TIERS: dict[str, Any] = {
    "vLLM": None,
    "vLLM, its tier in memory": memory_tier,
    "vLLM, its tier of files": stock_fs_tier,
    "vLLM, parkd-tier": proved_tier,
}


def files_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def first_token(engine: Engine, prompt: list[int]) -> Answer:
    return engine.ask(prompt, count=1)


def measure(name: str, tier: Any, model: Path, folder: Path) -> dict[str, Any]:
    transfer = None if tier is None else tier(folder / "kept", 256)
    options = {"max_model_len": PROMPT_TOKENS + 64, "kv_cache_memory_bytes": 40 * MIB}
    a, others = tokens(1, PROMPT_TOKENS), [tokens(seed, PROMPT_TOKENS) for seed in (2, 3)]
    found: dict[str, Any] = {"tier": name}
    with running(model, transfer, **options) as engine:
        first_token(engine, tokens(9, 200))
        cold = first_token(engine, a)
        seen: dict[str, list[Answer]] = {"device": [], "memory": [], "disk": []}
        for _ in range(REPEATS):
            seen["device"].append(first_token(engine, a))
            for other in others:
                first_token(engine, other)
            seen["memory"].append(first_token(engine, a))
            if tier in (stock_fs_tier, proved_tier):
                engine.empty_memory()
                seen["disk"].append(first_token(engine, a))
        assert all(each.tokens == cold.tokens for answers in seen.values() for each in answers)
    found["cold_s"] = cold.seconds
    for place, answers in seen.items():
        found[f"{place}_s"] = statistics.median(each.seconds for each in answers) if answers else None
        found[f"{place}_cached"] = min((each.cached for each in answers), default=None)
    found["written_mib"] = files_bytes(folder / "kept") / MIB if (folder / "kept").exists() else 0.0
    return found


def flips(name: str, tier: Any, suffix: str, model: Path, folder: Path, count: int) -> dict[str, Any]:
    source, prompt = random.Random(1), tokens(1)
    found = {"tier": name, "flips": count, "damage_used": 0, "wrong_answers": 0}
    with running(model, tier(folder / "kept")) as engine:
        cold = engine.ask(prompt)
        for _ in range(count):
            engine.empty_memory()
            paths = sorted(path for path in (folder / "kept").rglob(f"*{suffix}"))
            path = source.choice(paths)
            content = bytearray(path.read_bytes())
            at, bit = source.randrange(len(content)), source.randrange(8)
            content[at] ^= 1 << bit
            path.write_bytes(content)
            answer = engine.ask(prompt)
            found["damage_used"] += answer.cached == len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS
            found["wrong_answers"] += answer.tokens != cold.tokens
            if path.exists():  # nobody noticed
                content[at] ^= 1 << bit
                path.write_bytes(content)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flips", type=int, default=200)
    arguments = parser.parse_args()
    import vllm
    import vllm.entrypoints.llm

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "large", 1, **LARGE)
        make_model(folder / "small", 1)
        speeds, damage = [], []
        for number, (label, tier) in enumerate(TIERS.items()):
            speeds.append(measure(label, tier, folder / "large", folder / f"speed-{number}"))
            print(json.dumps(speeds[-1]), flush=True)
        for label, suffix in (("vLLM, its tier of files", ".bin"), ("vLLM, parkd-tier", ".extent")):
            damage.append(flips(label, TIERS[label], suffix, folder / "small", folder / suffix, arguments.flips))
            print(json.dumps(damage[-1]), flush=True)
    result = {
        "machine": {"processors": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()},
        "vllm": vllm.__version__,
        "at": time.strftime("%Y-%m-%d"),
        "prompt_tokens": PROMPT_TOKENS,
        "repeats": REPEATS,
        "first_token": speeds,
        "flips": damage,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
