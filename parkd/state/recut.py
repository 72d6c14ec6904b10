"""From the parts of one layer split to those of another: the same fields of the same layers, in other stages.

    there   stage 0: row  | key 0 | value 0 | key 1 | value 1 |
    here    stage 0: row  | key 0 | value 0 |     stage 1: row  | key 1 | value 1 |

Only where fields are differs between the two. Layers, dtypes, shapes and windows must be equal: then every byte of
every field is copied, and none is computed. Checksums are of whole parts, so those of the new parts are computed anew,
and never before the old ones were compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from parkd.state.fields import StateField
from parkd.state.layout import Grain, StateLayout
from parkd.state.moves import Bytes

Place = tuple[str, int | None]
"""A field's name, and its layer, unless all layers have the same value."""
Meaning = tuple[str, tuple[int, ...]]
"""A field's dtype and shape."""


class OtherState(ValueError):
    """The layouts describe states of which one cannot be made from the other. The message says what differs."""


@dataclass(frozen=True, slots=True)
class FieldCopy:
    """Adjacent fields of one stage that are adjacent in a stage of the other layout too."""

    old_stage: int
    old_offset: int
    new_stage: int
    new_offset: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Recut:
    """How rows and fixed state of `old` become those of `new`."""

    old: StateLayout
    new: StateLayout
    rows: tuple[FieldCopy, ...]
    fixed: tuple[FieldCopy, ...]

    @cached_property
    def is_same(self) -> bool:
        """The bytes of all stages are the same, whatever their checksums."""
        return [stage.digest for stage in self.old.stages] == [stage.digest for stage in self.new.stages]

    def add_rows(self, stage: int, part: Bytes, into: Sequence[Bytes]) -> None:
        """Copies what is in the rows of the old stage `stage`, `[rows * row_bytes]`, into the rows of the new stages.
        What no field covers is left as it is: the caller has zeroed it."""
        there = part.reshape(-1, self.old.stages[stage].row_bytes)
        for copy in self.rows:
            if copy.old_stage == stage:
                here = into[copy.new_stage].reshape(-1, self.new.stages[copy.new_stage].row_bytes)
                here[:, copy.new_offset : copy.new_offset + copy.size] = there[
                    :, copy.old_offset : copy.old_offset + copy.size
                ]

    def add_fixed(self, stage: int, part: Bytes, into: Sequence[Bytes]) -> None:
        """The same for the fixed state of one stage at one position, `[fixed_bytes]`."""
        for copy in self.fixed:
            if copy.old_stage == stage:
                there = part[copy.old_offset : copy.old_offset + copy.size]
                into[copy.new_stage][copy.new_offset : copy.new_offset + copy.size] = there


def recut_between(old: StateLayout, new: StateLayout) -> Recut:
    """Raises OtherState unless both describe the same layers with the same fields, so that only the split differs, and
    the checksum."""
    if old.grain is not Grain.ROWS or new.grain is not Grain.ROWS:
        raise OtherState("a state that only its engine can read cannot be cut for other stages")
    if any(stage.head_bytes for layout in (old, new) for stage in layout.stages):
        raise OtherState("its blocks have bytes beside their rows, which only its engine can read")
    if not _describes(old) or not _describes(new):
        raise OtherState("its engine does not tell where the fields of each layer are")
    ends = [(layout.stages[0].first_layer, layout.stages[-1].end_layer) for layout in (old, new)]
    if ends[0] != ends[1]:
        raise OtherState(
            f"it has layers {ends[0][0]} to {ends[0][1] - 1}, and here are {ends[1][0]} to {ends[1][1] - 1}"
        )
    return Recut(old, new, tuple(_copies(old, new, "rows")), tuple(_copies(old, new, "fixed")))


def _describes(layout: StateLayout) -> bool:
    return any(stage.row_fields or stage.fixed_fields for stage in layout.stages)


def _fields(layout: StateLayout, kind: str) -> Iterator[tuple[int, StateField]]:
    for number, stage in enumerate(layout.stages):
        for field in stage.row_fields if kind == "rows" else stage.fixed_fields:
            yield number, field


def _place(field: StateField) -> Place:
    return field.name, None if field.is_shared else field.layer


def _meaning(field: StateField) -> Meaning:
    return field.dtype_name, field.shape


def _copies(old: StateLayout, new: StateLayout, kind: str) -> Iterator[FieldCopy]:
    sources: dict[Place, tuple[int, StateField]] = {}
    for number, field in _fields(old, kind):
        known = sources.setdefault(_place(field), (number, field))
        if _meaning(known[1]) != _meaning(field) or (known[1] is not field and not field.is_shared):
            raise OtherState(f"it has two fields {field.name} of layer {field.layer}")
    wanted = {_place(field) for _, field in _fields(new, kind)}
    for name, layer in sources.keys() - wanted:
        raise OtherState(f"it has {name} of {_layer(layer)}, which is no state here")
    last: FieldCopy | None = None
    for number, field in _fields(new, kind):
        found = sources.get(_place(field))
        if found is None:
            raise OtherState(f"it lacks {field.name} of {_layer(_place(field)[1])}")
        stage, source = found
        if _meaning(source) != _meaning(field):
            raise OtherState(
                f"{field.name} of {_layer(_place(field)[1])} is {source.dtype_name} {source.shape} in it, and "
                f"{field.dtype_name} {field.shape} here"
            )
        copy = FieldCopy(stage, source.offset, number, field.offset, field.nbytes)
        joined = None if last is None else _joined(last, copy)
        if last is not None and joined is None:
            yield last
        last = joined or copy
    if last is not None:
        yield last


def _layer(layer: int | None) -> str:
    return "all layers" if layer is None else f"layer {layer}"


def _joined(first: FieldCopy, second: FieldCopy) -> FieldCopy | None:
    """Both as one copy, if they are adjacent in the same stages."""
    is_next = (
        (first.old_stage, first.new_stage) == (second.old_stage, second.new_stage)
        and first.old_offset + first.size == second.old_offset
        and first.new_offset + first.size == second.new_offset
    )
    if not is_next:
        return None
    return FieldCopy(first.old_stage, first.old_offset, first.new_stage, first.new_offset, first.size + second.size)
