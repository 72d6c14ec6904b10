"""The transformers cache interface over arenas: a layer's keys and values are views, and nothing is ever appended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer

from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache_layers import ArenaLinearLayer, ArenaSlidingLayer, WindowTimeline
from parkd_engine.arenas.indexed_layers import IndexPositions, LayerIndex, OtherStagesLayer, TakesPositions
from parkd_engine.arenas.placed import TokenPlace
from parkd_engine.arenas.step_history import StepHistory
from parkd_engine.families.layer_state import INDEX_KEY, INDEX_POSITION, LATENT_FIELDS, WINDOW_FIELDS
from parkd_engine.forward.attention_layers import (
    ArenaAttentionLayer,
    ArenaHybridLayer,
    QuantisedAttentionLayer,
    QuantisedLatentLayer,
)
from parkd_engine.forward.indexer import MakeBlocks


class StageCache(Cache):  # type: ignore[misc]
    """The cache of one stage, with an entry for every layer of the model; entries of other stages' layers are empty.

    Lengths come from the timeline's position at the start of the chunk, never from a layer: the layer in question may
    belong to another stage, and earlier layers have already written the chunk when later ones ask.
    """

    def __init__(self, arena: StageArena, num_layers: int, step_tokens: int = 0) -> None:
        """In a step of up to `1 + step_tokens` tokens, all but the first can be taken back."""
        layers: list[Any] = [OtherStagesLayer() for _ in range(num_layers)]
        assert arena.base == 0, "what is made here is moved later"
        fields = {(field.layer, field.name): arena.field_view(field) for field in arena.layout.row_fields}
        fields |= {(field.layer, field.name): arena.fixed_view(field) for field in arena.layout.fixed_fields}
        windows: dict[int, WindowTimeline] = {}
        for layer in range(arena.layout.first_layer, arena.layout.end_layer):
            layers[layer] = _layer(arena, layer, fields, windows)
        super().__init__(layers=layers)
        self._mine = [layer for layer in layers if not isinstance(layer, DummyLayer)]
        self._sliding = [layer for layer in self._mine if isinstance(layer, ArenaSlidingLayer)]
        self._windows = tuple(windows.values())
        self._positions: IndexPositions | None = None
        self._indexes: dict[int, LayerIndex] = {}
        """By layer, for layers of sparse attention."""
        self._add_indexes(arena, fields)
        self.base = arena.base
        """The row of the arena at which this seat's begin."""
        self.has_neighbours = arena.has_neighbours
        self.has_linear_state = any(isinstance(layer, ArenaLinearLayer) for layer in self._mine)
        """Whether any state here is valid at a single position only."""
        self.history = StepHistory(arena, step_tokens)
        self.position = 0

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` of the arena from now on."""
        self.base = base
        for layer in self._mine:
            if hasattr(layer, "move_to"):
                layer.move_to(base)
        if self._positions is not None:
            self._positions.move_to(base)
        for index in self._indexes.values():
            index.move_to(base)

    def begin(self, position: int) -> None:
        """Prepares for a chunk that starts at `position`: rows `[0, position)` are its past."""
        self._moved_to(position)
        for window in self._windows:
            window.begin(position)
        for layer in self._mine:
            layer.begin(position)
        if self._positions is not None:
            self._positions.position = position

    def _moved_to(self, position: int) -> None:
        self.position = position
        if not self.history.is_recording:
            self.history.forget()
        self.rows_changed_from(position)

    def rows_changed_from(self, position: int) -> None:
        """Forgets what was derived from rows at and after `position`, which have changed or are about to."""
        for index in self._indexes.values():
            index.forget_from(position)

    def record(self, place: TokenPlace | None) -> None:
        """Makes forward passes write a step's tokens at `place`, on the device; None: at the position of `begin`."""
        for layer in self._mine:
            if hasattr(layer, "place"):
                layer.place = place

    def ready_for_step(self, position: int, turn: int, place: TokenPlace) -> None:
        """Prepares a replay of a recorded forward pass for tokens from `position` on; the first has the rotary position
        `turn`. Only queues work. Layers whose state has a fixed address need no update before a replay."""
        self._moved_to(position)
        place.put(position, turn, self.base)
        for window in self._windows:
            window.begin(position)
            place.set_slot(window.window, window.room_for(place.tokens))

    def floor(self, position: int) -> int:
        """The lowest position to which the timeline, now at `position`, can be cut without a checkpoint."""
        exact_from = 0 if self.history.is_empty else self.history.floor(position)
        return max([exact_from, *(window.floor for window in self._windows)])

    def pack(self, position: int) -> None:
        """Completes the arena's `fixed` with the windows at `position`, where the timeline is."""
        for window in self._windows:
            window.begin(position)
        packed, live = self._packing()
        if packed:
            torch._foreach_copy_(packed, live)
        beyond = [part for layer in self._sliding for part in layer.beyond()]
        if beyond:
            torch._foreach_zero_(beyond)

    def unpack(self, position: int) -> None:
        """Loads the windows from the arena's `fixed`, which is valid at `position`."""
        for window in self._windows:
            window.restart(position)
        packed, live = self._packing()
        if packed:
            torch._foreach_copy_(live, packed)

    def live_windows(self, position: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Keys and values in the live windows before `position`, where the timeline is, by layer."""
        for window in self._windows:
            window.begin(position)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, ArenaSlidingLayer):
                yield index, [live for _, live in layer.packing()]

    def _packing(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The windows in the fixed state, and in the layers' buffers: for one call, since one for each layer takes the
        host longer than the GPU needs to copy them."""
        pairs = [pair for layer in self._sliding for pair in layer.packing()]
        return [packed for packed, _ in pairs], [live for _, live in pairs]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Writes index keys `[1, q, dim]` at the position; returns the view `[1, position + q, dim]`."""
        return self._indexes[layer_idx].write(indexer_key_states, self.position)

    def index_blocks(self, layer_idx: int, count: int, make: MakeBlocks) -> torch.Tensor:
        """Keys of the first `count` blocks of a layer's index, `[count, dim]`; `make` computes the missing ones."""
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
            if layer < arena.layout.end_layer:  # A draft head keeps its own, which starts a row later.
                keys, size = fields[layer, INDEX_KEY], arena.layout.index_block_tokens
                self._indexes[layer] = LayerIndex(keys, blocks, self._positions, size)


def attention_layer(layer: int, fields: Mapping[tuple[int, str], torch.Tensor]) -> ArenaAttentionLayer:
    """The cache layer over the views of its fields, keyed by layer and field name."""
    latent = (layer, LATENT_FIELDS[0]) in fields
    keys, values = (fields[layer, name] for name in (LATENT_FIELDS if latent else ("key", "value")))
    scales = fields.get((layer, "scale"))
    if scales is None:
        return ArenaAttentionLayer(keys, values)
    return (QuantisedLatentLayer if latent else QuantisedAttentionLayer)(keys, values, scales)


def _layer(
    arena: StageArena,
    layer: int,
    fields: Mapping[tuple[int, str], torch.Tensor],
    windows: dict[int, WindowTimeline],
) -> Any:
    """The cache layer for `layer`; the names of its fields in the arena's layout decide its class. `windows` holds the
    stage's window timelines by window length in tokens; a new length is added."""
    if (layer, WINDOW_FIELDS[0]) in fields:
        packed = (fields[layer, WINDOW_FIELDS[0]], fields[layer, WINDOW_FIELDS[1]])
        window, capacity = len(packed[0]) + 1, len(arena.windows[layer][0])
        timeline = windows.setdefault(window, WindowTimeline(window, capacity, arena.window_room.slack_tokens))
        return ArenaSlidingLayer(arena.windows[layer], packed, timeline)
    mine = {name: view for (index, name), view in fields.items() if index == layer}
    if not mine:
        return DummyLayer()
    attends = "key" in mine or LATENT_FIELDS[0] in mine
    states = {name: view.unsqueeze(0) for name, view in mine.items() if name.startswith(("conv_", "recurrent_"))}
    if attends and states:
        return ArenaHybridLayer(attention_layer(layer, fields), states)
    return attention_layer(layer, fields) if attends else ArenaLinearLayer(states)
