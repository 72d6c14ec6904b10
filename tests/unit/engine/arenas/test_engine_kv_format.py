"""Keys and values as 8-bit codes: the layout, the rounding, and how little chunking matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import capture, host_transfer, restore
from parkd_engine.arenas.kv_format import KV_FORMATS, QuantisedStates, quantise
from parkd_engine.arenas.layout import _check_format, build_layout
from parkd_engine.families.layer_state import FieldSpec, LayerState
from parkd_engine.loading.fingerprint import fingerprint
from torch.utils._python_dispatch import TorchDispatchMode

from parkd.errors import UnsupportedModel
from tests.unit.engine.kit.core_models import (
    FAMILIES,
    eight_bit,
    read_and_decode,
    tiny_config,
    tiny_model,
    tiny_session,
    token_ids,
)

IDS = token_ids(400)
TOLERANCE = {None: 1e-6, "bf16": 1e-4, "int8": 1e-4}
"""By what teacher-forced logits of these models (of a size around 0.5) may differ between chunkings, by KV type. Floats
differ by roundings; a number near the edge between two codes, or two bfloat16 values, may fall to either side."""


def test_a_row_holds_codes_and_scales_side_by_side() -> None:
    (layout,) = build_layout(tiny_config(), [(0, 4)], torch.int8)
    places = [(f.layer, f.name, f.dtype, f.shape, f.offset) for f in layout.row_fields[:4]]
    assert places == [
        (0, "key", torch.int8, (2, 16), 0),
        (0, "value", torch.int8, (2, 16), 32),
        (0, "scale", torch.float16, (2, 2), 64),
        (1, "key", torch.int8, (2, 16), 80),
    ]
    assert layout.row_bytes == 4 * 80
    real = build_layout(tiny_config(num_key_value_heads=8, num_attention_heads=8, head_dim=128), [(0, 4)], torch.int8)
    assert real[0].row_bytes == 4 * (2 * 8 * 128 + 2 * 8 * 2)


def test_formats_never_share_state() -> None:
    layouts = {build_layout(tiny_config(), [(0, 4)], dtype)[0].digest for dtype in KV_FORMATS.values()}
    prints = {fingerprint(b"weights", {}, torch.float32, dtype) for dtype in KV_FORMATS.values()}
    assert len(layouts) == len(prints) == len(KV_FORMATS) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_numbers_come_back_within_half_a_scale(size: float, dtype: torch.dtype) -> None:
    states = (torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    codes, scales = quantise(states)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.int8, (50, 3, 64), torch.float16, (50, 3))
    kept = QuantisedStates(codes, scales).numbers(torch.float32)[0].transpose(0, 1)
    # The scale is rounded to float16: the largest number may lie 127 x 2^-11 of a scale beyond its code.
    assert ((kept - states.float()).abs() <= scales.float()[..., None] * 0.565).all()
    assert torch.equal(kept, eight_bit(states.float().transpose(0, 1)[None])[0].transpose(0, 1))
    assert codes.abs().amax() == 127


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    states = torch.zeros(4, 1, 8)
    states[1] = 1e-9
    states[2, 0, 3] = float("nan")
    states[3] = 1e9
    kept = QuantisedStates(*quantise(states)).numbers(torch.float32)[0, 0]
    assert (kept[:2] == 0).all()
    assert kept[2].isnan().any()
    assert torch.isfinite(kept[3]).all()


def test_a_head_is_that_part_of_all_numbers() -> None:
    states = QuantisedStates(*quantise(torch.randn(20, 3, 16, generator=torch.Generator().manual_seed(1))))
    assert states.shape == (1, 3, 20, 16)
    for head in range(3):
        assert torch.equal(states.head(head, torch.float32), states.numbers(torch.float32)[:, head : head + 1])


def test_a_chunk_reads_back_what_it_wrote() -> None:
    """One chunk's own keys are codes for it already: the first layer's rows are equal, whatever the chunking, and so
    a prompt in one chunk and one token at a time agree as closely as two chunkings do."""
    model = tiny_model()
    at_once = tiny_session(1, model, batch_tokens=512, kv_format="int8")
    singly = tiny_session(1, model, batch_tokens=512, kv_format="int8")
    [whole] = read_and_decode(at_once, IDS[:120])
    for token in IDS[:119]:
        singly.step(int(token))
    torch.testing.assert_close(singly.step(int(IDS[119])), whole, atol=TOLERANCE["int8"], rtol=0)


@pytest.mark.parametrize("kv_format", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_chunk_size_hardly_matters(family: str, kv_format: str | None) -> None:
    model = tiny_model(family)
    logits = []
    for batch_tokens in (512, 64, 37):
        session = tiny_session(2, model, batch_tokens=batch_tokens, kv_format=kv_format)
        logits.append(torch.stack(read_and_decode(session, IDS, decoded=40)))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=TOLERANCE[kv_format], rtol=0)


def test_eight_bits_stay_close_to_floats() -> None:
    model = tiny_model("qwen3")
    full, codes = (
        torch.stack(read_and_decode(tiny_session(1, model, kv_format=kind), IDS, decoded=40)) for kind in (None, "int8")
    )
    difference = (full - codes).abs().max()
    assert 0 < difference < 0.03


class LargestFloats(TorchDispatchMode):
    """The most elements of a float tensor with a dimension of `keys` that any operation made."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and self.keys in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_more_than_one_heads_numbers_exist_at_once() -> None:
    session = tiny_session(1, tiny_model(), kv_format="int8")
    session.extend(IDS[:350])
    with LargestFloats(351) as log:
        session.step(3)
    assert log.elements == 351 * 16  # dim; the scores are never written out


def test_a_kind_that_keeps_no_scales_is_refused() -> None:
    keys = FieldSpec("key", torch.int8, (2, 16))
    for state in (LayerState(row=(keys,)), LayerState(fixed=(keys,))):
        with pytest.raises(UnsupportedModel, match="layers of kind odd_attention cannot store"):
            _check_format("odd_attention", state)
    _check_format("odd_attention", LayerState(row=(replace(keys, dtype=torch.float16),)))


@pytest.mark.parametrize("stop", [1, 255, 256, 300])
def test_a_restored_prefix_is_bit_equal(stop: int) -> None:
    model = tiny_model()
    session = tiny_session(2, model, kv_format="int8")
    session.extend(IDS[:300])
    plan = host_transfer(session, stop)
    plan = replace(plan, checksums=capture(session, plan).rows)
    rows = [arena.rows[:stop].clone() for arena in session.arenas]
    session.reset()
    session.extend(token_ids(310, seed=2))
    restore(session, plan)
    assert all(torch.equal(arena.rows[:stop], kept) for arena, kept in zip(session.arenas, rows, strict=True))
    other = tiny_session(2, model, kv_format="int8")
    other.extend(IDS[:300])
    other.truncate(stop)
    timeline = np.concatenate([IDS[:stop], token_ids(50, seed=3)])
    mine, stayed = (torch.stack(read_and_decode(each, timeline, decoded=3)) for each in (session, other))
    assert torch.equal(mine, stayed)
