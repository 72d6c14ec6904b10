"""A conversation that one layer split parked, restored by another, goes on as if it had never left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session, restore
from parkd_engine.arenas.layout import build_layout
from parkd_engine.vision.tower import PromptImage

from parkd.state import OtherState, StateLayout, describe, layout_from, recut_between
from tests.unit.engine.kit.core_models import (
    CONTEXT,
    FAMILIES,
    assert_same,
    head_of,
    step_with_guesses,
    threads_for,
    tiny_config,
    tiny_model,
    tiny_session,
    token_ids,
)
from tests.unit.engine.kit.hybrid_models import HYBRIDS, hybrid_model, model_of
from tests.unit.engine.kit.parking import parked, resumed_at
from tests.unit.engine.kit.recutting import recut_for
from tests.unit.engine.kit.vision_models import processor_of, put_pictures

BATCH = 64
PLACES = (16, 40, 64, 75, 120)
WITH_HEADS = ("qwen3-mtp", "deepseek-v3-mtp", "glm4-lite-mtp", "qwen4-exp-mtp")
IN_INT8 = ("llama", "qwen3.5-mtp", "gemma3", "qwen4-exp", "qwen3-mtp")
SPLITS = ((), (2,), (1, 3), ())
"""First layers of all stages but the first: 1, 2, 3 and 1 stages of models of four layers."""
OTHER_SPLITS = ((1,), (3,), (1, 2, 3), (2, 3))


def split_session(family: str, split: tuple[int, ...], kv_format: str | None) -> Session:
    config = EngineConfig(
        devices=("cpu",) * (len(split) + 1),
        layer_split=split or None,
        context_tokens=CONTEXT,
        batch_tokens=BATCH,
        kv_format=kv_format,
        draft_tokens=2,
    )
    model = model_of(family)
    return open_session(model, config, processor_of(model), draft_model=head_of(model))


def read_on(session: Session, ids: npt.NDArray[np.int64], images: Sequence[PromptImage]) -> list[torch.Tensor]:
    for place in PLACES:
        session.extend(ids[session.position : place], checkpoint_at=PLACES, images=images)
    return step_with_guesses(session, int(ids[120]))


@pytest.mark.parametrize(
    ("family", "splits", "kv_format"),
    [
        *((family, SPLITS, None) for family in (*FAMILIES, *HYBRIDS, *WITH_HEADS)),
        *((family, OTHER_SPLITS, "int8") for family in ("llama", "qwen3.5-mtp", "gemma3", "qwen4-exp", "qwen3-mtp")),
    ],
    ids=str,
)
def test_a_conversation_goes_on_in_every_split(
    family: str, splits: Sequence[tuple[int, ...]], kv_format: str | None
) -> None:
    """From split to split, each time restored from what the split before parked, at every checkpoint."""
    (ids, images) = put_pictures(model_of(family), token_ids(121))
    with threads_for(kv_format):
        session = split_session(family, splits[0], kv_format)
        expected = read_on(session, ids, images)
        plan = parked(session, PLACES, 120)
        for split in splits[1:]:
            other = split_session(family, split, kv_format)
            moved = recut_for(plan, session, other)
            assert moved.bytes >= sum(copy.size for copy in recut_between(session.layout, other.layout).rows)
            for place in (75, 16):
                restore(other, resumed_at(moved, place))
                assert other.position == place
                assert_same(read_on(other, ids, images), expected)
            restore(other, resumed_at(moved, 120))
            session, plan = other, parked(other, (120,), 120)
            plan = moved if other.fixed_state.exists else plan


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *WITH_HEADS])
def test_a_layout_reads_as_it_was_written(family: str) -> None:
    for split in ((), (1, 3)):
        layout = split_session(family, split, None).layout
        again = layout_from(describe(layout))
        assert again.digest == layout.digest
        assert describe(again) == describe(layout)


def test_layers_that_share_keys_have_no_fields_of_their_own_to_move() -> None:
    """The third and fourth layer read the keys of the second."""
    config = tiny_config("llama", kv_sharing_modes=[None, None, "reuse", "reuse"])
    one, two = (
        StateLayout(build_layout(config, ranges, torch.float32), "xxh3-64") for ranges in (((0, 4),), ((0, 1), (1, 4)))
    )
    assert {field.layer for stage in two.stages for field in stage.row_fields} == {0, 1}
    recut = recut_between(one, two)
    rows = np.arange(3 * one.row_bytes, dtype=np.uint32).astype(np.uint8)
    parts = [np.zeros(3 * stage.row_bytes, dtype=np.uint8) for stage in two.stages]
    recut.add_rows(0, rows, parts)
    halves = [part.reshape(3, -1) for part in parts]
    assert np.array_equal(np.concatenate(halves, axis=1), rows.reshape(3, -1))


@pytest.mark.parametrize(
    ("there", "here", "reason"),
    [
        ({"num_key_value_heads": 2}, {"num_key_value_heads": 3}, "key of layer 0"),
        ({"num_hidden_layers": 4}, {"num_hidden_layers": 5}, "layers 0 to 3"),
    ],
)
def test_another_model_is_no_other_split(there: dict[str, int], here: dict[str, int], reason: str) -> None:
    old = tiny_session(1, tiny_model("llama", **there)).layout
    new = tiny_session(2, tiny_model("llama", **here)).layout
    with pytest.raises(OtherState, match=reason):
        recut_between(old, new)


def test_another_window_format_or_draft_head_is_no_other_split() -> None:
    window = hybrid_model("gemma3", sliding_window=20)
    with pytest.raises(OtherState, match="window_key of layer 0"):
        recut_between(tiny_session(1, hybrid_model("gemma3")).layout, tiny_session(2, window).layout)
    model = tiny_model("llama")
    rows = tiny_session(1, model).layout
    with pytest.raises(OtherState, match="layer 0"):
        recut_between(rows, tiny_session(2, tiny_model("llama"), kv_format="int8").layout)
    with pytest.raises(OtherState, match="layer 4"):
        recut_between(split_session("qwen3-mtp", (), None).layout, tiny_session(2, tiny_model("qwen3")).layout)
    with pytest.raises(OtherState, match="lacks"):
        recut_between(tiny_session(2, tiny_model("qwen3")).layout, split_session("qwen3-mtp", (), None).layout)
