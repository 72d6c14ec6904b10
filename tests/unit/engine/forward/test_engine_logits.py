"""Logits of the engine equal those of the library's own cache, bit for bit at the same chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parkd_engine.arenas.kv_format import QuantisedStates, quantise
from parkd_engine.forward import attention
from parkd_engine.forward.attention import QUERY_BLOCK, arena_attention, lower_right_bias
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from parkd.errors import UnsupportedModel
from tests.unit.engine.kit.core_models import (
    FAMILIES,
    assert_same,
    oracle_logits,
    read_and_decode,
    threads_for,
    tiny_config,
    tiny_model,
    tiny_session,
    token_ids,
)


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_the_librarys_cache(family: str, stages: int, kv_format: str | None) -> None:
    model = tiny_model(family)
    session = tiny_session(stages, model, kv_format=kv_format)
    ids = token_ids(200)
    with threads_for(kv_format):
        mine = read_and_decode(session, ids, decoded=5)
        assert_same(mine, oracle_logits(model, ids, 64, decoded=5, kv_format=kv_format))


@pytest.mark.parametrize("prompt", [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_prompts_around_chunk_ends(prompt: int) -> None:
    """Report 46."""
    model = tiny_model()
    session = tiny_session(2, model)
    ids = token_ids(prompt + 1)
    assert_same(read_and_decode(session, ids), oracle_logits(model, ids, 64))


@pytest.mark.parametrize("batch_tokens", [255, 256, 257, 600])
def test_chunks_longer_than_a_query_block(batch_tokens: int) -> None:
    model = tiny_model("qwen3")
    session = tiny_session(2, model, batch_tokens=batch_tokens)
    ids = token_ids(901)
    assert_same(read_and_decode(session, ids), oracle_logits(model, ids, batch_tokens))


def test_engine_attention_agrees_with_the_librarys_sdpa() -> None:
    model = tiny_model("qwen2")
    ids = torch.from_numpy(token_ids(300))[None]
    with torch.inference_mode():
        expected = model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits
        assert model.config._attn_implementation == "sdpa"
        tiny_session(1, model)
        mine = model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


class ShapeLog(TorchDispatchMode):
    """Notes the last two dimensions of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                self.shapes.add(tuple(tensor.shape[-2:]))
        return result


def test_no_mask_is_larger_than_a_query_block() -> None:
    session = tiny_session(2, batch_tokens=600)
    ids = token_ids(1201)
    with ShapeLog() as log:
        session.extend(ids[:1200])
    key_counts = {256, 512, 600, 856, 1112, 1200}
    masks = {shape for shape in log.shapes if shape[1] in key_counts and shape != (600, 600)}
    assert (QUERY_BLOCK, 856) in masks
    assert max(shape[0] for shape in masks) == QUERY_BLOCK
    assert (600, 600) not in log.shapes


@pytest.mark.parametrize("piece", [(256, 1), (16, 3), (7, 3), (1000, 3)])
def test_windows_are_the_same_in_pieces_of_any_size(piece: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with heads of keys repeated, as on cards, where pieces are large."""
    monkeypatch.setattr(attention, "_piece", lambda *_: piece)
    window, queries, keys = 24, 40, 90
    q, k, v = (torch.randn(1, heads, tokens, 8) for heads, tokens in ((6, queries), (2, keys), (2, keys)))
    mine, _ = arena_attention(torch.nn.Linear(1, 1), q, k, v, None, sliding_window=window)
    at = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    scores = (q @ k.repeat_interleave(3, dim=1).transpose(2, 3)) * 8**-0.5
    weights = scores.masked_fill((at < 0) | (at >= window), -torch.inf).softmax(-1)
    expected = (weights @ v.repeat_interleave(3, dim=1)).transpose(1, 2)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_one_query_needs_no_mask() -> None:
    session = tiny_session(1)
    session.extend(token_ids(301)[:300])
    with ShapeLog() as log:
        session.step(3)
    assert not {shape for shape in log.shapes if 301 in shape and shape[0] == 1}


def test_bias_hides_exactly_what_comes_later() -> None:
    bias = lower_right_bias(3, 5, torch.float32, torch.device("cpu"))
    visible = [[True, True, True, False, False], [True] * 4 + [False], [True] * 5]
    assert (bias == 0).tolist() == visible
    assert torch.isneginf(bias[~torch.tensor(visible)]).all()


@pytest.mark.parametrize("name", ["softcap", "position_bias", "never_heard_of"])
def test_attention_refuses_what_it_does_not_honour(name: str) -> None:
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedModel, match=name):
        arena_attention(torch.nn.Linear(1, 1), states, states, states, None, **{name: 30.0})


@pytest.mark.parametrize("arguments", [{"dropout": 0.1}, {"is_causal": False}])
def test_attention_refuses_dropout_and_seeing_ahead(arguments: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedModel, match="dropout or without causality"):
        arena_attention(torch.nn.Linear(1, 1), states, states, states, None, **arguments)


def test_padding_is_refused() -> None:
    model = tiny_model()
    tiny_session(1, model)
    with pytest.raises(UnsupportedModel, match="padding"), torch.inference_mode():
        model(torch.zeros(1, 4, dtype=torch.int64), attention_mask=torch.tensor([[0, 1, 1, 1]]))


def test_keys_may_be_kept_in_a_smaller_type() -> None:
    from parkd_engine import EngineConfig, open_session

    model = tiny_model()
    config = EngineConfig(context_tokens=256, batch_tokens=64, kv_format="bf16")
    session = open_session(model, config)
    ids = token_ids(101)
    [mine] = read_and_decode(session, ids)
    [exact] = oracle_logits(model, ids, 64)
    assert session.arenas[0].layout.row_bytes == 2 * tiny_config().num_hidden_layers * 2 * 16 * 2
    assert not torch.equal(mine, exact)
    torch.testing.assert_close(mine, exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("queries", [1, 30, QUERY_BLOCK + 9])
def test_sinks_take_their_share_of_the_weights(queries: int, window: int | None, quantised: bool) -> None:
    """Against a softmax over one more column, whose value is nothing."""
    generator = torch.Generator().manual_seed(3)
    keys = queries + 50
    q, k, v = (torch.randn(1, heads, n, 16, generator=generator) for heads, n in ((6, queries), (2, keys), (2, keys)))
    sinks = torch.linspace(-3.0, 5.0, 6)
    given: tuple[Any, Any] = (k, v)
    if quantised:
        codes = [quantise(states[0].transpose(0, 1)) for states in given]
        given = (QuantisedStates(*codes[0]), QuantisedStates(*codes[1]))
        k, v = (states.numbers(torch.float32) for states in given)
    mine, _ = arena_attention(torch.nn.Linear(1, 1), q, *given, None, sliding_window=window, s_aux=sinks)
    scores = q @ k.repeat_interleave(3, dim=1).transpose(2, 3) / 4.0
    at, other = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    scores = scores.masked_fill((other > at) | (other <= at - (window or keys)), -torch.inf)
    column = sinks.view(1, 6, 1, 1).expand(1, 6, queries, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    expected = (weights @ v.repeat_interleave(3, dim=1)).transpose(1, 2)
    torch.testing.assert_close(mine, expected, atol=2e-6, rtol=1e-5)
