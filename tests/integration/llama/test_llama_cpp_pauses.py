"""llama.cpp in process: a turn that is paused answers with the bits of one never paused, where it can be paused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.api.api_harness import body_of, running
from tests.integration.llama.llama_cpp_kit import loaded, opening
from tests.integration.pauses.pause_kit import NOISE, Pauser, at_random, post, steady

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")
pytestmark = pytest.mark.anyio

SAMPLED = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "logprobs": True, "top_logprobs": 4}


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["tiny", "smollm2"])
async def test_paused_answers_are_the_same(name: str, cache_type: str, tmp_path: Path) -> None:
    body = body_of(opening("alpha", 120), 24, **SAMPLED)
    with loaded(name, tmp_path, cache_type_k=cache_type, cache_type_v=cache_type) as engine:
        async with running(engine, answer_bytes=0) as server:
            expected = await post(server, body)
        engine.reset()
        async with running(engine, answer_bytes=0) as server:
            pauser = Pauser(server, at_random(2, 0.5), noise=NOISE)
            assert steady(await post(server, body)) == steady(expected)
        assert pauser.pauses > 6


async def test_windows_are_not_paused(tmp_path: Path) -> None:
    """A restore would move their cells, and so change how sums round."""
    with loaded("tiny-sliding", tmp_path) as engine:
        assert not engine.info.can_pause
        async with running(engine, answer_bytes=0) as server:
            pauser = Pauser(server, noise=NOISE)
            await post(server, body_of(opening("alpha"), 8))
        assert pauser.pauses == 0
