"""A decode step of several seats, a token each, over the weights read once: for the models of `forward.dense`.

    seat 0: token, position, first row --|                                          |--> logits of seat 0
    seat 2: token, position, first row --|-- products of all | attention of each ---|--> logits of seat 2

Everything else than attention takes the tokens of all seats as rows of one matrix, in kernels that compute each row in
an order of its own, whatever their number (`kernels.few_tokens`, `kernels.pointwise`). So a seat has the same bits in a
step of its own, recorded here too, as beside any others. They differ in the last bits from those of `StageDecoder`,
whose products are faster for one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parkd_engine.arenas.cache import StageCache
from parkd_engine.forward.decode_graph import Decoder
from parkd_engine.forward.dense import dense_layers
from parkd_engine.forward.stages import Stage


class SeatsDecoder(Decoder):
    """One stage's part of a step of `tokens` seats."""

    def __init__(self, stage: Stage, cache: StageCache, config: Any, tokens: int) -> None:
        """`cache` is that of any seat: rows are read and written where `place` says, among those of all."""
        from parkd_engine.kernels.attend import DecodeAttention

        super().__init__(stage, int(config.hidden_size), tokens)
        self.layers = dense_layers(stage, cache)
        layer = self.layers[0]
        kv_heads, dim = layer.key_rows.shape[1:]
        q_width, device, dtype = layer.output.in_features, stage.device, stage.dtype
        self._eps = float(config.rms_norm_eps)
        self.rows, self.turns, self.firsts = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3))
        """int64 `[tokens]`: the row of each seat's token, its rotary position, and the seat's first row."""
        widths = (q_width, kv_heads * dim, kv_heads * dim)
        self._qkv: tuple[torch.Tensor, ...] = tuple(
            torch.empty((tokens, width), dtype=dtype, device=device) for width in widths
        )
        self._query, self._attended = (torch.empty((tokens, q_width), dtype=dtype, device=device) for _ in range(2))
        self._normed, self._delta = (torch.empty_like(self.hidden) for _ in range(2))
        inner = int(config.intermediate_size)
        self._gates, self._ups = (torch.empty((tokens, inner), dtype=dtype, device=device) for _ in range(2))
        codes = layer.scale_rows is not None
        self._attend = DecodeAttention(q_width // dim, kv_heads, dim, device, codes=codes)

    def ready(self, token_ids: Sequence[int], position: int, turn: int) -> None:
        """For recording: the first seat's first rows."""
        assert turn == position, "models of this kind read no pictures"
        self.place(token_ids, [position] * len(token_ids), [0] * len(token_ids))

    def place(self, token_ids: Sequence[int], positions: Sequence[int], bases: Sequence[int]) -> None:
        """Prepares a replay: token, position and first row of each seat. Only queues work."""
        self._take(token_ids)
        given = torch.tensor([positions, bases], dtype=torch.int64)
        turns, firsts = given.to(self.stage.device, non_blocking=True)
        self.turns.copy_(turns)
        self.firsts.copy_(firsts)
        torch.add(self.turns, self.firsts, out=self.rows)

    def run(self) -> None:
        from parkd_engine.kernels.few_tokens import products
        from parkd_engine.kernels.pointwise import add_norm, gate
        from parkd_engine.kernels.rows import write_rows

        inner: Any = self.stage.inner
        hidden, normed, eps = self.hidden, self._normed, self._eps
        if self.stage.index == 0:
            hidden.copy_(inner.embed_tokens(self.tokens)[0])
        cos, sin = (turn[0].contiguous() for turn in inner.rotary_emb(hidden[None], position_ids=self.turns[None]))
        delta: torch.Tensor | None = None
        for layer in self.layers:
            keys, values, scales = layer.all_rows
            add_norm(hidden, delta, layer.input_norm, normed, eps)
            for linear, out in zip(layer.qkv, self._qkv, strict=True):
                products(normed, linear, out)
            q, k, v = self._qkv
            write_rows(
                q,
                k,
                v,
                cos,
                sin,
                self.rows,
                self._query,
                keys,
                values,
                scales,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            for index in range(len(hidden)):
                here = slice(index, index + 1)
                self._attend(
                    self._query[index],
                    keys,
                    values,
                    self.rows[here],
                    self._attended[index],
                    layer.scaling,
                    scales,
                    first=self.firsts[here],
                )
            products(self._attended, layer.output, self._delta)
            add_norm(hidden, self._delta, layer.post_norm, normed, eps)
            products(normed, layer.gate, self._gates)
            products(normed, layer.up, self._ups)
            gate(self._gates, self._ups)
            products(self._gates, layer.down, self._delta)
            delta = self._delta
        assert delta is not None, "a stage has layers"
        if self.logits is None:
            hidden.add_(delta)
            return
        add_norm(hidden, delta, inner.norm.weight, normed, eps)
        products(normed, self.stage.head, self.logits)
