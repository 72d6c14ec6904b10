"""What else keeps state on cards: sparse attention with n-grams, pictures, and draft heads."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from PIL import Image

from benchmarks.gpu.lane import GpuLane, following
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.types import ImageSpan
from tests.gpu.gpu_kit import MIB, SPLITS, assert_same, ids, opened, state_of, use_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*falling back to its reference"),
]
EVERY_SPLIT = pytest.mark.parametrize("devices", SPLITS, ids=",".join)
EVERY_FORMAT = pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)

OTHERS = ["tiny-deepseek-v3", "tiny-falcon-h1"]
"""Latent attention, and layers that attend and recur at once."""


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)


async def a_b_a(engine: TorchEngine, a1: Any, b1: Any, images: Sequence[ImageSpan] = ()) -> GpuLane:
    """Holds A1 -> B1 -> A2 to the run that was never interrupted: state to the bit, and tokens. Returns the lane, still
    open. `images` are A1's."""
    lane, seen = GpuLane(engine, 512 * MIB), tuple(images)
    first = await lane.turn(lane.prompt("whole", a1, seen), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2, seen), 12)
    await lane.live.settle()
    expected = state_of(engine)
    await lane.live.reset()
    again = await lane.turn(lane.prompt("parted", a1, seen), 12)
    between = await lane.turn(lane.prompt("parted", b1), 12)
    back = await lane.turn(lane.prompt("parted", a2, seen), 12)
    assert (again.outcome, between.outcome, back.outcome) == ("cold", "cold", "restored-ram")
    assert back.reused == len(a1) + 11
    assert (again.tokens, back.tokens) == (first.tokens, whole.tokens)
    assert_same(state_of(engine), expected)
    await lane.live.settle()
    return lane


async def assert_a_flipped_byte_reads_cold(lane: GpuLane, prompt: Any, part: str) -> None:
    """`prompt` has been parked under another name than this lane's live conversation."""
    expected = (await lane.turn(lane.prompt("flipped", prompt), 6)).tokens
    await lane.live.settle()
    parked_id = lane.live.rows.parked_id
    assert parked_id is not None
    await lane.turn(lane.prompt("flipped", ids(400, 8)), 2)
    await lane.live.settle()
    parked = lane.store.get(parked_id)
    assert parked is not None
    with lane.store.lease(parked_id, parked.position) as lease:
        stage = lease.transfer.stages[-1]
        buffer = stage.rows[0].buffer if part == "rows" else stage.fixed[0].buffer
        buffer.flags.writeable = True
        buffer[len(buffer) // 2] ^= 1
    longer = np.concatenate([prompt, expected, ids(5, 9)])
    back = await lane.turn(lane.prompt("flipped", longer), 6)
    assert lane.store.get(parked_id) is None
    assert back.outcome == "cold"
    await lane.live.reset()
    assert (await lane.turn(lane.prompt("other", longer), 6)).tokens == back.tokens
    await lane.live.settle()


@pytest.mark.anyio
@EVERY_SPLIT
@EVERY_FORMAT
@pytest.mark.parametrize("lengths", [(5001, 3000), (300, 2049)], ids=str)
async def test_sparse_attention_comes_back_as_it_was(
    devices: tuple[str, ...], kv_format: str | None, lengths: tuple[int, int], tmp_path: Path
) -> None:
    """Keys, index keys and positions in rows; n-grams' last tokens, convolutions and recurrent states beside them."""
    engine = opened("indexed", devices, tmp_path, kv_format=kv_format)
    lane = await a_b_a(engine, ids(lengths[0], 1), ids(lengths[1], 2))
    lane.close()


@pytest.mark.anyio
@EVERY_SPLIT
@EVERY_FORMAT
@pytest.mark.parametrize("preset", OTHERS)
async def test_other_kinds_of_state_come_back_as_they_were(
    preset: str, devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    engine = opened(preset, devices, tmp_path, kv_format=kv_format, context_tokens=4096, batch_tokens=1024)
    lane = await a_b_a(engine, ids(2500, 1), ids(900, 2))
    lane.close()


@pytest.mark.anyio
@EVERY_SPLIT
@pytest.mark.parametrize("part", ["rows", "fixed"])
async def test_a_flipped_byte_of_sparse_attention_reads_cold(
    devices: tuple[str, ...], part: str, tmp_path: Path
) -> None:
    lane = GpuLane(opened("indexed", devices, tmp_path), 512 * MIB)
    await assert_a_flipped_byte_reads_cold(lane, ids(2000, 1), part)
    lane.close()


@EVERY_SPLIT
@pytest.mark.parametrize("kind", ["indexed", "hybrid", "sliding", *OTHERS])
def test_logits_are_those_of_a_cpu(kind: str, devices: tuple[str, ...]) -> None:
    """In float32, of chunks and of tokens. An index chooses by eight heads here: with few, many scores are 0,
    and among equal ones each kind of device has an order of its own."""
    config = preset_config(f"random:{kind}")
    model = random_model(config, torch.float32, torch.device("cpu"))
    read = []
    for names in (("cpu",), devices):
        session = open_session(model, EngineConfig(devices=names, context_tokens=1024, batch_tokens=128))
        read.append(forced(session, ids(500, 1), ids(6, 2)))
    for here, there in zip(*read, strict=True):
        assert float((here - there).norm() / here.norm()) < 2e-3


def forced(session: Session, prompt: Any, answer: Any) -> list[torch.Tensor]:
    session.extend(prompt)
    return [session.step(int(token)).cpu().clone() for token in answer]


def picture(engine: TorchEngine, start: int, seed: int) -> ImageSpan:
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert engine.images is not None, "the model reads pictures"
    facts = engine.images.facts(file.getvalue())
    return ImageSpan(start, start + facts.tokens, facts.digest, file.getvalue(), engine.images.sees_itself)


@pytest.mark.anyio
@EVERY_SPLIT
@EVERY_FORMAT
@pytest.mark.parametrize("preset", ["tiny-qwen3.5-vl", "tiny-gemma3-vl"])
async def test_pictures_come_back_as_they_were_and_are_not_read_again(
    preset: str, devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    """Positions by row and column, and their offset, which is state; or pictures that see themselves."""
    engine = opened(preset, devices, tmp_path, kv_format=kv_format, context_tokens=4096, batch_tokens=256)
    images = tuple(picture(engine, start, seed) for start, seed in ((100, 1), (700, 2)))
    a1 = ids(1500, 1) % 90 + 10  # No id of a picture outside its place.
    for image in images:
        assert engine.images is not None
        a1[image.start : image.stop] = engine.images.tokens.token_id
    lane = await a_b_a(engine, a1, ids(900, 2) % 90 + 10, images)
    assert engine.images_encoded == 2 * len(images), "once for each time A1 was read from its start"
    shown = engine.session.arenas[-1].rows[images[0].stop : len(a1) - 1]
    seen = shown.clone()
    await lane.live.reset()
    others = tuple(picture(engine, image.start, seed) for image, seed in zip(images, (3, 4), strict=True))
    other = await lane.turn(lane.prompt("whole", a1, others), 12)
    assert other.reused <= images[0].start, "another picture is another prompt"
    assert not torch.equal(shown, seen)
    await lane.live.settle()
    lane.close()


@EVERY_SPLIT
@EVERY_FORMAT
def test_guessing_ahead_changes_no_greedy_answer(
    devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    """In float32, where tokens at once and one at a time differ too little to matter."""
    said: dict[int, list[int]] = {}
    for guesses in (0, 2):
        engine = opened(
            "tiny-qwen3.5-mtp-echo",
            devices,
            tmp_path,
            kv_format=kv_format,
            dtype="f32",
            draft_tokens=guesses,
            context_tokens=4096,
        )
        lane = GpuLane(engine, 0)
        prompt = ids(700, 1)
        said[guesses] = lane.cold(prompt, 60)
        if guesses:
            assert engine.drafts.accepted > 10
        lane.close()
    assert said[2] == said[0]


@pytest.mark.anyio
@EVERY_SPLIT
@EVERY_FORMAT
async def test_the_draft_heads_state_comes_back_as_it_was(
    devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    engine = opened("drafting-echo", devices, tmp_path, kv_format=kv_format, draft_tokens=2)
    assert engine.session.draft is not None
    lane = await a_b_a(engine, ids(3001, 1), ids(1200, 2))
    lane.close()


@EVERY_SPLIT
@EVERY_FORMAT
def test_a_recorded_step_with_guesses_is_single_steps_to_the_bit(
    devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    """Logits, rows, fixed state and what the head guesses next, in bf16."""
    session = opened("drafting-echo", devices, tmp_path, kv_format=kv_format, draft_tokens=2).session
    assert session.draft is not None
    assert session.forward.is_recorded(1)
    assert session.forward.is_recorded(3)
    prompt, step = ids(700, 1), [5, 9, 11]
    session.extend(prompt)
    session.checkpoint()
    single = torch.stack([session.step(token) for token in step])
    expected = [*guessed(session, 7), session.step(7), *state(session)]
    for kept in (1, 2, 3):
        session.truncate(len(prompt))
        logits = session.verify([*step[:kept], *(3, 4, 5)[kept:]])
        assert torch.equal(logits[:kept], single[:kept])
        session.truncate(len(prompt) + kept)
        for token in step[kept:]:
            session.step(token)
        assert_same([*guessed(session, 7), session.step(7), *state(session)], expected)


def guessed(session: Session, token: int) -> list[torch.Tensor]:
    """The scores of two guesses behind a token."""
    scores: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> int:
        scores.append(logits)
        return int(logits.argmax())

    session.guess(token, 2, choose)
    return scores


def state(session: Session) -> list[torch.Tensor]:
    """Every field up to the position; the bytes between fields are nobody's."""
    found = []
    for arena in session.arenas:
        found += [arena.field_view(field)[: session.position].clone() for field in arena.layout.row_fields]
        found += [arena.fixed_view(field).clone() for field in arena.layout.fixed_fields]
    return found


@EVERY_SPLIT
def test_on_cards_no_head_guesses_unless_asked(devices: tuple[str, ...], tmp_path: Path) -> None:
    session = opened("drafting-echo", devices, tmp_path).session
    assert session.draft is None
    assert session.forward.decode_graph is not None
