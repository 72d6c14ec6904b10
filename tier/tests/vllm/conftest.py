from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process an engine, so that a kill is of all of it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Engines are forked from here, and need not import it again."""
    pytest.importorskip("vllm")
    import vllm.entrypoints.llm  # noqa: F401


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one architecture and size."""
    from engine_kit import make_model

    root = tmp_path_factory.mktemp("models")
    for seed, name in ((1, "one"), (2, "two")):
        make_model(root / name, seed)
    return root / "one", root / "two"


@pytest.fixture
def model(weights: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first, for tests that change it."""
    shutil.copytree(weights[0], tmp_path / "model")
    return tmp_path / "model"
