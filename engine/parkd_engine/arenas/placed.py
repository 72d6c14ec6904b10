"""Positions in device memory, so that a step's forward can be recorded as a CUDA graph.

    host     position 86,392                before every replay: sends the position and the window buffers' slots
    device   position | slot per window     read by the graph: where to write rows, and where attention ends
             first row of the seat          where attention begins, if there are several seats

A graph is recorded once and replayed for every step, so nothing in it may depend on a number that only the host knows.
A step is one token, or a token followed by draft tokens. Attention runs for each of them separately, as for one alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from parkd_engine.arenas.kv_format import quantise

if TYPE_CHECKING:
    from parkd_engine.kernels.attend import DecodeAttention


class TokenPlace:
    """Positions and slots of a step's tokens, on one stage's device."""

    def __init__(self, device: torch.device, tokens: int = 1, *, has_neighbours: bool = False) -> None:
        """`has_neighbours`: rows of other seats lie before and behind those of the step."""
        self.device = device
        self.tokens = tokens
        self.position = torch.zeros(tokens, dtype=torch.int64, device=device)
        """int64 `[tokens]`: the tokens' rows."""
        self.first = torch.zeros(1, dtype=torch.int64, device=device) if has_neighbours else None
        """int64 `[1]`: the seat's first row; None: row 0."""
        self.turn = torch.zeros(tokens, dtype=torch.int64, device=device)
        """int64 `[tokens]`: the tokens' rotary positions, which differ from their rows after images."""
        self._steps = torch.arange(tokens, device=device)
        self._slots: dict[int, torch.Tensor] = {}
        self._filled: dict[int, int] = {}
        self._attentions: dict[tuple[int, int, int, bool], DecodeAttention] = {}

    def put(self, position: int, turn: int, base: int = 0) -> None:
        """Sets position and rotary position of the first token; the others follow it. Row `base` is the seat's first.
        Only queues work."""
        torch.add(self._steps, base + position, out=self.position)
        torch.add(self._steps, turn, out=self.turn)
        if self.first is not None:
            self.first.fill_(base)

    def slot(self, window: int) -> torch.Tensor:
        """int64 `[tokens]`: the tokens' rows in the buffers of layers with this window."""
        if window not in self._slots:
            self._slots[window] = torch.zeros_like(self._steps)
        return self._slots[window]

    def set_slot(self, window: int, slot: int) -> None:
        """Sets the first token's slot. Layers with the same window share slots, so one update serves all."""
        if self._filled.get(window) != slot:
            torch.add(self._steps, slot, out=self.slot(window))
            self._filled[window] = slot

    def attention(self, q_heads: int, kv_heads: int, dim: int, *, codes: bool) -> DecodeAttention:
        from parkd_engine.kernels.attend import DecodeAttention

        shape = (q_heads, kv_heads, dim, codes)
        if shape not in self._attentions:
            self._attentions[shape] = DecodeAttention(q_heads, kv_heads, dim, self.device, codes=codes)
        return self._attentions[shape]


class PlacedRows(NamedTuple):
    """Where kernels write a layer's keys and values of the step's tokens themselves."""

    keys: torch.Tensor
    values: torch.Tensor
    """`[n, heads, dim]`, like the keys."""
    scales: torch.Tensor | None
    """float16 `[n, 2, heads]` if the rows are quantised, else None."""
    slot: torch.Tensor
    """int64 `[tokens]`: the rows to write."""
    window: int | None
    first: torch.Tensor | None = None
    """int64 `[1]`: the first row that tokens may see; None: row 0."""


class PlacedStates:
    """The keys or values of one layer: all allocated rows. A number on the device says how many are in use."""

    def __init__(
        self,
        place: TokenPlace,
        rows: torch.Tensor,
        last: torch.Tensor,
        window: int | None = None,
        scale_rows: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> None:
        """`rows` is `[n, heads, dim]`. A token sees the rows from `first`, int64 `[1]`, up to its `last`, int64
        `[tokens]`, inclusive; with a `window`, only that many of them. With `scale_rows`, float16 `[n, 2, heads]`, the
        rows are quantised."""
        self.place, self.rows, self.last = place, rows, last
        self.window, self.scale_rows, self.first = window, scale_rows, first

    @classmethod
    def written(
        cls,
        place: TokenPlace,
        rows: torch.Tensor,
        states: torch.Tensor,
        slot: torch.Tensor,
        window: int | None = None,
        first: torch.Tensor | None = None,
    ) -> PlacedStates:
        """Writes the tokens' `states`, `[1, heads, tokens, dim]`, to `rows` at `slot`."""
        rows.index_copy_(0, slot, states[0].transpose(0, 1).to(rows.dtype))
        return cls(place, rows, slot, window, first=first)

    @classmethod
    def coded(
        cls, place: TokenPlace, rows: torch.Tensor, scale_rows: torch.Tensor, part: int, states: torch.Tensor
    ) -> PlacedStates:
        """Writes them quantised at their positions, with scales in `part` of `scale_rows` (0 keys, 1 values)."""
        codes, scales = quantise(states[0].transpose(0, 1))
        rows.index_copy_(0, place.position, codes)
        scale_rows[:, part].index_copy_(0, place.position, scales)
        return cls(place, rows, place.position, scale_rows=scale_rows, first=place.first)

    def attend(
        self, query: torch.Tensor, values: PlacedStates, scaling: float | None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of `query` `[1, q_heads, tokens, dim]` over these keys; `[1, q_heads, tokens, dim]`. `sinks` are
        `[q_heads]`."""
        _, heads, tokens, dim = query.shape
        queries = query[0].transpose(0, 1).reshape(tokens, heads * dim)
        out = torch.empty_like(queries)
        attention = self.place.attention(heads, self.rows.shape[1], dim, codes=self.scale_rows is not None)
        for index in range(tokens):
            attention(
                queries[index],
                self.rows,
                values.rows,
                self.last[index : index + 1],
                out[index],
                dim**-0.5 if scaling is None else scaling,
                self.scale_rows,
                window=self.window,
                sinks=sinks,
                first=self.first,
            )
        return out.view(tokens, heads, dim).transpose(0, 1)[None]
