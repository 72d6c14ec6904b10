"""The index of sparse attention: chooses which blocks of keys a query sees.

    keys     | block 0 | block 1 | ... | block n - 1 | tail |      `block_tokens` per block (4 in the published model)
    index    | mean 0  | mean 1  | ... | mean n - 1  |             normed, with the rotary position of its first token
    a query  sees the `budget / block_tokens` blocks with the highest scores, and the tail

Score of a block: the sum over index heads of relu(query . block). (Source: the library's `Qwen4ExpTextQSAIndexer`,
which loops over queries in Python. The choice here is the same, also among equal scores.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

MOST_SCORES = 1 << 20
"""Scores, one per query, head and block, computed at a time: 4 MiB."""
MOST_BLOCKS = 4096
"""Block means computed at a time."""

MakeBlocks = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(indexer keys `[n * block_tokens, dim]`, positions of the blocks' first tokens `[3, n]`) -> blocks `[n, dim]`."""


class CausalOrder:
    """Takes the place of the causal mask in models with an index. `&` returns the index's selection unchanged;
    attention itself applies causality to it. So no mask over all queries is made."""

    dtype = torch.bool

    def __and__(self, selection: KeySelection) -> KeySelection:
        return selection


@dataclass(frozen=True, eq=False, slots=True)
class KeySelection:
    """The keys that the queries at `[position, position + q)` see."""

    position: int
    block_tokens: int
    chosen: torch.Tensor | None
    """int64 `[q, blocks]`, ascending. Blocks that do not end before the query are ignored. None: all keys."""

    def mask(self, start: int, stop: int) -> torch.Tensor:
        """Mask of the queries `[start, stop)`: bool `[stop - start, position + stop]`, True where a key is seen."""
        assert self.chosen is not None, "without a choice there is nothing to mask"
        keys = self.position + stop
        blocks = -(-keys // self.block_tokens)
        at = torch.arange(self.position + start, keys, device=self.chosen.device).unsqueeze(1)
        # One extra column takes the indices that are out of range.
        seen = torch.zeros((stop - start, blocks + 1), dtype=torch.bool, device=self.chosen.device)
        seen.scatter_(1, self.chosen[start:stop].clamp(max=blocks), True)
        seen.scatter_(1, (at + 1) // self.block_tokens, True)
        each = seen[:, :blocks].repeat_interleave(self.block_tokens, dim=1)[:, :keys]
        return each.tril_(keys - (stop - start))

    @property
    def width(self) -> int:
        """The most keys that a query sees; 0 if `chosen` is None."""
        return 0 if self.chosen is None else (self.chosen.shape[1] + 1) * self.block_tokens

    def places(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the keys that each of the queries `[start, stop)` sees: int64 `[stop - start, width]`, ascending
        where valid, and bool of that shape, False for entries that are not valid."""
        assert self.chosen is not None, "without a choice these are all"
        device = self.chosen.device
        ends = torch.arange(self.position + start + 1, self.position + stop + 1, device=device).unsqueeze(1)
        whole = ends // self.block_tokens
        blocks = torch.cat((self.chosen[start:stop], whole), dim=1)
        # The tail is the last of these blocks. Others that are not whole before the query do not count.
        seen = torch.cat((blocks[:, :-1] < whole, torch.ones_like(whole, dtype=torch.bool)), dim=1)
        places = blocks.unsqueeze(2) * self.block_tokens + torch.arange(self.block_tokens, device=device)
        places = places.flatten(1)
        seen = seen.repeat_interleave(self.block_tokens, dim=1) & (places < ends)
        return torch.where(seen, places, 0), seen


def choose_blocks(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    position: int,
    count: int,
    block_tokens: int,
    most_scores: int = MOST_SCORES,
) -> torch.Tensor:
    """The `count` highest-scoring whole blocks before each query, int64 `[q, count]`, ascending.

    `queries` `[q, heads, dim]` are at `[position, position + q)`; `blocks` is `[n, dim]` with `n > count`. A query
    with at most `count` whole blocks before it gets the first `count` blocks; ignore those that are not before it.
    """
    heads = queries.shape[1]
    keys = blocks.float().T
    step = max(1, most_scores // (heads * keys.shape[1]))
    order = torch.arange(keys.shape[1], device=keys.device)
    parts = []
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        whole = torch.arange(position + start + 1, position + start + 1 + len(part), device=keys.device) // block_tokens
        scores = (part.float().flatten(0, 1) @ keys).view(len(part), heads, -1)
        scores = torch.relu_(scores).sum(dim=1) / math.sqrt(keys.shape[0])
        scores.masked_fill_(order >= whole.unsqueeze(1), -torch.inf)
        parts.append(_highest(scores, whole, count))
    return torch.cat(parts).sort(dim=1).values


def _highest(scores: torch.Tensor, whole: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest of the first `whole` scores of each row; ties are broken as in a top-k per row."""
    values, places = scores.topk(count + 1, dim=1, sorted=False)
    above = values > values.amin(dim=1, keepdim=True)
    clear = above.sum(dim=1) == count
    chosen = torch.arange(count, device=scores.device).repeat(len(scores), 1)
    chosen[clear] = places[clear][above[clear]].view(-1, count)
    # In a tie for the last place, the choice of top-k depends on the row's length, so such rows are done one by one.
    for row in torch.nonzero(~clear & (whole > count)).flatten().tolist():
        chosen[row] = scores[row, : whole[row]].topk(count).indices
    return chosen


class BlockIndexer(nn.Module):
    """Replaces a layer's indexer and uses its weights."""

    def __init__(self, original: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.layer_idx: int = original.layer_idx
        self.heads: int = original.index_n_heads
        self.dim: int = original.index_head_dim
        self.block_tokens: int = original.compress_ratio
        self.blocks_seen: int = original.block_topk
        self.index_qk_proj = original.index_qk_proj
        self.q_layernorm = original.q_layernorm
        self.k_layernorm = original.k_layernorm
        self.rotary = rotary

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,  # noqa: ARG002
        cache: Cache | None,
    ) -> KeySelection:
        """Chooses keys for `hidden_states` `[1, q, hidden]`, and writes the tokens' indexer keys through `cache`.

        `position_embeddings` are the rotary tables of these tokens, or, without an arena's cache, of all tokens.
        """
        length = hidden_states.shape[1]
        both = _split(self.index_qk_proj(hidden_states)[0], self.dim, axis=1)
        kept = both[:, self.heads].unsqueeze(0)
        if cache is not None:
            kept = cache.update_indexer(kept, self.layer_idx)
        position = kept.shape[1] - length
        complete = kept.shape[1] // self.block_tokens
        if complete <= self.blocks_seen:
            return KeySelection(position, self.block_tokens, None)
        cos, sin = (table[0] for table in position_embeddings)
        queries = _turn(self.q_layernorm(both[:, : self.heads]), cos[-length:, None], sin[-length:, None])
        if cache is not None and hasattr(cache, "index_blocks"):
            blocks = cache.index_blocks(self.layer_idx, complete, self.make_blocks)
        else:
            firsts = slice(0, complete * self.block_tokens, self.block_tokens)
            blocks = self._means(kept[0, : firsts.stop], cos[firsts], sin[firsts])
        chosen = choose_blocks(queries, blocks, position, self.blocks_seen, self.block_tokens)
        return KeySelection(position, self.block_tokens, chosen)

    def make_blocks(self, keys: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Block keys `[n, dim]` from indexer keys `[n * block_tokens, dim]` and the positions `[3, n]` of the blocks'
        first tokens. Each block depends on its own tokens alone."""
        cos, sin = self.rotary(keys, firsts.unsqueeze(1))
        return self._means(keys, cos[0], sin[0])

    def _means(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        means = _split(keys, self.block_tokens, axis=0).float().mean(dim=1).to(keys.dtype)
        return _turn(self.k_layernorm(means), cos, sin)


def replace_indexers(model: Any) -> None:
    """Gives every indexed layer of the library's inner model a `BlockIndexer`. Idempotent."""
    for layer in model.layers:
        attention = getattr(layer, "self_attn", None)
        original = getattr(attention, "indexer", None)
        if attention is not None and original is not None and not isinstance(original, BlockIndexer):
            attention.indexer = BlockIndexer(original, model.rotary_emb)


def _split(states: torch.Tensor, size: int, *, axis: int) -> torch.Tensor:
    """Splits `[n, m]` along `axis` into groups of `size`: `[n / size, size, m]` or `[n, m / size, size]`."""
    tokens, width = states.shape
    return states.view(tokens, width // size, size) if axis else states.view(tokens // size, size, width)


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to the first `cos.shape[-1]` numbers of each vector."""
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)
