from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from parkd.cli.startup import (
    Budget,
    ProgressPrinter,
    budget_in_tokens,
    describe,
    parking_line,
    template_warning,
)
from parkd.config import MIB
from parkd.engine_adapter.base import EngineInfo, HostExpertsInfo
from parkd.errors import InvalidRequest
from parkd.state import BLOCK_TOKENS, StageLayout, StateLayout
from parkd.store.budget import BLOCK_BYTES, Need, Room, conversation_metadata_bytes
from parkd.store.records import StoreConfig
from parkd.store.slabs import SlabGeometry
from parkd.types import TurnRequest

SLAB = 256 * MIB
BUDGET = Budget(4096 * MIB, 28_928, 18_434 * MIB)


def info(
    *, context_tokens: int = 131_072, row_bytes: int = 73_728, fixed_bytes: int = 0, demo: bool = False
) -> EngineInfo:
    stages = (
        StageLayout(0, 20, row_bytes, fixed_bytes, b"a" * 16),
        StageLayout(20, 36, row_bytes, 0, b"b" * 16),
    )
    return EngineInfo(
        model_name="m",
        architecture="llama",
        fingerprint=b"f" * 16,
        context_tokens=context_tokens,
        vocab_size=100,
        end_token_ids=frozenset({2}),
        layout=StateLayout(stages, "xxh3-64"),
        devices=("cuda:0", "cuda:1"),
        weights_bytes=700 * MIB,
        arena_bytes=1024 * MIB,
        is_demo_model=demo,
    )


def stored(budget_bytes: int) -> StoreConfig:
    return StoreConfig(budget_bytes, BLOCK_TOKENS, slab_bytes=SLAB)


def test_budget_is_told_in_tokens_and_a_full_context_that_does_not_fit_is_said() -> None:
    line = parking_line(budget_in_tokens(stored(4096 * MIB), info()), info())
    # a block is 256 x 147,456 bytes, 36 MiB: 7 fit in a slab of 256 MiB, 113 in 4,096 MiB of any slabs
    assert "parking holds 28,928 tokens in 4,096 MiB" in line
    assert "a full 131,072-token context needs 18,434 MiB and would not be parked whole" in line


@pytest.mark.parametrize("fixed_bytes", [0, 9 * MIB])
@pytest.mark.parametrize("budget_bytes", [0, 40 * MIB, 300 * MIB + 7, 4096 * MIB])
def test_what_is_promised_is_what_the_store_can_hold(budget_bytes: int, fixed_bytes: int) -> None:
    engine = info(fixed_bytes=fixed_bytes)
    budget = budget_in_tokens(stored(budget_bytes), engine)
    store_room = Room(0, budget_bytes)
    geometry = SlabGeometry.of(engine.layout, BLOCK_TOKENS, SLAB, budget_bytes)

    def fits(tokens: int) -> bool:
        blocks = -(-tokens // BLOCK_TOKENS)
        side = conversation_metadata_bytes(tokens, BLOCK_TOKENS) + blocks * BLOCK_BYTES + fixed_bytes
        return geometry.fits(Need(blocks, side), store_room)

    assert budget.tokens == 0 or fits(budget.tokens)
    assert not fits(budget.tokens + 1)
    assert budget.tokens // BLOCK_TOKENS * 36 * MIB + (fixed_bytes if budget.tokens else 0) <= budget_bytes


def test_a_full_context_that_fits_is_not_said_to_be_left_out() -> None:
    small = info(context_tokens=8192, row_bytes=1024)
    line = parking_line(budget_in_tokens(stored(4096 * MIB), small), small)
    assert "a full 8,192-token context needs 17 MiB" in line
    assert "not" not in line


def test_no_budget_is_said_to_be_parking_off() -> None:
    assert "parking is off" in parking_line(budget_in_tokens(stored(0), info()), info())


def test_the_start_names_stages_address_and_a_command_to_try() -> None:
    text = "\n".join(describe(info(), BUDGET, "http://127.0.0.1:8080", needs_key=False, warning=None))
    assert "m (llama)" in text
    assert "cuda:0 layers 0-19 | cuda:1 layers 20-35" in text
    assert "131,072 tokens, 147,456 bytes a token" in text
    assert "curl -N http://127.0.0.1:8080/v1/chat/completions" in text
    assert "Bearer" not in text
    assert "warning" not in text


def test_the_start_says_what_each_stage_takes_of_its_device() -> None:
    accounts = ({"weights": 300 * MIB, "rows": 5 * MIB}, {"weights": 400 * MIB, "draft head": MIB // 2})
    text = "\n".join(describe(replace(info(), memory=accounts), BUDGET, "", needs_key=False, warning=None))
    assert "memory    cuda:0 layers 0-19: 305 MiB (weights 300, rows 5)" in text
    assert "memory    cuda:1 layers 20-35: 400 MiB (weights 400, draft head 1)" in text


def test_the_demo_model_is_warned_of_and_a_key_is_part_of_the_command() -> None:
    text = "\n".join(describe(info(demo=True), BUDGET, "http://127.0.0.1:1", needs_key=True, warning="no tools"))
    assert "warning   this is the demo model" in text
    assert "--model" in text
    assert "warning   no tools\n" in text
    assert "-H 'authorization: Bearer YOUR_KEY'" in text


def refuse(_request: TurnRequest) -> str:
    raise InvalidRequest("This model has no chat template.")


@pytest.mark.parametrize(
    ("render", "calls_tools", "words"),
    [
        (lambda request: f"user: {request.messages[0]['content']}", True, None),
        (lambda request: f"user: {request.messages[0]['content']}", False, "never a tool call"),
        (lambda _request: "root:x:0:0", True, "--chat-template-file"),
        (refuse, False, "--chat-template-file"),
    ],
)
def test_what_a_template_lacks_is_said(
    render: Callable[[TurnRequest], str], calls_tools: bool, words: str | None
) -> None:
    warning = template_warning(render, calls_tools=calls_tools)
    assert warning is None if words is None else words in (warning or "")


def test_a_short_step_shows_no_progress_and_a_long_one_its_end() -> None:
    output = io.StringIO()
    show = ProgressPrinter(output)
    show("Loading m", 0.0)
    show("Loading m", 1.0)
    assert output.getvalue() == ""


def test_experts_in_main_memory_are_counted_with_parked_conversations() -> None:
    seconds = {1: (0.0006, 0.0014), 16: (0.0095, 0.0081)}
    hosted = HostExpertsInfo(tuple(range(8, 48)), 40 * MIB, 16, seconds)
    lines = describe(replace(info(), host_experts=hosted), BUDGET, "", needs_key=False, warning=None)
    [memory] = [line for line in lines if line.startswith("main mem")]
    parked = BUDGET.budget_bytes // MIB
    assert f"{40 + parked:,} MiB (experts of 40 layers 40, parked conversations {parked:,})" in memory
    [speed] = [line for line in lines if line.startswith("experts")]
    assert "from 16 tokens on" in speed
    assert "1 token 0.60 ms a layer there, 1.40 fetched; 16 tokens 9.50 ms a layer there, 8.10 fetched" in speed
    assert not any(
        line.startswith(("main mem", "experts")) for line in describe(info(), BUDGET, "", needs_key=False, warning=None)
    )
