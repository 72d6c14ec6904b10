"""Cache layers of full attention over arena rows: they return views, and nothing is ever appended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from parkd_engine.arenas.cache_layers import ArenaLinearLayer
from parkd_engine.arenas.indexed_layers import TakesPositions
from parkd_engine.arenas.kv_format import KeptStates, QuantisedStates, quantise
from parkd_engine.arenas.placed import PlacedRows, PlacedStates, TokenPlace


class ArenaAttentionLayer(TakesPositions, CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one full-attention layer, in an arena's rows.

    rows    0 ........ position ........ position + q
            |-- kept --|-- written now --|              the views returned cover [0, position + q)
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` and `values` are `[row_tokens, heads, head_dim]`, strided views of arena rows, those of all seats."""
        super().__init__()
        self.all_key_rows = self.key_rows = keys
        self.all_value_rows = self.value_rows = values
        """`all_...`: of all seats, as what is recorded needs them; the others from this seat's first row on."""
        self.position = 0
        self.place: TokenPlace | None = None
        """Set while the forward pass of a step is recorded."""
        self.is_initialized = True

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` from now on."""
        self.key_rows, self.value_rows = self.all_key_rows[base:], self.all_value_rows[base:]

    def begin(self, position: int) -> None:
        self.position = position

    def placed(self) -> PlacedRows:
        """The layer's rows and where a step's tokens go. Only while a step is recorded."""
        assert self.place is not None, "nothing is recorded"
        scales: torch.Tensor | None = getattr(self, "all_scale_rows", None)
        place = self.place
        return PlacedRows(self.all_key_rows, self.all_value_rows, scales, place.position, None, place.first)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arena was allocated before the first forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        """Writes `[1, heads, q, head_dim]` at the position; returns `[1, heads, position + q, head_dim]` of both.

        They are views, unless the rows' dtype differs from the compute dtype.
        """
        if self.place is not None:
            slot = self.place.position
            first = self.place.first
            return (
                PlacedStates.written(self.place, self.all_key_rows, key_states, slot, first=first),
                PlacedStates.written(self.place, self.all_value_rows, value_states, slot, first=first),
            )
        start, stop = self.position, self.position + key_states.shape[-2]
        self.key_rows[start:stop] = key_states[0].transpose(0, 1)
        self.value_rows[start:stop] = value_states[0].transpose(0, 1)
        return (
            self.key_rows[:stop].transpose(0, 1).unsqueeze(0).to(key_states.dtype),
            self.value_rows[:stop].transpose(0, 1).unsqueeze(0).to(value_states.dtype),
        )

    def get_seq_length(self) -> int:
        return self.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.position + query_length, 0

    def get_max_length(self) -> int:
        return self.key_rows.shape[0]


class QuantisedAttentionLayer(ArenaAttentionLayer):
    """The same over rows of int8 codes and scales (`parkd_engine.arenas.kv_format`)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """`keys` and `values` as above, of int8; `scales` is float16 `[row_tokens, 2, heads]`."""
        super().__init__(keys, values)
        self.all_scale_rows = self.scale_rows = scales

    def move_to(self, base: int) -> None:
        super().move_to(base)
        self.scale_rows = self.all_scale_rows[base:]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        """Writes as above; returns the quantised rows, including those just written."""
        if self.place is not None:
            return (
                PlacedStates.coded(self.place, self.all_key_rows, self.all_scale_rows, 0, key_states),
                PlacedStates.coded(self.place, self.all_value_rows, self.all_scale_rows, 1, value_states),
            )
        start, stop = self.position, self.position + key_states.shape[-2]
        for part, (rows, states) in enumerate(((self.key_rows, key_states), (self.value_rows, value_states))):
            rows[start:stop], self.scale_rows[start:stop, part] = quantise(states[0].transpose(0, 1))
        return (
            QuantisedStates(self.key_rows[:stop], self.scale_rows[:stop, 0]),
            QuantisedStates(self.value_rows[:stop], self.scale_rows[:stop, 1]),
        )


class QuantisedLatentLayer(QuantisedAttentionLayer):
    """The same for latent attention, but dequantised: the model computes keys and values from what it gets here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        latents, rotary = super().update(key_states, value_states)
        assert isinstance(latents, QuantisedStates), "decoding of latent attention is not recorded"
        assert isinstance(rotary, QuantisedStates), "keys and values are kept in one format"
        return latents.numbers(key_states.dtype), rotary.numbers(value_states.dtype)


class ArenaHybridLayer(ArenaLinearLayer):
    """A layer with both attention and a recurrence, so with both rows and fixed state."""

    def __init__(self, attention: ArenaAttentionLayer, states: Mapping[str, torch.Tensor]) -> None:
        """`states` as for `ArenaLinearLayer`."""
        super().__init__(states)
        self.attention = attention

    @property
    def place(self) -> TokenPlace | None:
        return self.attention.place

    @place.setter
    def place(self, place: TokenPlace | None) -> None:
        self.attention.place = place

    def move_to(self, base: int) -> None:
        """The rows of its attention begin at row `base` from now on."""
        self.attention.move_to(base)

    def begin(self, position: int) -> None:
        super().begin(position)
        self.attention.begin(position)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        return self.attention.update(key_states, value_states)
