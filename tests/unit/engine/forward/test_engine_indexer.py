"""The index of sparse attention chooses what the library's own, which goes query by query, chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parkd_engine.arenas.indexed_layers import IndexPositions, LayerIndex
from parkd_engine.arenas.kv_format import tokens_of
from parkd_engine.forward import attention
from parkd_engine.forward.indexer import BlockIndexer, CausalOrder, KeySelection, choose_blocks
from transformers import DynamicCache
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

from tests.unit.engine.kit.core_models import assert_same, read_and_decode, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_config, hybrid_model

HIDDEN = 16
LAYER = 1


def indexer_pair(heads: int, block_tokens: int, count: int, seed: int, *, exact: bool) -> tuple[Any, BlockIndexer]:
    """The library's and ours, with the same weights. Exact: of halves and without norms, so that nothing rounds, and
    what should be equal is."""
    config = hybrid_config(
        "qwen4-exp",
        hidden_size=HIDDEN,
        head_dim=8,
        indexer_n_heads=heads,
        indexer_head_dim=8,
        indexer_budget=count * block_tokens,
        indexer_compress_ratio=block_tokens,
    )
    original = Qwen4ExpTextQSAIndexer(config, LAYER)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_(generator=generator)
            if exact:
                parameter.mul_(2).round_().div_(2)
    if exact:
        original.q_layernorm = original.k_layernorm = torch.nn.Identity()
    return original, BlockIndexer(original, Qwen4ExpTextRotaryEmbedding(config))


def states_of(tokens: int, kinds: int, seed: int) -> torch.Tensor:
    """`[1, tokens, hidden]`; of few kinds, so that whole blocks are alike, or each its own (0)."""
    generator = torch.Generator().manual_seed(seed)
    if kinds == 0:
        return torch.randn(1, tokens, HIDDEN, generator=generator)
    values = torch.randint(-2, 3, (kinds, HIDDEN), generator=generator).float()
    return values[torch.randint(0, kinds, (tokens,), generator=generator)].unsqueeze(0)


def reference_mask(original: Any, mine: BlockIndexer, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bool `[tokens, tokens]`, of the library's indexer."""
    tables = mine.rotary(states, positions)
    causal = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        return original(states, tables, causal, None)[0, 0]


def chosen_in_chunks(mine: BlockIndexer, states: torch.Tensor, positions: torch.Tensor, chunk: int) -> torch.Tensor:
    """The same of ours, read in chunks through the library's cache."""
    tokens = states.shape[1]
    cache = DynamicCache(config=hybrid_config("qwen4-exp"))
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start in range(0, tokens, chunk):
        stop = min(tokens, start + chunk)
        with torch.inference_mode():
            selection = mine(
                states[:, start:stop],
                mine.rotary(states, positions[:, :, :stop]),
                CausalOrder(),
                cache,
            )
        if selection.chosen is None:
            seen[start:stop, :stop] = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
        else:
            # One part as a mask, the other as places.
            middle = (stop - start) // 2
            seen[start : start + middle, : start + middle] = selection.mask(0, middle)
            places, are = selection.places(middle, stop - start)
            assert int(are.sum()) == len({(int(row), int(places[row, i])) for row, i in are.nonzero()})
            for row in range(stop - start - middle):
                seen[start + middle + row, places[row, are[row]]] = True
    return seen


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.integers(1, 110),
    chunk=st.sampled_from([1, 3, 16, 64, 110]),
    heads=st.integers(1, 4),
    block_tokens=st.sampled_from([1, 2, 3, 4, 8]),
    count=st.integers(1, 6),
    kinds=st.sampled_from([0, 0, 1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_what_is_chosen_is_what_the_library_chooses(
    tokens: int, chunk: int, heads: int, block_tokens: int, count: int, kinds: int, seed: int
) -> None:
    """Of different tokens at rising positions, and of few kinds of tokens at one position, where most scores tie."""
    assume(kinds == 0 or block_tokens != 3)  # Means of three round.
    original, mine = indexer_pair(heads, block_tokens, count, seed, exact=kinds > 0)
    states = states_of(tokens, kinds, seed)
    positions = torch.arange(tokens).expand(3, 1, -1) * (kinds == 0)
    expected = reference_mask(original, mine, states, positions)
    assert torch.equal(chosen_in_chunks(mine, states, positions, chunk), expected)


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_shared_last_places_go_to_whom_the_library_gives_them(count: int) -> None:
    """Long rows with few different scores: the way a row is sorted depends on its length, and so does who is taken."""
    generator = torch.Generator().manual_seed(count)
    block_tokens, blocks = 2, 700
    keys = torch.randint(0, 3, (blocks, 4), generator=generator).float()
    queries = torch.randint(-1, 2, (64, 2, 4), generator=generator).float()
    position = blocks * block_tokens - 64
    chosen = choose_blocks(queries, keys, position, count, block_tokens)
    for row, query in enumerate(queries):
        scores = torch.relu(query @ keys[: (position + row + 1) // block_tokens].T).sum(dim=0) / 2
        assert set(chosen[row].tolist()) == set(scores.topk(count).indices.tolist())


def test_how_many_are_scored_at_once_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(200, 8, generator=generator)
    queries = torch.randn(300, 2, 8, generator=generator)
    expected = choose_blocks(queries, keys, 500, 7, 4)
    for most in (1, 2 * 200 * 7, 2 * 200 * 299):
        assert torch.equal(choose_blocks(queries, keys, 500, 7, 4, most_scores=most), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_do_not_depend_on_how_many_are_made_at_once(dtype: torch.dtype) -> None:
    """Bit for bit: a restored conversation makes at once what the one that never left made step by step."""
    mine = indexer_pair(2, 4, 3, 5, exact=False)[1].to(dtype)
    keys = torch.randn(1, 1003, 8, generator=torch.Generator().manual_seed(8)).to(dtype)
    positions = IndexPositions(torch.arange(1003, dtype=torch.int32).unsqueeze(1).expand(-1, 3).contiguous())

    def made(counts: list[int]) -> torch.Tensor:
        index = LayerIndex(torch.empty(1003, 8, dtype=dtype), torch.empty(250, 8, dtype=dtype), positions, 4)
        index.write(keys, 0)
        with torch.inference_mode():
            return [index.blocks(count, mine.make_blocks).clone() for count in counts][-1]

    at_once = made([250])
    for counts in ([*range(1, 251)], [3, 17, 18, 130, 250], [249, 250]):
        assert torch.equal(made(counts), at_once)


def test_an_index_forgets_the_blocks_that_a_cut_goes_through() -> None:
    made: list[int] = []

    def make(keys: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        made.append(len(keys) // 4)
        return keys[::4] + firsts[0].unsqueeze(1)

    positions = IndexPositions(torch.zeros(40, 3, dtype=torch.int32))
    index = LayerIndex(torch.empty(40, 2), torch.empty(10, 2), positions, 4)
    index.write(torch.ones(1, 40, 2), 0)
    index.blocks(10, make)
    index.forget_from(23)
    index.write(torch.full((1, 17, 2), 2.0), 23)
    blocks = index.blocks(10, make)
    assert made == [10, 5]
    assert blocks[:, 0].tolist() == [1.0] * 6 + [2.0] * 4


def test_no_mask_is_larger_than_a_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 700 tokens behind 300 others makes masks of 256 queries at most."""
    sizes = []
    whole = KeySelection.mask

    def mask(self: KeySelection, start: int, stop: int) -> torch.Tensor:
        seen = whole(self, start, stop)
        sizes.append(tuple(seen.shape))
        return seen

    monkeypatch.setattr(KeySelection, "mask", mask)
    # Of so many chosen keys that hiding the others is less work than gathering these.
    session = tiny_session(1, hybrid_model("qwen4-exp", indexer_budget=124), batch_tokens=1000)
    session.extend(token_ids(300))
    sizes.clear()
    session.extend(token_ids(700, seed=2))
    assert sizes == [(256, 556), (256, 812), (188, 1000)] * 2
    assert attention.QUERY_BLOCK == 256


def test_keys_are_gathered_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one query needs, and otherwise no more than the bound; which changes nothing."""
    model, ids = hybrid_model("qwen4-exp"), token_ids(301)
    expected = read_and_decode(tiny_session(1, model, batch_tokens=300), ids)
    counts = []

    def gathered(states: Any, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        counts.append(places.numel() * 2 * 16 * 2)
        return tokens_of(states, places, dtype)

    monkeypatch.setattr(attention, "tokens_of", gathered)
    for bound, most in ((1, 12 * 64), (10_000, 10_000)):
        monkeypatch.setattr(attention, "GATHERED", bound)
        counts.clear()
        assert_same(read_and_decode(tiny_session(1, model, batch_tokens=300), ids), expected)
        assert counts
        assert max(counts) <= most


def test_positions_of_tokens_are_kept_with_their_keys() -> None:
    """In each stage that has an index, whichever stage the first indexed layer of the model is in."""
    session = tiny_session(2, hybrid_model("qwen4-exp"), batch_tokens=64)
    session.extend(token_ids(100))
    for arena in session.arenas:
        names = [field.name for field in arena.layout.row_fields]
        assert names.count("index_key") == names.count("index_position") == 1
        [field] = [field for field in arena.layout.row_fields if field.name == "index_position"]
        kept = arena.field_view(field)[:100]
        assert torch.equal(kept, torch.arange(100, dtype=torch.int32).unsqueeze(1).expand(-1, 3))
