"""A model's own draft head: guesses the tokens after the next one, from the hidden state after the last one.

    row t of the head   is computed from   the hidden state after token t-1, and token t      and predicts token t+1

    tokens      0 ... t-1 | t             the model reads token t at position t;
    head        1 ... t-1 | t, t+1 ...    rows after t depend on guesses and are rewritten once the tokens are known

A head's row is stored beside the model's own row of the same token and depends on no later token, so it can be cut,
shared and parked with it. Row 0 has no hidden state before it: it is zero and never read. (Multi-token prediction:
DeepSeek-V3 technical report, section 2.2. Transformers' `MtpModel` counts row 0 at token 1; the values are the same.)

If a head has several layers, the first one is used for every guess: its hidden state is the input of the next guess.

The head runs on the last stage's device, where the hidden states that it reads are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import Cache

from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache import attention_layer
from parkd_engine.arenas.indexed_layers import IndexPositions, LayerIndex
from parkd_engine.arenas.placed import TokenPlace
from parkd_engine.arenas.step_history import StepHistory
from parkd_engine.draft.stream_head import SHARED
from parkd_engine.families.layer_state import INDEX_KEY, INDEX_POSITION
from parkd_engine.forward.attention import ATTENTION_NAME
from parkd_engine.forward.indexer import MakeBlocks, replace_indexers
from parkd_engine.forward.stages import MIXER, Stage, moved_twin
from parkd_engine.vision.chunks import NO_IMAGES, ChunkImages, PositionOffset

Choose = Callable[[torch.Tensor], int]
"""Takes the head's logits, float32 `[vocab]`, and returns the token to guess."""


class DraftCache(Cache):  # type: ignore[misc]
    """The transformers cache over the head's rows from token 1 on."""

    def __init__(self, layer: int, rows: Mapping[str, torch.Tensor], arena: StageArena) -> None:
        """`rows` maps field names to views of the arena rows that the head uses."""
        seen = {name: view[1:] for name, view in rows.items()}
        self.base = 0
        """The row of the arena at which this seat's begin."""
        self._layer: Any = attention_layer(layer, {(layer, name): view for name, view in seen.items()})
        super().__init__(layers=[self._layer])
        self._positions: IndexPositions | None = None
        self._index: LayerIndex | None = None
        if INDEX_KEY in seen:
            self._positions = IndexPositions(seen[INDEX_POSITION])
            size = arena.layout.index_block_tokens
            self._index = LayerIndex(seen[INDEX_KEY], arena.index_blocks[layer], self._positions, size)

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` of the arena from now on."""
        self.base = base
        self._layer.move_to(base)
        if self._positions is not None:
            self._positions.move_to(base)
        if self._index is not None:
            self._index.move_to(base)

    def begin(self, row: int, places: torch.Tensor) -> None:
        """Prepares to write from `row` on (at least 1) at the rotary positions `places`, `[..., 1, q]`."""
        self._layer.begin(row - 1)
        self.rows_changed_from(row)
        if self._positions is not None:
            # The model writes the same once it reads these tokens, but guesses come earlier.
            self._positions.position = row - 1
            self._positions.write(places.expand(3, 1, -1))

    def rows_changed_from(self, row: int) -> None:
        """Forgets what was derived from rows at and after `row`, which have changed or are about to."""
        if self._index is not None:
            self._index.forget_from(max(row - 1, 0))

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Writes index keys `[1, q, dim]`; returns the view of all index keys from token 1 on."""
        assert self._index is not None, "the layout has an index"
        return self._index.write(indexer_key_states, self._layer.position)

    def index_blocks(self, layer_idx: int, count: int, make: MakeBlocks) -> torch.Tensor:  # noqa: ARG002
        """Keys of the first `count` blocks of the index, `[count, dim]`; `make` computes the missing ones."""
        assert self._index is not None, "the layout has an index"
        return self._index.blocks(count, make)

    def record(self, place: TokenPlace | None) -> None:
        """Makes forward passes write rows at `place`, on the device; None: at the row of `begin`."""
        self._layer.place = place

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return int(self._layer.position)

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return int(self._layer.position)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return int(self._layer.position) + query_length, 0


class DraftHead:
    """The draft head, with its state in the last stage's arena, whose layout names the fields."""

    def __init__(
        self, head: Any, stages: Sequence[Stage], arena: StageArena, history: StepHistory, offset: PositionOffset
    ) -> None:
        """`head` is transformers' `MtpModel` or a `StreamHead`; modules that it shares with the model come from the
        stages. `offset` is the timeline's: images before a guess shift its rotary position."""
        last = stages[-1]
        self._first, self._stage = stages[0], last
        self._history = history
        self._offset = offset
        head.config._attn_implementation = ATTENTION_NAME
        self.model: Any = bare_head(head, last.device)
        replace_indexers(self.model)
        self._mixer: nn.Module = getattr(self.model, MIXER, nn.Identity())
        layer = last.num_layers
        rows = {field.name: arena.field_view(field) for field in arena.layout.row_fields if field.layer == layer}
        self._all_hidden_rows = self._hidden_rows = rows.pop("hidden", None)
        self._all_parts = self._parts = tuple(rows.values())
        self.has_neighbours = arena.has_neighbours
        rows |= {f.name: arena.field_view(f) for f in arena.layout.row_fields if f.name == INDEX_POSITION}
        self._cache = DraftCache(layer, rows, arena)
        self._hidden = next((arena.fixed_view(f) for f in arena.layout.fixed_fields if f.name == "hidden"), None)
        self._layer = layer

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` of the arena from now on."""
        self._cache.move_to(base)
        self._parts = tuple(part[base:] for part in self._all_parts)
        if self._all_hidden_rows is not None:
            self._hidden_rows = self._all_hidden_rows[base:]

    @property
    def device(self) -> torch.device:
        return self._stage.device

    @property
    def output(self) -> nn.Module | None:
        """The model's own output head: hidden states to logits."""
        return self._stage.head

    @property
    def can_be_recorded(self) -> bool:
        """Whether the hidden state for the next row has a fixed address, whatever the position."""
        return self._hidden is not None

    @property
    def kept_hidden(self) -> torch.Tensor:
        """The hidden state after the last token, `[hidden]`. Only if `can_be_recorded`."""
        assert self._hidden is not None, "every row has its own"
        return self._hidden

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Embeddings `[1, q, hidden]` on the head's device."""
        return self._first.embed(np.array(token_ids, dtype=np.int64)).to(self._stage.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits float32 `[vocab]` after the last of the head's hidden states `[1, q, hidden]`."""
        return self._stage.scores(self._mixer(hidden))[-1]

    def read(
        self,
        token_ids: npt.NDArray[np.int64],
        position: int,
        hidden: torch.Tensor,
        images: ChunkImages = NO_IMAGES,
    ) -> None:
        """Writes the head's rows of the tokens `[position, position + q)`, whose hidden states `[1, q, hidden]` the
        model has just computed, and keeps the hidden state for the next row. `images` are those of the chunk."""
        known, embedded = hidden[:, :-1], self._first.embed(token_ids, images.rows).to(self._stage.device)
        if position > 0:
            known = torch.cat([self._behind(position), known], dim=1)
        else:
            for part in self._parts:
                part[0].zero_()
            embedded = embedded[:, 1:]
        if embedded.shape[1]:
            self._forward(embedded, max(position, 1), known, images)
        self._keep(position, hidden[0])

    def guess(self, token_id: int, position: int, count: int, choose: Choose) -> list[int]:
        """Returns `count` guesses of the tokens after `token_id` at `position`. Writes rows from `position` on.

        Returns none at position 0, where there is no hidden state to guess from.
        """
        guesses: list[int] = []
        if position == 0:
            return guesses
        hidden, token = self._behind(position), token_id
        for row in range(position, position + count):
            hidden = self._forward(self.embed([token]), row, hidden, self._offset.plain(row, row + 1))
            token = choose(self.logits(hidden))
            guesses.append(token)
        return guesses

    def rows_changed_from(self, position: int) -> None:
        """Forgets what was derived from rows at and after `position`, which were written elsewhere."""
        self._cache.rows_changed_from(position)

    def ready(self, position: int, turn: int, place: TokenPlace) -> None:
        """Prepares a replay over `place` for tokens from `position` on, which must not be 0."""
        place.put(position - 1, turn, self._cache.base)  # The cache's first row is token 1's.

    def read_placed(self, embedded: torch.Tensor, hidden: torch.Tensor, place: TokenPlace) -> None:
        """`read` for embeddings and hidden states `[1, q, hidden]`, with rows written at `place`."""
        self.placed(embedded, torch.cat([self.kept_hidden.view(1, 1, -1), hidden[:, :-1]], dim=1), place)
        self._keep(0, hidden[0])

    def placed(self, embedded: torch.Tensor, hidden: torch.Tensor, place: TokenPlace) -> torch.Tensor:
        """Returns the head's hidden states `[1, q, hidden]` for tokens with these embeddings and the hidden states
        after the tokens before them. Writes their rows at `place`."""
        self._cache.record(place)
        try:
            output: torch.Tensor = self.model.forward_layer(
                0, hidden, place.turn[None], self._cache, inputs_embeds=embedded
            )
        finally:
            self._cache.record(None)
        return output

    def _forward(self, embedded: torch.Tensor, row: int, hidden: torch.Tensor, images: ChunkImages) -> torch.Tensor:
        # A row has its token's rotary position in the model, so image tokens are placed by row and column here too.
        if images.position_ids is None:
            places = torch.arange(row, row + embedded.shape[1], device=self._stage.device)[None]
        else:
            places = images.position_ids[..., -embedded.shape[1] :].to(self._stage.device)
        self._cache.begin(row, places)
        output: torch.Tensor = self.model.forward_layer(0, hidden, places, self._cache, inputs_embeds=embedded)
        return output

    def _behind(self, position: int) -> torch.Tensor:
        """The hidden state after the token before `position`, `[1, 1, hidden]`."""
        kept = self._hidden if self._hidden_rows is None else self._hidden_rows[position - 1]
        assert kept is not None, "the layout has one or the other"
        return kept.view(1, 1, -1)

    def _keep(self, position: int, hidden: torch.Tensor) -> None:
        if self._hidden_rows is not None:
            self._hidden_rows[position : position + len(hidden)] = hidden
            return
        assert self._hidden is not None, "the layout has one or the other"
        for index in range(len(hidden)) if self._history.is_recording else (len(hidden) - 1,):
            self._hidden.copy_(hidden[index])
            if self._history.is_recording:
                self._history.note(self._layer, index)


def bare_head(head: Any, device: torch.device) -> nn.Module:
    """The head on `device`, without the modules it shares with the model, which may be on other devices."""
    shared = {name: head._modules[name] for name in SHARED}
    head._modules.update(dict.fromkeys(shared))
    try:
        return moved_twin(head, device)
    finally:
        head._modules.update(shared)
