"""The timeline: every way out leaves a valid position."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine.decoding import Decoder
from parkd_engine.words.sampling import TensorSampler
from transformers import DynamicCache

from parkd.errors import ContextFull, LogitsNotFinite, ModelError, NothingAllowed, OutOfMemory, StageFailed
from parkd.types import SamplingParams
from tests.unit.engine.kit.core_models import VOCAB, assert_same, read_and_decode, tiny_model, tiny_session, token_ids


def test_chunks_end_at_absolute_multiples() -> None:
    session = tiny_session(2)
    seen: list[int] = []
    session.extend(token_ids(30), on_chunk=seen.append)
    session.extend(token_ids(170, seed=2), on_chunk=seen.append)
    assert seen == [30, 64, 128, 192, 200]
    assert session.position == 200


@pytest.mark.parametrize("kept", [0, 1, 64, 100, 199])
def test_truncate_then_extend_equals_a_cropped_library_cache(kept: int) -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    old, new = token_ids(200), token_ids(160, seed=7)
    session.extend(old)
    session.truncate(kept)
    timeline = np.concatenate([old[:kept], new])
    continued = read_and_decode(session, timeline)

    cache = DynamicCache(config=model.config)
    chunks = [(old, start, min(start + 64, 200)) for start in range(0, 200, 64)]
    cuts = [kept, *range((kept // 64 + 1) * 64, len(timeline) - 1, 64), len(timeline) - 1, len(timeline)]
    with torch.inference_mode():
        for ids, start, stop in chunks:
            model(torch.from_numpy(ids[start:stop])[None], cache=cache, use_cache=True)
        cache.crop(kept - 200)
        for start, stop in pairwise(cuts):
            output = model(torch.from_numpy(timeline[start:stop])[None], cache=cache, use_cache=True)
    assert_same(continued, [output.logits[0, -1]])

    # Against a fresh read the chunks have other shapes, so the last bits may differ; the state does not.
    [fresh] = read_and_decode(tiny_session(2, model), timeline)
    torch.testing.assert_close(continued[0], fresh, atol=1e-5, rtol=1e-5)


def test_truncate_cannot_go_forward() -> None:
    session = tiny_session(1)
    session.extend(token_ids(10))
    for position in (-1, 11):
        with pytest.raises(ValueError, match="cannot truncate"):
            session.truncate(position)
    assert session.position == 10


def test_cancel_stops_after_the_chunk_and_keeps_it() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    ids = token_ids(300)
    cancel = threading.Event()

    def on_chunk(position: int) -> None:
        if position == 128:
            cancel.set()

    assert session.extend(ids, cancel=cancel, on_chunk=on_chunk) == 128
    assert session.extend(ids[128:], cancel=cancel) == 128
    assert_same(read_and_decode(session, ids), read_and_decode(tiny_session(2, model), ids))


def break_layer(session: Any, stage: int, layer: int, call: int) -> Any:
    """The layer fails from its `call`-th call on; the handle's `remove()` mends it."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise RuntimeError("injected")

    return session.stages[stage].inner.layers[layer].register_forward_pre_hook(hook)


@pytest.mark.parametrize(("stage", "layer"), [(0, 0), (0, 1), (1, 2), (1, 3)])
def test_a_layer_that_fails_mid_chunk_leaves_earlier_chunks(stage: int, layer: int) -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    ids = token_ids(200)
    broken = break_layer(session, stage, layer, call=2)
    with pytest.raises(StageFailed, match="injected") as failure:
        session.extend(ids)
    assert failure.value.stage == stage
    assert session.position == 64
    broken.remove()
    assert_same(read_and_decode(session, ids), read_and_decode(tiny_session(2, model), ids))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failing_step_keeps_the_position(stage: int) -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    ids = token_ids(50)
    session.extend(ids[:-1])
    broken = break_layer(session, stage, 2 * stage, call=1)
    with pytest.raises(StageFailed):
        session.step(int(ids[-1]))
    assert session.position == 49
    broken.remove()
    assert_same([session.step(int(ids[-1]))], read_and_decode(tiny_session(2, model), ids))


def test_a_failing_head_keeps_the_position() -> None:
    session = tiny_session(2)
    session.extend(token_ids(5))
    head = session.stages[-1].head
    assert head is not None

    def hook(*_: Any) -> None:
        raise RuntimeError("injected")

    head.register_forward_pre_hook(hook)
    with pytest.raises(StageFailed, match="injected"):
        session.step(1)
    assert session.position == 5


def test_a_full_context_is_refused_before_anything_runs() -> None:
    session = tiny_session(2, context=100)
    session.extend(token_ids(90))
    with pytest.raises(ContextFull, match="11 tokens at position 90 do not fit a context of 100"):
        session.extend(token_ids(11))
    assert session.position == 90
    session.extend(token_ids(10))
    with pytest.raises(ContextFull):
        session.step(0)
    assert session.position == 100


def test_state_that_gives_no_scores_is_not_gone_on_from() -> None:
    """A number that is none, in one row of one layer: every later token would be of it."""
    session, ids = tiny_session(2), token_ids(40)
    session.extend(ids[:-1])
    session.arenas[0].field_view(session.arenas[0].layout.row_fields[1])[7].fill_(torch.nan)
    sampler = TensorSampler(SamplingParams(temperature=0.0), VOCAB, ids)
    with pytest.raises(LogitsNotFinite):
        next(Decoder(session, sampler).tokens(int(ids[-1])))
    assert session.position == 0


def test_a_mask_that_allows_nothing_is_not_the_states_fault() -> None:
    class Nothing:
        def allowed(self) -> npt.NDArray[np.bool_]:
            return np.zeros(VOCAB, dtype=np.bool_)

        def accept(self, token_id: int) -> None:
            raise AssertionError("nothing is said")

    session, ids = tiny_session(2), token_ids(40)
    session.extend(ids[:-1])
    sampler = TensorSampler(SamplingParams(temperature=0.0), VOCAB, ids)
    with pytest.raises(NothingAllowed):
        next(Decoder(session, sampler, mask=Nothing()).tokens(int(ids[-1])))
    assert session.position == 40


def test_reset_forgets() -> None:
    model = tiny_model()
    session = tiny_session(3, model)
    session.extend(token_ids(150, seed=5))
    session.reset()
    ids = token_ids(150)
    assert_same(read_and_decode(session, ids), read_and_decode(tiny_session(3, model), ids))


def test_an_arena_that_cannot_fit_says_what_would() -> None:
    with pytest.raises(OutOfMemory, match="tokens would fit") as refusal:
        tiny_session(1, context=1 << 40)
    assert isinstance(refusal.value, ModelError)
    assert 0 < refusal.value.fitting_tokens < 1 << 40
    assert refusal.value.needed_bytes == (1 << 40) * 4 * 2 * 2 * 16 * 4
