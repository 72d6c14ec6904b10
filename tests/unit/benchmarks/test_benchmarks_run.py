"""The benchmarks that need no server run to their end, at sizes that measure nothing. Others use the server as clients
do, and what they use of it is tested elsewhere; these reach into the parts that they measure."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import common

SMALL = {
    "checkpoint_cost": ["--tokens", "512", "--pairs", "1"],
    "copies": ["--device", "cpu", "--repeats", "1"],
    "disk": ["--tokens", "512", "--rounds", "1", "--conversations", "10", "--blocks", "100"],
    "indexer": ["--repeats", "1"],
    "latents": ["--repeats", "1"],
    "ledger": ["--turns", "20"],
    "proxy_time": ["--repeats", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_writes_its_result(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *SMALL[name]])
    importlib.import_module(f"benchmarks.{name}").main()
    assert [path.name for path in tmp_path.glob("*.json")] == [f"{name}.json"]
