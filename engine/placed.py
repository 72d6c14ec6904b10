"""Where one token's state goes while its forward is recorded as a CUDA graph.

    host     position 86,392              before every replay: position -> device, window buffers' slots -> device
    device   position | slot a window     read by what was recorded: rows are written there, attention ends there

A graph is recorded once and replayed for every token, so nothing in it may depend on a number that the host knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kv_format import quantise

if TYPE_CHECKING:
    from engine.kernels.attend import DecodeAttention


class TokenPlace:
    """One stage's numbers on its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        """By how much the token's queries and keys are turned: another number than its row's behind pictures."""
        self._slots: dict[int, torch.Tensor] = {}
        self._filled: dict[int, int] = {}
        self._attentions: dict[tuple[int, int, int, bool], DecodeAttention] = {}

    def slot(self, window: int) -> torch.Tensor:
        """int64 `[1]`: the token's place in the buffers of layers that see `window` tokens."""
        if window not in self._slots:
            self._slots[window] = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._slots[window]

    def set_slot(self, window: int, slot: int) -> None:
        """Layers of one window move alike, so that the device is told once for all of them."""
        if self._filled.get(window) != slot:
            self.slot(window).fill_(slot)
            self._filled[window] = slot

    def attention(self, q_heads: int, kv_heads: int, dim: int, *, codes: bool) -> DecodeAttention:
        from engine.kernels.attend import DecodeAttention

        shape = (q_heads, kv_heads, dim, codes)
        if shape not in self._attentions:
            self._attentions[shape] = DecodeAttention(q_heads, kv_heads, dim, self.device, codes=codes)
        return self._attentions[shape]


class PlacedStates:
    """The keys or the values of one layer as all the rows there are; the device says how many of them count."""

    def __init__(
        self,
        place: TokenPlace,
        rows: torch.Tensor,
        last: torch.Tensor,
        window: int | None = None,
        scale_rows: torch.Tensor | None = None,
    ) -> None:
        """`rows` is `[n, heads, dim]`; those up to `last` (int64 `[1]`) count, of them the last `window`. With
        `scale_rows`, float16 `[n, 2, heads]`, they are codes."""
        self.place, self.rows, self.last = place, rows, last
        self.window, self.scale_rows = window, scale_rows

    @classmethod
    def written(
        cls, place: TokenPlace, rows: torch.Tensor, states: torch.Tensor, slot: torch.Tensor, window: int | None = None
    ) -> PlacedStates:
        """`rows` with the token's `states`, `[1, heads, 1, dim]`, written at `slot`."""
        rows.index_copy_(0, slot, states[0].transpose(0, 1).to(rows.dtype))
        return cls(place, rows, slot, window)

    @classmethod
    def coded(
        cls, place: TokenPlace, rows: torch.Tensor, scale_rows: torch.Tensor, part: int, states: torch.Tensor
    ) -> PlacedStates:
        """The same as codes at the position, with their scales in `part` of `scale_rows` (0 keys, 1 values)."""
        codes, scales = quantise(states[0].transpose(0, 1))
        rows.index_copy_(0, place.position, codes)
        scale_rows[:, part].index_copy_(0, place.position, scales)
        return cls(place, rows, place.position, scale_rows=scale_rows)

    def attend(self, query: torch.Tensor, values: PlacedStates, scaling: float | None) -> torch.Tensor:
        """Attention of `query` `[1, q_heads, 1, dim]` over these keys; `[1, q_heads, 1, dim]`."""
        heads, dim = query.shape[1], query.shape[3]
        out = torch.empty(heads * dim, dtype=query.dtype, device=query.device)
        self.place.attention(heads, self.rows.shape[1], dim, codes=self.scale_rows is not None)(
            query.reshape(-1),
            self.rows,
            values.rows,
            self.last,
            out,
            dim**-0.5 if scaling is None else scaling,
            self.scale_rows,
            window=self.window,
        )
        return out.view(1, heads, 1, dim)
