"""A conversation of llama.cpp in process leaves in a file, and goes on in another process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.api.api_harness import running
from tests.integration.llama.llama_cpp_kit import TINY_MODELS, loaded, opening, turn_after
from tests.integration.operators.test_api_portable import exported, ids, landed

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", [*TINY_MODELS, pytest.param("smollm2", marks=pytest.mark.model)])
async def test_it_goes_on_elsewhere(name: str, tmp_path: Path) -> None:
    first = opening("a", 200)
    with loaded(name, tmp_path) as engine:
        async with running(engine, answer_bytes=0) as there:
            answer = await there.chat(first)
            await there.settled()
            data = await exported(there, ids(there)[0])
            turn = turn_after(first, answer.text)
            await there.chat(opening("b"))
            stayed = await there.chat(turn)
    with loaded(name, tmp_path) as engine:
        async with running(engine, answer_bytes=0) as here:
            document = await landed(here, data)
            assert document.status_code == 200, document.text
            moved = await here.chat(turn)
    assert moved.text == stayed.text
    assert moved.cache == stayed.cache == "restored-ram"
    assert moved.reused == stayed.reused > 400


async def test_that_of_other_settings_is_refused(tmp_path: Path) -> None:
    with loaded("tiny", tmp_path) as engine:
        async with running(engine, answer_bytes=0) as there:
            await there.chat(opening("a"))
            await there.settled()
            data = await exported(there, ids(there)[0])
    with loaded("tiny-dense", tmp_path) as engine:
        async with running(engine, answer_bytes=0) as here:
            answer = await landed(here, data)
            assert answer.status_code == 409
            assert "other weights" in answer.text
