"""Whatever happened to a session, it goes on to the bit as one that only ever read what is live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parkd_engine import EngineConfig, Session, open_session

from tests.unit.engine.kit.core_models import head_of
from tests.unit.engine.kit.hybrid_models import model_of
from tests.unit.engine.kit.logged_session import BATCH, CONTEXT
from tests.unit.engine.kit.recordings import Replay, record_chunks, record_steps, without_triton
from tests.unit.engine.kit.session_lives import Life
from tests.unit.engine.kit.vision_models import processor_of

EVENTS = 30
GUESSES = 2
PLAIN = (
    *("qwen3", "qwen3-mtp", "gemma3", "qwen2-window", "qwen3-next", "qwen3.5", "qwen3.5-mtp", "qwen4-exp"),
    *("qwen4-exp-mtp", "lfm2", "granite-h", "falcon-h1", "deepseek-v2", "deepseek-v3-mtp", "glm4-lite"),
    *("qwen3-vl", "qwen3.5-vl", "qwen4-exp-vl", "gemma3-vl"),
)
RECORDED = (
    *("qwen3", "gemma3", "qwen2-window", "qwen3-next", "qwen3.5", "qwen3.5-mtp", "lfm2", "granite-h"),
    *("qwen3-vl", "qwen3.5-vl", "gemma3-vl"),
)
"""Those whose decoding cards replay from graphs."""

SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def opened(family: str, slack_tokens: int) -> Session:
    model = model_of(family)
    config = EngineConfig(
        devices=("cpu", "cpu"),
        context_tokens=CONTEXT,
        batch_tokens=BATCH,
        ctx_checkpoints=3,
        draft_tokens=GUESSES,
        window_slack_tokens=slack_tokens,
    )
    return open_session(model, config, processor_of(model), draft_model=head_of(model))


@SEEDS
@pytest.mark.parametrize("family", PLAIN)
def test_a_session_is_what_it_read(family: str, seed: int) -> None:
    Life(lambda slack: opened(family, slack), seed).go_on(EVENTS)


@pytest.fixture
def _no_triton() -> Iterator[None]:
    with without_triton():
        yield


@pytest.mark.usefixtures("_no_triton")
@SEEDS
@pytest.mark.parametrize("family", RECORDED)
def test_a_session_that_replays_graphs_is_what_it_read(family: str, seed: int) -> None:
    graphs: list[Replay] = []

    def recorded(slack_tokens: int) -> Session:
        session = opened(family, slack_tokens)
        steps, _ = record_steps(session)
        graphs.extend(graph for each in steps.values() for graph in each)
        record_chunks(session, BATCH)
        return session

    life = Life(recorded, seed, graphs)
    life.go_on(EVENTS)
    assert all(graph.replays for graph in life.graphs)
