"""Every family that keeps more, or something else, than keys and values, by the same proofs: the library's own cache is
the oracle."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session, restore
from parkd_engine.arenas.layout import OFFSET_FIELD, build_layout
from parkd_engine.families.architectures import check_config
from parkd_engine.families.records import vision_of
from parkd_engine.loading.draft_loading import declare_head
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from parkd.errors import StageFailed
from tests.unit.engine.kit.core_models import (
    FAMILIES,
    assert_same,
    oracle_logits,
    read_and_decode,
    step_with_guesses,
    threads_for,
    tiny_model,
    tiny_session,
    token_ids,
)
from tests.unit.engine.kit.hybrid_models import HYBRIDS, WINDOW, hybrid_config, hybrid_model
from tests.unit.engine.kit.parking import parked, resumed_at
from tests.unit.engine.kit.vision_models import put_pictures

BATCH = 64
CHUNKING_TOLERANCE = 1e-4
"""Largest difference between logits in float32 when the same tokens were read in other chunks."""
WINDOWED = ("gemma3", "qwen2-window", "gemma3-vl", "mistral-window", "gpt-oss", "gemma4")
WITH_HEADS = ("qwen3-mtp", "qwen4-exp-mtp", "deepseek-v3-mtp", "glm4-lite-mtp")
"""Those named before the ending, with a draft head beside them; so is `qwen3.5-mtp`."""
LATENT = ("deepseek-v2", "deepseek-v3", "glm4-lite")
ROWS_ONLY = (*LATENT, "qwen3-moe", "mistral", "ministral3", "glm4-moe", "minimax-m2")
"""All of their state is rows: nothing to take checkpoints of."""
OFFSET_ONLY = ("qwen3-vl", "qwen3-vl-moe")
"""All else than rows is the offset of positions, which is known wherever the session has read."""
MASKED_BY_LIBRARY = ("gemma3-vl",)
"""Their oracle reads the prompt at once under the library's masks: equal to rounding, not bit for bit."""
ROUNDING = {None: 1e-4, "int8": 2e-2}
EVERY_FAMILY = pytest.mark.parametrize("family", list(HYBRIDS))
SHAPES = ([(1, None), (2, "int8"), (3, None)], [(1, "int8"), (2, None), (3, "int8")])
"""Stages and formats of rows. Every family takes each number of stages and both formats; each with each is taken by
neighbours, as the split knows nothing of the format."""


def in_shapes(families: Sequence[str]) -> Any:
    """Parametrizes family, stages and format of rows."""
    names = {None: "full", "int8": "int8"}
    cases = [
        pytest.param(family, stages, kv_format, id=f"{family}-{stages}-{names[kv_format]}")
        for number, family in enumerate(families)
        for stages, kv_format in SHAPES[number % 2]
    ]
    return pytest.mark.parametrize(("family", "stages", "kv_format"), cases)


def model_of(family: str) -> Any:
    name = family.removesuffix("-mtp") if family in WITH_HEADS else family
    model = hybrid_model(name) if name in HYBRIDS else tiny_model(name)
    if family in WITH_HEADS:
        declare_head(model.config)
    return model


@in_shapes(list(HYBRIDS))
def test_logits_equal_the_librarys_cache(family: str, stages: int, kv_format: str | None) -> None:
    """Read in chunks, decoded, and a prompt of two tokens, bit for bit; for sliding windows far beyond the window."""
    model = hybrid_model(family)
    session = tiny_session(stages, model, batch_tokens=BATCH, kv_format=kv_format)
    ids, images = put_pictures(model, token_ids(140))
    with threads_for(kv_format):
        expected = oracle_logits(model, ids, BATCH, decoded=5, kv_format=kv_format, images=images)
        mine = read_and_decode(session, ids, decoded=5, images=images)
        if family in MASKED_BY_LIBRARY:
            for one, other in zip(mine, expected, strict=True):
                torch.testing.assert_close(one, other, atol=ROUNDING[kv_format], rtol=0)
        else:
            assert_same(mine, expected)
        session.reset()
        expected = oracle_logits(model, ids[:3], BATCH, decoded=2, kv_format=kv_format)
        assert_same(read_and_decode(session, ids[:3], decoded=2), expected)


@EVERY_FAMILY
def test_engine_attention_agrees_with_the_librarys_sdpa(family: str) -> None:
    model = hybrid_model(family)
    ids = torch.from_numpy(token_ids(100))[None]
    with torch.inference_mode():
        expected = model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits
        # The library has no other code for sinks.
        assert model.config._attn_implementation == ("eager" if family == "gpt-oss" else "sdpa")
        tiny_session(1, model)
        mine = model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits
    torch.testing.assert_close(mine, expected, atol=CHUNKING_TOLERANCE, rtol=0)


@EVERY_FAMILY
def test_chunking_does_not_matter(family: str) -> None:
    model = hybrid_model(family)
    ids, images = put_pictures(model, token_ids(130))
    expected = read_and_decode(tiny_session(2, model, batch_tokens=BATCH), ids, decoded=3, images=images)
    for batch_tokens in (5, 17, 63, 200):
        session = tiny_session(2, model, batch_tokens=batch_tokens)
        for mine, other in zip(read_and_decode(session, ids, 3, images), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=CHUNKING_TOLERANCE, rtol=0)


@in_shapes([*HYBRIDS, *FAMILIES, *WITH_HEADS])
def test_every_checkpoint_resumes_as_if_never_left(family: str, stages: int, kv_format: str | None) -> None:
    """Live and restored, after another conversation was there, at checkpoints on and off the edges of blocks."""
    model = model_of(family)
    session = tiny_session(stages, model, batch_tokens=BATCH, kv_format=kv_format)
    (ids, images), places = put_pictures(model, token_ids(121)), (16, 40, 64, 75, 120)
    others, pictures = put_pictures(model, token_ids(100, seed=9), seed=9)

    def read_on() -> list[torch.Tensor]:
        """To the end, by the same extends wherever it begins: also without checkpoints to stop at."""
        for place in places:
            session.extend(ids[session.position : place], checkpoint_at=places, images=images)
        return step_with_guesses(session, int(ids[120]))

    expected = read_on()
    rewinds = family.removesuffix("-mtp") in (*FAMILIES, *ROWS_ONLY)
    assert session.checkpoints == (() if rewinds else places)
    plan = parked(session, places, 120)
    for place in reversed(places):
        session.truncate(place)
        assert_same(read_on(), expected)
    for place in places:
        session.reset()
        session.extend(others, images=pictures)
        session.reset()
        restore(session, resumed_at(plan, place))
        assert session.position == place
        assert session.checkpoints == (() if rewinds else (place,))
        assert_same(read_on(), expected)


@EVERY_FAMILY
def test_other_tokens_after_a_cut_leave_nothing_of_the_old_ones(family: str) -> None:
    model = hybrid_model(family)
    old, new = token_ids(120), np.concatenate([token_ids(40), token_ids(81, seed=5)])
    untouched = tiny_session(2, model, batch_tokens=BATCH)
    untouched.extend(new[:40])
    untouched.extend(new[40:120])
    session = tiny_session(2, model, batch_tokens=BATCH)
    session.extend(old[:40], checkpoint_at=(40,))
    session.extend(old[40:])
    session.truncate(40)
    session.extend(new[40:120])
    assert_same([session.step(int(new[120]))], [untouched.step(int(new[120]))])


@pytest.mark.parametrize("family", [family for family in HYBRIDS if family != "mistral-window"])  # Has no rows.
def test_eight_bit_rows_resume_bit_equal_beside_full_fixed_state(family: str) -> None:
    model = hybrid_model(family)
    full, codes = (tiny_session(2, model, context=256, batch_tokens=BATCH, kv_format=kv) for kv in (None, "int8"))
    assert sum(a.layout.row_bytes for a in codes.arenas) < sum(a.layout.row_bytes for a in full.arenas)
    assert [a.layout.fixed_bytes for a in codes.arenas] == [a.layout.fixed_bytes for a in full.arenas]
    (ids, images), places = put_pictures(model, token_ids(121)), (40, 75, 120)
    full.extend(ids[:120], checkpoint_at=places, images=images)
    codes.extend(ids[:120], checkpoint_at=places, images=images)
    exact, expected = full.step(int(ids[120])), codes.step(int(ids[120]))
    torch.testing.assert_close(expected, exact, atol=0.15, rtol=0)
    assert not torch.equal(expected, exact)
    plan = parked(codes, places, 120)
    for place in places:
        codes.reset()
        codes.extend(token_ids(100, seed=9))
        restore(codes, resumed_at(plan, place))
        codes.extend(ids[place:120], checkpoint_at=places, images=images)
        assert_same([codes.step(int(ids[120]))], [expected])


@EVERY_FAMILY
def test_the_layout_is_what_the_librarys_cache_keeps(family: str) -> None:
    """In float32 and in a half type: recurrent states may stay in float32, and then must. Replays sglang#33515."""
    for dtype in (torch.float32, torch.bfloat16):
        model = hybrid_model(family, dtype=dtype)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for start in range(0, 60, 30):
                model(torch.arange(start, start + 30)[None], cache=cache, use_cache=True)
        kept: dict[tuple[int, str], Any] = {}
        rows: dict[tuple[int, str], Any] = {}
        names = ("latent", "rotary_key") if family in LATENT else ("key", "value")
        for index, layer in enumerate(cache.layers):
            tensors = {}
            if hasattr(layer, "conv_states"):
                states = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
                tensors = {f"{name}_{i}": t for name, each in states for i, t in each.items() if t is not None}
            if getattr(layer, "is_sliding", False):
                tensors = {
                    "window_key": layer.keys.transpose(1, 2),
                    "window_value": layer.values.transpose(1, 2),
                }
            elif getattr(layer, "keys", None) is not None:
                states = zip(names, (layer.keys, layer.values), strict=True)
                rows |= {(index, name): (t.dtype, (t.shape[1], t.shape[3])) for name, t in states}
            if hasattr(layer, "indexer_keys"):
                rows[index, "index_key"] = (layer.indexer_keys.dtype, tuple(layer.indexer_keys.shape[2:]))
            kept |= {(index, name): (t.dtype, tuple(t.shape[1:])) for name, t in tensors.items()}
        [layout] = build_layout(model.config, [(0, 4)], dtype, dtype)
        fixed_fields = [f for f in layout.fixed_fields if f.name != OFFSET_FIELD and f.layer < 4]
        assert {(f.layer, f.name): (f.dtype, f.shape) for f in fixed_fields} == kept
        fields = [f for f in layout.row_fields if f.name != "index_position" and f.layer < 4]
        assert {(f.layer, f.name): (f.dtype, f.shape) for f in fields} == rows
        [codes] = build_layout(model.config, [(0, 4)], torch.int8, dtype)
        for field in codes.row_fields:
            if (field.layer, field.name) in rows:
                is_key_of_index = field.name == "index_key"  # decides what is seen, so it stays as it is computed
                assert (field.dtype, field.shape) == (
                    dtype if is_key_of_index else torch.int8,
                    rows[field.layer, field.name][1],
                )


@EVERY_FAMILY
def test_a_failure_at_any_layer_leaves_an_earlier_position(family: str) -> None:
    model = hybrid_model(family)
    session = tiny_session(2, model, batch_tokens=BATCH)
    ids, images = put_pictures(model, token_ids(131))
    first = images[0].stop + 1 if images else 20

    def resume() -> list[torch.Tensor]:
        session.truncate(first)
        session.extend(ids[first:130], checkpoint_at=(130,), images=images)
        return [session.step(int(ids[130]))]

    # The same extends without a failure: sums of other shapes may differ in their last bits.
    session.extend(ids[:70], checkpoint_at=(first,), images=images)
    expected = resume()
    for layer in range(4):
        session.reset()
        session.extend(ids[:70], checkpoint_at=(first,), images=images)
        broken = break_layer(session, layer)
        with pytest.raises(StageFailed, match="injected"):
            session.extend(ids[70:130], images=images)
        broken.remove()
        # Windows reach back behind the chunk that broke; linear layers go back to where a copy was kept.
        assert session.position == (70 if family in (*WINDOWED, *ROWS_ONLY, *OFFSET_ONLY) else first)
        assert_same(resume(), expected)
        session.truncate(130)
        broken = break_layer(session, layer)
        with pytest.raises(StageFailed, match="injected"):
            session.step(int(ids[130]))
        broken.remove()
        assert session.position == 130
        assert_same([session.step(int(ids[130]))], expected)


def break_layer(session: Session, layer: int) -> Any:
    def hook(*_: Any) -> None:
        raise RuntimeError("injected")

    stage = next(stage for stage in session.stages if stage.first_layer <= layer < stage.end_layer)
    return stage.inner.layers[layer].register_forward_hook(hook)  # type: ignore[index, union-attr]


def test_a_failure_before_any_checkpoint_reads_cold() -> None:
    session = tiny_session(2, hybrid_model("qwen3.5"), batch_tokens=BATCH)
    session.extend(token_ids(50))
    broken = break_layer(session, 2)
    with pytest.raises(StageFailed):
        session.step(1)
    broken.remove()
    assert session.position == 0
    assert session.checkpoints == ()


def test_cancelled_reading_is_exact_where_it_stopped() -> None:
    session = tiny_session(2, hybrid_model("qwen3.5"), batch_tokens=BATCH)
    ids = token_ids(200)
    session.extend(ids[:199])
    expected = [session.step(int(ids[199]))]
    session.reset()
    cancel = threading.Event()
    session.extend(ids[:199], cancel=cancel, on_chunk=lambda position: cancel.set())
    assert session.position == session.rewind_floor == BATCH
    assert_same(read_and_decode(session, ids), expected)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "granite-h", "qwen3-next", "qwen4-exp"])
def test_linear_state_is_exact_at_its_position_and_at_checkpoints(family: str) -> None:
    session = tiny_session(2, hybrid_model(family), batch_tokens=BATCH)
    session.extend(token_ids(50), checkpoint_at=(10, 30))
    assert session.rewind_floor == 50
    with pytest.raises(ValueError, match="cannot truncate to 29"):
        session.truncate(29)
    session.truncate(30)
    assert session.checkpoints == (10, 30)
    session.truncate(0)
    assert session.checkpoints == ()


def window_session(slack: int = 32, batch: int = 16) -> tuple[Any, Session]:
    model = hybrid_model("gemma3")
    config = EngineConfig(
        devices=("cpu", "cpu"), context_tokens=512, batch_tokens=batch, window_slack_tokens=slack, ctx_checkpoints=3
    )
    return model, open_session(model, config)


def rewound(model: Any, old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> list[torch.Tensor]:
    return read_and_decode(tiny_session(2, model, batch_tokens=16), np.concatenate([old, new]))


@pytest.mark.parametrize("prompt", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 97])
def test_positions_inside_at_and_beyond_the_window(prompt: int) -> None:
    model, session = window_session()
    ids = token_ids(prompt + 3)
    assert_same(read_and_decode(session, ids, decoded=3), oracle_logits(model, ids, 16, decoded=3))


def test_a_window_rewinds_freely_inside_its_slack_and_not_beyond() -> None:
    model, session = window_session()
    old, new = token_ids(200), token_ids(20, seed=4)
    session.extend(old)
    floor = session.rewind_floor
    assert 200 - 32 - 16 <= floor <= 200 - 32
    for place in range(199, floor - 1, -7):
        session.truncate(place)
        timeline = np.concatenate([old[:place], new])
        [mine] = read_and_decode(session, timeline)
        torch.testing.assert_close(mine, rewound(model, old[:place], new)[0], atol=CHUNKING_TOLERANCE, rtol=0)
        session.reset()
        session.extend(old)
    with pytest.raises(ValueError, match=f"cannot truncate to {floor - 1}"):
        session.truncate(floor - 1)
    assert session.position == 200


def test_a_window_not_yet_left_rewinds_to_any_token() -> None:
    _, session = window_session()
    session.extend(token_ids(70))
    assert session.rewind_floor == 0
    session.extend(token_ids(30))
    assert session.rewind_floor > 0


def test_a_rewind_beyond_the_slack_goes_by_a_checkpoint() -> None:
    model, session = window_session()
    old, new = token_ids(200), token_ids(20, seed=4)
    session.extend(old, checkpoint_at=(40,))
    session.truncate(40)
    [mine] = read_and_decode(session, np.concatenate([old[:40], new]))
    torch.testing.assert_close(mine, rewound(model, old[:40], new)[0], atol=CHUNKING_TOLERANCE, rtol=0)


def test_a_chunk_larger_than_a_window_has_room_for_is_refused() -> None:
    _, session = window_session(slack=8, batch=16)
    session.batch_tokens = 100
    with pytest.raises(StageFailed, match="100 tokens at once do not fit"):
        session.extend(token_ids(150))


def test_live_checkpoints_are_bounded_and_the_root_stays() -> None:
    _, session = window_session()
    session.extend(token_ids(150), checkpoint_at=(10, 50, 90, 130))
    assert session.checkpoints == (10, 90, 130)
    session.truncate(90)
    assert session.checkpoints == (10, 90)


@EVERY_FAMILY
def test_tested_architectures_pass(family: str) -> None:
    architecture = type(hybrid_model(family)).__name__
    assert check_config(hybrid_config(family)) == architecture
    assert check_config(hybrid_config(family, architectures=[architecture])) == architecture


_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLE = {
    "mistral3": ("mistral", {"vision_config": {"model_type": "pixtral", **_TOWER}}),
    "gemma4": ("gemma4", {"vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}, "audio_config": None}),
}
"""`model_type` of a whole model -> its text's family here, and its other settings."""


@pytest.mark.parametrize("whole", list(WHOLE))
def test_the_text_of_a_whole_model_is_read_as_the_text_model_is(whole: str) -> None:
    family, others = WHOLE[whole]
    text = hybrid_config(family)
    config = AutoConfig.for_model(whole, text_config=text.to_dict(), **others)
    assert check_config(config) == f"{whole.capitalize()}ForConditionalGeneration"
    assert vision_of(config) is None
    assert build_layout(config, [(0, 4)], torch.float32) == build_layout(text, [(0, 4)], torch.float32)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    ids = token_ids(90)
    session = tiny_session(2, model, batch_tokens=BATCH)
    mine = read_and_decode(session, ids, decoded=3)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0, -3:]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, atol=CHUNKING_TOLERANCE, rtol=0)
