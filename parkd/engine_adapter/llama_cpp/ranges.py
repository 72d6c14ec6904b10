"""Ranges of a conversation's cells as bytes of their own, moved through a second sequence.

    read     live  [..........................]     tag [start, stop) with the second sequence, write that
             range            [#####]               sequence's state, untag
    write    range            [#####]               set the second sequence's state, tag its cells as live, untag

The library has no call for a part of a sequence, but in unified memory a cell may belong to two sequences, and the
state of a sequence is what its cells hold. What it writes (llama.cpp: `llama_kv_cache::state_write`, and those of the
memories that consist of several):

    | magic, sequence | streams, cells | cell, cell, ... | layer: type, size, keys ... | ... values ... | rest |
    |------- 8 -------|------- 8 ------|                                                               |
                                        position first: blocks are at fixed positions, so equal in all conversations

`rest` is what PARTIAL alone writes: windows and recurrent state, which are true at one position only. In a range it is
that of an empty sequence, so that the bytes of a range depend on its rows alone, and on their number:
`head_bytes + rows * row_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.errors import EngineFailure
from parkd.state import Bytes

RANGE = 1
"""The second sequence. It has no cells but during a move."""
NAME_BYTES = 8
"""Magic and sequence, in front of every state."""
CELLS_AT = 16
"""Where the cells begin: after the number of streams and of cells."""
CELL_KINDS = (12, 24)
"""Bytes of a cell: position, number of sequences, sequence; with more coordinates where positions have several."""
PROBE_TOKENS = 24
PROBE_CUT = 16


@dataclass(frozen=True, eq=False)
class RangeForm:
    """How this model's ranges are written."""

    head_bytes: int
    row_bytes: int
    cell_bytes: int
    """Of each row: its cell, beside keys and values."""
    values_apart: bool
    """The values of one row are not adjacent, as without flash attention: a copy moves a single number of each row."""
    key_bytes: int
    """Of each row: the keys of the first layer, which one copy moves for all rows of a block."""
    rest: Bytes
    """What PARTIAL writes of an empty sequence, without the name; empty if nothing is apart from the rows."""
    forgets: bool
    """Setting that empty state takes recurrent state off a sequence."""

    def bytes_of(self, rows: int) -> int:
        return self.head_bytes + rows * self.row_bytes

    def positions(self, state: Bytes, rows: int) -> npt.NDArray[np.int32]:
        """`[rows]` int32, in the order of the cells."""
        cells = state[CELLS_AT : CELLS_AT + rows * self.cell_bytes]
        return cells.view(np.int32).reshape(rows, -1)[:, 0]


class CellRanges:
    """Reads and writes ranges of the live sequence. For the engine's thread."""

    def __init__(self, sequence: TokenSequence, form: RangeForm) -> None:
        self.form = form
        self._sequence = sequence
        self._empty = np.concatenate((_name(sequence), form.rest))

    def read(self, start: int, stop: int, buffer: Bytes) -> None:
        """Writes the rows `[start, stop)` into `buffer`, `[form.bytes_of(stop - start)]`. Raises EngineFailure if they
        are not all there, in order."""
        sequence, form, rows = self._sequence, self.form, stop - start
        sequence.share(RANGE, start, stop)
        try:
            if form.forgets:
                sequence.write_state(self._empty, PARTIAL, RANGE)
            size = sequence.state_size(WHOLE, RANGE) if len(form.rest) else buffer.nbytes
            if size == buffer.nbytes:
                is_whole = sequence.read_state(buffer, WHOLE, RANGE)
            else:  # Some windows reach into the range, and they stand behind its rows.
                state = np.empty(size, dtype=np.uint8)
                is_whole = sequence.read_state(state, WHOLE, RANGE)
                rows_end = buffer.nbytes - len(form.rest)
                is_whole = is_whole and size > rows_end
                buffer[:rows_end] = state[:rows_end]
                buffer[rows_end:] = form.rest
        finally:
            sequence.drop(RANGE)
        expected = np.arange(start, stop, dtype=np.int32)
        if not is_whole or not np.array_equal(form.positions(buffer, rows), expected):
            raise EngineFailure(f"llama.cpp does not hold the tokens {start} to {stop} in order: nothing is parked.")

    def write(self, start: int, stop: int, buffer: Bytes) -> bool:
        """Adds the rows `[start, stop)` to the live sequence, whose last row is `start - 1`. Windows and recurrent
        state are not valid until they are set. False if the library refuses; the memory is then invalid."""
        sequence = self._sequence
        rows = stop - start
        cells = int(buffer[CELLS_AT - 4 : CELLS_AT].view(np.int32)[0])
        if cells != rows or not np.array_equal(self.form.positions(buffer, rows), np.arange(start, stop)):
            return False
        if not sequence.write_state(buffer, WHOLE, RANGE):
            return False
        sequence.adopt(RANGE, start, stop)
        sequence.drop(RANGE)
        return True

    def cut(self, position: int) -> bool:
        """Removes the rows from `position` on. Windows and recurrent state are not valid until they are set."""
        if self.form.forgets:
            self._sequence.write_state(self._empty, PARTIAL)
        return self._sequence.remove(position)


def probe(sequence: TokenSequence, *, is_recurrent: bool) -> RangeForm | None:
    """The form of this model's ranges, from a few tokens that are read for it; None if its state is not the sum of
    ranges and a partial state, which is tried: both are taken, set in an empty memory, and the whole compared."""
    whole = _state(sequence, WHOLE)
    partial = _state(sequence, PARTIAL)
    empty = _state(sequence, PARTIAL, RANGE)
    has_rest = len(partial) != len(whole)
    if has_rest and not np.array_equal(whole[len(whole) - len(partial) + NAME_BYTES :], partial[NAME_BYTES:]):
        return None
    rest = empty[NAME_BYTES:] if has_rest else empty[:0]
    sizes = [_range_bytes(sequence, rows, rest) for rows in (PROBE_CUT, PROBE_TOKENS)]
    row_bytes, left = divmod(sizes[1] - sizes[0], PROBE_TOKENS - PROBE_CUT)
    cell_bytes = next((size for size in CELL_KINDS if _has_cells(whole, size)), None)
    if left or row_bytes < 1 or cell_bytes is None:
        return None
    head_bytes = sizes[0] - PROBE_CUT * row_bytes
    # | values apart, layers | type, bytes of the keys of a row |
    layers = whole[CELLS_AT + PROBE_TOKENS * cell_bytes :]
    values_apart, key_bytes = bool(layers[:4].view(np.int32)[0]), int(layers[12:20].view(np.int64)[0])
    form = RangeForm(head_bytes, row_bytes, cell_bytes, values_apart, key_bytes, rest, has_rest and is_recurrent)
    return form if _comes_back(sequence, form, whole, partial if has_rest else None) else None


def _comes_back(sequence: TokenSequence, form: RangeForm, whole: Bytes, partial: Bytes | None) -> bool:
    ranges, places = CellRanges(sequence, form), ((0, PROBE_CUT), (PROBE_CUT, PROBE_TOKENS))
    parts = [np.empty(form.bytes_of(stop - start), dtype=np.uint8) for start, stop in places]
    try:
        for (start, stop), part in zip(places, parts, strict=True):
            ranges.read(start, stop, part)
    except EngineFailure:
        return False
    sequence.clear()
    if not all(ranges.write(start, stop, part) for (start, stop), part in zip(places, parts, strict=True)):
        return False
    if partial is not None and not sequence.write_state(partial, PARTIAL):
        return False
    return np.array_equal(_state(sequence, WHOLE), whole)


def _state(sequence: TokenSequence, flags: int, number: int = 0) -> Bytes:
    state = np.empty(sequence.state_size(flags, number), dtype=np.uint8)
    sequence.read_state(state, flags, number)
    return state


def _name(sequence: TokenSequence) -> Bytes:
    return _state(sequence, WHOLE, RANGE)[:NAME_BYTES]


def _range_bytes(sequence: TokenSequence, rows: int, rest: Bytes) -> int:
    """Bytes of the first rows with an empty rest."""
    sequence.share(RANGE, 0, rows)
    whole = sequence.state_size(WHOLE, RANGE)
    its_rest = sequence.state_size(PARTIAL, RANGE) - NAME_BYTES if len(rest) else 0
    sequence.drop(RANGE)
    return whole - its_rest + len(rest)


def _has_cells(whole: Bytes, cell_bytes: int) -> bool:
    cells = whole[CELLS_AT : CELLS_AT + PROBE_TOKENS * cell_bytes].view(np.int32).reshape(PROBE_TOKENS, -1)
    return np.array_equal(cells[:, 0], np.arange(PROBE_TOKENS)) and bool((cells[:, 1] == 1).all())
