"""Ranges of a conversation's cells as bytes of their own, moved through a second sequence.

    read     live  [..........................]     tag [start, stop) with the second sequence, write that
             range            [#####]               sequence's state, untag
    write    range            [#####]               set the second sequence's state, tag its cells as live, untag

The library has no call for a part of a sequence, but in unified memory a cell may belong to two sequences, and the
state of a sequence is what its cells hold. On cards several ranges are copied at once, each through a sequence of its
own, since the library waits for every copy it begins:

    engine's thread    | tag 1 | tag 2 | tag 3 | untag 1, tag 1 ...         all changes of cells, one after the other
    copying            :       [ range 1          ] [ range 4 ...
                       :               [ range 2           ] ...

What it writes (llama.cpp: `llama_kv_cache::state_write`, and those of the
memories that consist of several):

    | magic, sequence | streams, cells | cell, cell, ... | layer: type, size, keys ... | ... values ... | rest |
    |------- 8 -------|------- 8 ------|                                                               |
                                        position first: blocks are at fixed positions, so equal in all conversations

`rest` is what PARTIAL alone writes: windows and recurrent state, which are true at one position only. In a range it is
that of an empty sequence, so that the bytes of a range depend on its rows alone, and on their number:
`head_bytes + rows * row_bytes`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.errors import EngineFailure
from parkd.state import Bytes

RANGE = 1
"""The second sequence, and the first of those through which ranges are moved. They have no cells but during a move."""
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

    def holds(self, rows: Rows) -> bool:
        """Whether the state has the cells of these rows, in order."""
        count = rows.stop - rows.start
        written = int(rows.state[CELLS_AT - 4 : CELLS_AT].view(np.int32)[0])
        return written == count and np.array_equal(self._cells(rows)[:, 0], np.arange(rows.start, rows.stop))

    def name(self, rows: Rows) -> None:
        """Makes the state that of `RANGE`, so that its bytes do not tell through which sequence it was moved."""
        rows.state[NAME_BYTES - 4 : NAME_BYTES].view(np.int32)[0] = RANGE
        self._cells(rows)[:, -1] = RANGE

    def _cells(self, rows: Rows) -> npt.NDArray[np.int32]:
        """`[rows, cell_bytes / 4]`, in their order: position first, sequence last."""
        count = rows.stop - rows.start
        return rows.state[CELLS_AT : CELLS_AT + count * self.cell_bytes].view(np.int32).reshape(count, -1)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows `[start, stop)` of a conversation, and their bytes, `[form.bytes_of(stop - start)]`."""

    start: int
    stop: int
    state: Bytes


@dataclass(frozen=True, eq=False)
class _Moving:
    """Rows that are being copied through the sequence `tag`."""

    rows: Rows
    tag: int
    is_done: Future[bool]


class CellRanges:
    """Reads and writes ranges of the live sequence. For the engine's thread, which alone changes cells; up to `copies`
    threads copy for it.

    The library reads cells while it writes a state, and the engine's thread tags other cells meanwhile. That is
    harmless: what a read asks of a cell is whether it has that read's own sequence, which nobody changes meanwhile, and
    a state with other cells than were tagged is refused by its size or its positions.
    """

    def __init__(self, sequence: TokenSequence, form: RangeForm, copies: int = 1) -> None:
        """`copies` above one is for models whose state is rows alone, in a context of `1 + copies` sequences."""
        assert copies == 1 or not len(form.rest), "windows and recurrent state are there once"
        self.form = form
        self._sequence = sequence
        self._empty = np.concatenate((_name(sequence), form.rest))
        self._tags = range(RANGE, RANGE + copies)
        self._threads = ThreadPoolExecutor(copies, thread_name_prefix="parkd-copy") if copies > 1 else None

    def read(self, ranges: Iterable[Rows]) -> Iterator[Bytes]:
        """Writes rows into their bytes, and yields each when it is whole, in order. Raises EngineFailure if they are
        not all there, in order. Close it, or use it up: until then cells are tagged."""
        moving: deque[_Moving] = deque()
        try:
            for rows, tag in zip(ranges, cycle(self._tags), strict=False):
                if len(moving) == len(self._tags):
                    yield self._whole(moving.popleft())
                self._sequence.share(tag, rows.start, rows.stop)
                moving.append(_Moving(rows, tag, self._copy(partial(self._read, rows, tag))))
            while moving:
                yield self._whole(moving.popleft())
        finally:
            wait([each.is_done for each in moving])
            for each in moving:
                self._sequence.drop(each.tag)

    def write(self, ranges: Iterable[Rows]) -> Rows | None:
        """Adds rows to the live sequence, whose last row is that before the first of them; each follows the one before.
        Windows and recurrent state are not valid until they are set. Returns the rows that the library refuses; the
        memory is then invalid, as it is if `ranges` raises."""
        moving: deque[_Moving] = deque()
        try:
            for rows, tag in zip(ranges, cycle(self._tags), strict=False):
                if not self.form.holds(rows):
                    return rows
                if len(moving) == len(self._tags):
                    oldest = moving.popleft()
                    if not self._adopted(oldest):
                        return oldest.rows
                has_cells = threading.Event()  # at the latest when it is copied
                moving.append(_Moving(rows, tag, self._copy(partial(self._write, rows, tag, has_cells))))
                has_cells.wait()
            refused = next((each.rows for each in moving if not self._adopted(each)), None)
        finally:
            wait([each.is_done for each in moving])
        return refused

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _copy(self, call: Callable[[], bool]) -> Future[bool]:
        if self._threads is not None:
            return self._threads.submit(call)
        done: Future[bool] = Future()
        done.set_result(call())
        return done

    def _read(self, rows: Rows, tag: int) -> bool:
        """Whether the state had the size of these rows. The cells of `tag` are theirs."""
        sequence, form, buffer = self._sequence, self.form, rows.state
        if form.forgets:
            sequence.write_state(self._empty, PARTIAL, tag)
        size = sequence.state_size(WHOLE, tag) if len(form.rest) else buffer.nbytes
        if size == buffer.nbytes:
            return sequence.read_state(buffer, WHOLE, tag)
        # Some windows reach into the range, and they stand behind its rows.
        state = np.empty(size, dtype=np.uint8)
        is_whole = sequence.read_state(state, WHOLE, tag)
        rows_end = buffer.nbytes - len(form.rest)
        buffer[:rows_end] = state[:rows_end]
        buffer[rows_end:] = form.rest
        return is_whole and size > rows_end

    def _whole(self, moving: _Moving) -> Bytes:
        rows, form = moving.rows, self.form
        try:
            is_whole = moving.is_done.result()
        finally:
            self._sequence.drop(moving.tag)
        if not is_whole or not form.holds(rows):
            raise EngineFailure(
                f"llama.cpp does not hold the tokens {rows.start} to {rows.stop} in order: nothing is parked."
            )
        form.name(rows)
        return rows.state

    def _write(self, rows: Rows, tag: int, has_cells: threading.Event) -> bool:
        try:
            return self._sequence.write_state(rows.state, WHOLE, tag, on_cells=has_cells.set)
        finally:
            has_cells.set()

    def _adopted(self, moving: _Moving) -> bool:
        if not moving.is_done.result():
            return False
        self._sequence.adopt(moving.tag, moving.rows.start, moving.rows.stop)
        self._sequence.drop(moving.tag)
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
    parts = [Rows(start, stop, np.empty(form.bytes_of(stop - start), dtype=np.uint8)) for start, stop in places]
    try:
        for _ in ranges.read(parts):
            pass
    except EngineFailure:
        return False
    sequence.clear()
    if ranges.write(parts) is not None:
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
