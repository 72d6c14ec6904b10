"""The canary on llama.cpp in process, whose state has no parts that could be named."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkd.canary.exercise import THE_ANSWER, examine
from parkd.state import Transfer
from tests.integration.llama.llama_cpp_kit import loaded

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")


@pytest.mark.parametrize("name", ["tiny", "tiny-sliding"])
def test_state_that_comes_back_passes_and_state_that_does_not_shows(name: str, tmp_path: Path) -> None:
    with loaded(name, tmp_path) as engine:
        verdict = examine(engine)
        assert verdict.differences == ()
        assert verdict.steps >= 3
        restore, first = engine.restore, []

        def mixed_up(transfer: Transfer) -> None:
            """Always the conversation that was restored first."""
            first.append(transfer)
            restore(first[0])

        engine.restore = mixed_up  # type: ignore[method-assign]
        found = {part for each in examine(engine).differences for part in each.parts}
        assert THE_ANSWER in found or any(part.startswith("the position") for part in found)
