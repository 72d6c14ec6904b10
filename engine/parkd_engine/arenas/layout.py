"""Layout of a stage's state: what is stored per token, what is stored once, and at which offset.

A row holds the bytes of one token in one stage: all fields of all the stage's layers, one after the other.

    row t   | key 0 | value 0 | key 1 | value 1 | ... | padding to ROW_ALIGNMENT |

The fixed state does not grow with the number of tokens. It holds recurrent and convolution states, and the last
`window - 1` tokens of layers with sliding-window attention.

    fixed   | conv 0 | recurrent 0 | ... | window keys 2 | window values 2 | ...

A draft head (`parkd_engine.draft.head`) adds a layer after the model's last one, in the last stage.

The kind of a layer determines its fields (`parkd_engine.families.layer_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from parkd.errors import UnsupportedModel
from parkd.state import StageLayout, StateField, stage_digest
from parkd_engine.arenas.kv_format import is_quantised
from parkd_engine.families.layer_shapes import layer_kinds
from parkd_engine.families.layer_state import (
    INDEX_KEY,
    LAYER_KINDS,
    WINDOW_FIELDS,
    FieldSpec,
    LayerState,
    StateTypes,
    draft_layers,
    draft_state,
)
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.records import vision_of

ROW_ALIGNMENT = 16
"""Bytes. Every field of every row starts at a multiple of it, since flash kernels load 16 bytes at a time."""
OFFSET_FIELD = "position_offset"
"""One number in the first stage of models whose rotary positions can differ from the token count."""


class Field(StateField):
    """A field of the state, as a tensor of torch."""

    __slots__ = ()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype


@dataclass(frozen=True, slots=True)
class StageStateLayout(StageLayout):
    """The fields that make up a stage's bytes. Two layouts with equal digests hold interchangeable bytes; the digest is
    over the layer range and over name, layer, dtype, shape and offset of every field. `row_bytes` is a multiple of
    16."""

    row_fields: tuple[Field, ...] = ()
    fixed_fields: tuple[Field, ...] = ()
    index_block_tokens: int = 0
    """Rows per block of the sparse attention index; 0 without an index."""

    @property
    def index_bytes_a_token(self) -> float:
        """Bytes of the live index per token. The index is computed from the rows and is not part of them."""
        fields = [field for field in self.row_fields if field.name == INDEX_KEY]
        return sum(field.nbytes for field in fields) / self.index_block_tokens if fields else 0.0

    def index_bytes(self, context_tokens: int) -> int:
        """Bytes of the live index for `context_tokens` rows, in whole blocks."""
        if not self.index_block_tokens:
            return 0
        whole = context_tokens // self.index_block_tokens * self.index_block_tokens
        return round(whole * self.index_bytes_a_token)

    @property
    def step_fields(self) -> tuple[Field, ...]:
        """The fixed fields that every token of a step changes, and that going back to an earlier one restores. Leaves
        out windows, which still hold the tokens before the step, and the position offset, which only images change."""
        return tuple(field for field in self.fixed_fields if field.name not in (*WINDOW_FIELDS, OFFSET_FIELD))

    @property
    def window_fields(self) -> tuple[Field, ...]:
        """The fixed fields that hold the last tokens of sliding-window layers."""
        return tuple(field for field in self.fixed_fields if field.name in WINDOW_FIELDS)

    def window_bytes(self, spare_tokens: int) -> int:
        """Bytes of the live windows, each with room for `spare_tokens` more tokens."""
        return sum(
            field.nbytes + spare_tokens * prod(field.shape[1:]) * field.dtype.itemsize for field in self.window_fields
        )


def build_layout(
    config: Any,
    stage_ranges: Sequence[tuple[int, int]],
    kv_dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> tuple[StageStateLayout, ...]:
    """One layout per stage; stage `i` holds the layers `[first, end)` of `stage_ranges[i]`.

    `compute_dtype` None means `kv_dtype`. A row is never empty: a stage without per-token state has rows of
    `ROW_ALIGNMENT` bytes, so that it is counted and copied like any other. Raises UnsupportedModel for a layer kind
    whose keys and values cannot be stored in `kv_dtype`, and KeyError for a kind that is not in `LAYER_KINDS`, which
    `architectures.check_config` refuses first.
    """
    vision, config = vision_of(config), language_config(config)
    kinds = layer_kinds(config)
    types = StateTypes(kv_dtype, compute_dtype or kv_dtype)
    layers = int(config.num_hidden_layers)
    known: dict[int, LayerState] = {}
    for layer in sorted({layer for first, end in stage_ranges for layer in range(first, end)}):
        known[layer] = LAYER_KINDS[kinds[layer]].state(config, layer, types)
        _check_format(kinds[layer], known[layer])
    layouts = []
    for first, end in stage_ranges:
        states = [(layer, known[layer]) for layer in range(first, end)]
        if draft_layers(config) and end == layers:
            states.append((layers, draft_state(config, layers, types)))
        once = [(layer, spec) for layer, state in states for spec in state.row_once]
        first_of = {spec.name: (layer, spec) for layer, spec in reversed(once)}
        specs = [(layer, spec) for layer, state in states for spec in state.row]
        row_fields, row_bytes = _place(specs, tuple(first_of.values()))
        row_bytes = max(row_bytes, ROW_ALIGNMENT)
        fixed = [(layer, spec) for layer, state in states for spec in state.fixed]
        if vision is not None and vision.by_grid and first == 0:
            fixed.append((0, FieldSpec(OFFSET_FIELD, torch.int64, (1,))))
        fixed_fields, fixed_bytes = _place(fixed)
        digest = stage_digest(first, end, row_fields, fixed_fields)
        block_tokens = config.indexer_compress_ratio if any(spec.name == INDEX_KEY for _, spec in specs) else 0
        layouts.append(
            StageStateLayout(first, end, row_bytes, fixed_bytes, digest, row_fields, fixed_fields, block_tokens)
        )
    return tuple(layouts)


def _check_format(kind: str, state: LayerState) -> None:
    """Refuses quantised fields in a layer that has no scales: its values would be cut to integers."""
    specs = (*state.row, *state.fixed)
    if any(is_quantised(spec.dtype) for spec in specs) and not any(spec.name == "scale" for spec in specs):
        raise UnsupportedModel(
            f"layers of kind {kind} cannot store keys and values as int8; choose another --kv-cache-dtype"
        )


def _place(
    specs: Sequence[tuple[int, FieldSpec]], shared: Sequence[tuple[int, FieldSpec]] = ()
) -> tuple[tuple[Field, ...], int]:
    """Places the fields one after the other, aligned, and then those that are `shared` by all layers; returns them and
    their total bytes, aligned too."""
    offset = 0
    fields = []
    for number, (layer, spec) in enumerate([*specs, *shared]):
        dtype_name = str(spec.dtype).removeprefix("torch.")
        placed = Field(spec.name, layer, dtype_name, spec.shape, offset, number >= len(specs))
        fields.append(placed)
        offset += -(-placed.nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return tuple(fields), offset
