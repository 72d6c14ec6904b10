"""Where the state of a step's tokens goes while its forward is recorded as a CUDA graph.

    host     position 86,392              before every replay: position -> device, window buffers' slots -> device
    device   position | slot a window     read by what was recorded: rows are written there, attention ends there

A graph is recorded once and replayed for every step, so nothing in it may depend on a number that the host knows.
A step is one token, or a token and guesses of what follows it; each attends by itself, as it would alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.kv_format import quantise

if TYPE_CHECKING:
    from engine.kernels.attend import DecodeAttention


class TokenPlace:
    """One stage's numbers on its device, of each of the step's tokens."""

    def __init__(self, device: torch.device, tokens: int = 1) -> None:
        self.device = device
        self.tokens = tokens
        self.position = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.turn = torch.zeros(tokens, dtype=torch.int64, device=device)
        """By how much a token's queries and keys are turned: another number than its row's behind pictures."""
        self._steps = torch.arange(tokens, device=device)
        self._slots: dict[int, torch.Tensor] = {}
        self._filled: dict[int, int] = {}
        self._attentions: dict[tuple[int, int, int, bool], DecodeAttention] = {}

    def put(self, position: int, turn: int) -> None:
        """The first token comes at `position` and is turned by `turn`, the others behind it. Only queues work."""
        torch.add(self._steps, position, out=self.position)
        torch.add(self._steps, turn, out=self.turn)

    def slot(self, window: int) -> torch.Tensor:
        """int64 `[tokens]`: their places in the buffers of layers that see `window` tokens."""
        if window not in self._slots:
            self._slots[window] = torch.zeros_like(self._steps)
        return self._slots[window]

    def set_slot(self, window: int, slot: int) -> None:
        """That of the first token. Layers of one window move together, so that the device is told once for all."""
        if self._filled.get(window) != slot:
            torch.add(self._steps, slot, out=self.slot(window))
            self._filled[window] = slot

    def attention(self, q_heads: int, kv_heads: int, dim: int, *, codes: bool) -> DecodeAttention:
        from engine.kernels.attend import DecodeAttention

        shape = (q_heads, kv_heads, dim, codes)
        if shape not in self._attentions:
            self._attentions[shape] = DecodeAttention(q_heads, kv_heads, dim, self.device, codes=codes)
        return self._attentions[shape]


class PlacedRows(NamedTuple):
    """Where a layer's keys and values of the step's tokens go, for kernels that write them themselves."""

    keys: torch.Tensor
    values: torch.Tensor
    """`[n, heads, dim]`, as are the keys."""
    scales: torch.Tensor | None
    """float16 `[n, 2, heads]` if the rows are codes."""
    slot: torch.Tensor
    """int64 `[tokens]`: their rows."""
    window: int | None


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
        """`rows` is `[n, heads, dim]`; to each token those up to its `last` (int64 `[tokens]`) count, of them the last
        `window`. With `scale_rows`, float16 `[n, 2, heads]`, they are codes."""
        self.place, self.rows, self.last = place, rows, last
        self.window, self.scale_rows = window, scale_rows

    @classmethod
    def written(
        cls, place: TokenPlace, rows: torch.Tensor, states: torch.Tensor, slot: torch.Tensor, window: int | None = None
    ) -> PlacedStates:
        """`rows` with the tokens' `states`, `[1, heads, tokens, dim]`, written at `slot`."""
        rows.index_copy_(0, slot, states[0].transpose(0, 1).to(rows.dtype))
        return cls(place, rows, slot, window)

    @classmethod
    def coded(
        cls, place: TokenPlace, rows: torch.Tensor, scale_rows: torch.Tensor, part: int, states: torch.Tensor
    ) -> PlacedStates:
        """The same as codes at the positions, with their scales in `part` of `scale_rows` (0 keys, 1 values)."""
        codes, scales = quantise(states[0].transpose(0, 1))
        rows.index_copy_(0, place.position, codes)
        scale_rows[:, part].index_copy_(0, place.position, scales)
        return cls(place, rows, place.position, scale_rows=scale_rows)

    def attend(self, query: torch.Tensor, values: PlacedStates, scaling: float | None) -> torch.Tensor:
        """Attention of `query` `[1, q_heads, tokens, dim]` over these keys; `[1, q_heads, tokens, dim]`."""
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
            )
        return out.view(tokens, heads, dim).transpose(0, 1)[None]
