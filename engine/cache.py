"""The library's cache interface over arenas: a layer's keys and values are views, nothing is ever appended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.arena import StageArena
from engine.cache_layers import ArenaLinearLayer, ArenaSlidingLayer
from engine.indexed_layers import IndexPositions, LayerIndex, OtherStagesLayer, TakesPositions
from engine.indexer import MakeBlocks
from engine.kv_format import KeptStates, QuantisedStates, quantise
from engine.layout import INDEX_KEY, INDEX_POSITION, WINDOW_FIELDS
from engine.placed import PlacedStates, TokenPlace
from engine.step_history import StepHistory


class ArenaAttentionLayer(TakesPositions, CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one full-attention layer, living in an arena's rows.

    rows    0 ........ position ........ position + q
            |-- kept --|-- written now --|              the views returned cover [0, position + q)
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` and `values` are `[context_tokens, heads, head_dim]`, strided views of arena rows."""
        super().__init__()
        self.key_rows = keys
        self.value_rows = values
        self.position = 0
        self.place: TokenPlace | None = None
        """Set while a token's forward is recorded."""
        self.is_initialized = True

    def begin(self, position: int) -> None:
        self.position = position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arena was allocated before the first forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        """Writes `[1, heads, q, head_dim]` at the position; returns `[1, heads, position + q, head_dim]` of both.

        What is returned are views, unless keys and values are kept in another dtype than the model computes in.
        """
        if self.place is not None:
            slot = self.place.position
            return (
                PlacedStates.written(self.place, self.key_rows, key_states, slot),
                PlacedStates.written(self.place, self.value_rows, value_states, slot),
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
    """The same with rows of codes and scales (`engine.kv_format`)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """`keys` and `values` as above, of int8; `scales` is float16 `[context_tokens, 2, heads]`."""
        super().__init__(keys, values)
        self.scale_rows = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[KeptStates, KeptStates] | tuple[PlacedStates, PlacedStates]:
        """Writes as above; returns what the rows now hold, also of what was just written."""
        if self.place is not None:
            return (
                PlacedStates.coded(self.place, self.key_rows, self.scale_rows, 0, key_states),
                PlacedStates.coded(self.place, self.value_rows, self.scale_rows, 1, value_states),
            )
        start, stop = self.position, self.position + key_states.shape[-2]
        for part, (rows, states) in enumerate(((self.key_rows, key_states), (self.value_rows, value_states))):
            rows[start:stop], self.scale_rows[start:stop, part] = quantise(states[0].transpose(0, 1))
        return (
            QuantisedStates(self.key_rows[:stop], self.scale_rows[:stop, 0]),
            QuantisedStates(self.value_rows[:stop], self.scale_rows[:stop, 1]),
        )


class StageCache(Cache):  # type: ignore[misc]
    """The cache of one stage, with a place for every layer of the model (other stages' stay empty).

    Lengths are answered from the timeline's position at the start of the chunk, never from a layer: the layer asked
    about may belong to another stage, and layers of this one have already written when later ones ask.
    """

    def __init__(self, arena: StageArena, num_layers: int, step_tokens: int = 0) -> None:
        """Of a step of up to `1 + step_tokens` tokens all but the first can be taken back."""
        layers: list[Any] = [OtherStagesLayer() for _ in range(num_layers)]
        fields = {(field.layer, field.name): arena.field_view(field) for field in arena.layout.row_fields}
        fields |= {(field.layer, field.name): arena.fixed_view(field) for field in arena.layout.fixed_fields}
        for layer in range(arena.layout.first_layer, arena.layout.end_layer):
            layers[layer] = _layer(arena, layer, fields)
        super().__init__(layers=layers)
        self._mine = [layer for layer in layers if not isinstance(layer, OtherStagesLayer)]
        self._sliding = [layer for layer in self._mine if isinstance(layer, ArenaSlidingLayer)]
        self._positions: IndexPositions | None = None
        self._indexes: dict[int, LayerIndex] = {}
        """By layer; those of sparse attention."""
        self._add_indexes(arena, fields)
        self.has_linear_state = any(isinstance(layer, ArenaLinearLayer) for layer in self._mine)
        """Some state here is true at one position only."""
        self.history = StepHistory(arena, step_tokens)
        self.position = 0

    def begin(self, position: int) -> None:
        """The chunk that comes starts at `position`: rows `[0, position)` are its past."""
        self.position = position
        if not self.history.is_recording:
            self.history.forget()
        for layer in self._mine:
            layer.begin(position)
        self.rows_changed_from(position)
        if self._positions is not None:
            self._positions.position = position

    def rows_changed_from(self, position: int) -> None:
        """Rows from `position` on are no longer those that went through here."""
        for index in self._indexes.values():
            index.forget_from(position)

    def record(self, place: TokenPlace | None) -> None:
        """From now on a forward writes one token where `place` says; None: where `begin` said, as ever."""
        for layer in self._mine:
            if hasattr(layer, "place"):
                layer.place = place

    def ready_for_token(self, position: int, turn: int, place: TokenPlace) -> None:
        """Before a recorded forward is replayed for the token at `position`, turned by `turn`. Only queues work."""
        self.begin(position)
        place.position.fill_(position)
        place.turn.fill_(turn)
        for layer in self._sliding:
            layer.ready_for_token(place)

    def floor(self, position: int) -> int:
        """The lowest position the timeline can be cut to while this stage's state stays exact."""
        exact_from = 0 if self.history.is_empty else self.history.floor(position)
        return max([exact_from, *(layer.floor for layer in self._sliding)])

    def pack(self, position: int) -> None:
        """Makes the arena's `fixed` the whole fixed state at `position`, where the timeline is."""
        for layer in self._sliding:
            layer.begin(position)
            layer.pack()

    def unpack(self, position: int) -> None:
        """Makes the arena's `fixed` what this stage goes on from at `position`."""
        for layer in self._sliding:
            layer.unpack(position)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Writes `[1, q, dim]` at the position; returns the view `[1, position + q, dim]`."""
        return self._indexes[layer_idx].write(indexer_key_states, self.position)

    def index_blocks(self, layer_idx: int, count: int, make: MakeBlocks) -> torch.Tensor:
        """The first `count` blocks' keys of a layer's index, `[count, dim]`, the missing ones made by `make`."""
        return self._indexes[layer_idx].blocks(count, make)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.position

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return self.position + query_length, 0

    def _add_indexes(self, arena: StageArena, fields: Mapping[tuple[int, str], torch.Tensor]) -> None:
        rows = next((view for (_, name), view in fields.items() if name == INDEX_POSITION), None)
        if rows is None:
            return
        self._positions = IndexPositions(rows)
        for layer in self.layers:
            if isinstance(layer, TakesPositions):
                layer.positions = self._positions
        for layer, blocks in arena.index_blocks.items():
            keys, size = fields[layer, INDEX_KEY], arena.layout.index_block_tokens
            self._indexes[layer] = LayerIndex(keys, blocks, self._positions, size)


def attention_layer(layer: int, fields: Mapping[tuple[int, str], torch.Tensor]) -> ArenaAttentionLayer:
    """The layer over its fields' views, which are named by layer and field."""
    keys, values = fields[layer, "key"], fields[layer, "value"]
    scales = fields.get((layer, "scale"))
    return ArenaAttentionLayer(keys, values) if scales is None else QuantisedAttentionLayer(keys, values, scales)


def _layer(arena: StageArena, layer: int, fields: Mapping[tuple[int, str], torch.Tensor]) -> Any:
    """The cache layer for what the arena's layout has of `layer`, by the names of its fields."""
    if (layer, "key") in fields:
        return attention_layer(layer, fields)
    if (layer, WINDOW_FIELDS[0]) in fields:
        packed = (fields[layer, WINDOW_FIELDS[0]], fields[layer, WINDOW_FIELDS[1]])
        return ArenaSlidingLayer(arena.windows[layer], packed, arena.window_room.slack_tokens)
    return ArenaLinearLayer({name: view.unsqueeze(0) for (index, name), view in fields.items() if index == layer})
