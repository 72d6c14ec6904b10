"""The live sequence in the context's memory: tokens go in, logits and state come out. Others (`ranges.py`) have cells
only while some of the live ones are moved.

    positions   pos_min ............ pos_max        (-1, -1) when it is empty
                |-- in memory ------------|-- position: where the next token goes

After each call that may move it, the position is read from the memory and not assumed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.llama_cpp.library import LlamaContext
from parkd.errors import EngineFailure
from parkd.state import Bytes
from parkd.types import TokenIds

SEQUENCE = 0
WHOLE = low.LLAMA_STATE_SEQ_FLAGS_NONE
PARTIAL = low.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
ABORTED = 2


class Sequence:
    """The context's memory, batch and logits."""

    def __init__(self, context: LlamaContext, batch_tokens: int) -> None:
        model = self._model = context.model
        self._context, self._memory = context.pointer, context.memory
        self._batch = low.llama_batch_init(batch_tokens, 0, 1)
        shape = (batch_tokens,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wants_logits = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        for place in range(batch_tokens):
            self._batch.seq_id[place][0] = SEQUENCE
        self._vocab_size = model.vocab_size
        self._logits_at = 0
        self._logits = np.empty(0, dtype=np.float32)

    @property
    def position(self) -> int:
        return int(low.llama_memory_seq_pos_max(self._memory, SEQUENCE)) + 1

    @property
    def first(self) -> int:
        """The earliest position in memory, in the layers that hold the fewest; -1 if the memory is empty."""
        return int(low.llama_memory_seq_pos_min(self._memory, SEQUENCE))

    def clear(self) -> None:
        low.llama_memory_clear(self._memory, False)

    def cut(self, position: int) -> bool:
        """Removes everything from `position` on. False if the library refuses, or the result is not as expected."""
        return self.remove(position) and self.position == position

    def decode(self, token_ids: TokenIds, start: int, *, is_cancelled: Callable[[], bool] | None = None) -> bool:
        """Computes tokens `[start, start + n)` in one batch; with logits if there is only one token.

        False if it was cancelled meanwhile; the memory then holds part of the batch. Raises EngineFailure.
        """
        count = len(token_ids)
        if count == 1:
            self._tokens[0], self._positions[0], self._wants_logits[0] = token_ids[0], start, 1
        else:
            self._tokens[:count] = token_ids
            self._positions[:count] = np.arange(start, start + count, dtype=np.int32)
            self._wants_logits[:count] = 0
        self._batch.n_tokens = count
        if is_cancelled is None:
            failed = low.llama_decode(self._context, self._batch)
        else:
            callback = low.ggml_abort_callback(lambda _data: is_cancelled())
            low.llama_set_abort_callback(self._context, callback, ctypes.c_void_p(0))
            try:
                failed = low.llama_decode(self._context, self._batch)
            finally:
                low.llama_set_abort_callback(self._context, low.ggml_abort_callback(0), ctypes.c_void_p(0))
        if failed == ABORTED:
            return False
        if failed or self.position != start + count:
            raise EngineFailure(
                f"llama.cpp could not compute {count} tokens from {start} on (code {failed}): "
                f"{self._model.last_words()}. Send the request again."
            )
        return True

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits `[vocab]` of the last token that was decoded alone; valid until the next `decode`."""
        pointer = low.llama_get_logits_ith(self._context, -1)
        if not pointer:
            raise EngineFailure("llama.cpp gave no logits. Send the request again.")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_at:  # the library may move its buffer, but rarely does
            self._logits_at, self._logits = address, np.ctypeslib.as_array(pointer, (self._vocab_size,))
        return self._logits

    def state_size(self, flags: int, number: int = SEQUENCE) -> int:
        """Bytes of the state of sequence `number`."""
        return int(low.llama_state_seq_get_size_ext(self._context, number, flags))

    def read_state(self, buffer: Bytes, flags: int, number: int = SEQUENCE) -> bool:
        """Writes the state into the buffer. False if it does not have exactly the buffer's length."""
        size = low.llama_state_seq_get_data_ext(self._context, _pointer(buffer), buffer.nbytes, number, flags)
        return int(size) == buffer.nbytes

    def write_state(
        self, buffer: Bytes, flags: int, number: int = SEQUENCE, *, on_cells: Callable[[], None] = lambda: None
    ) -> bool:
        """Sets the state from the buffer. False if the library does not take all of it; the memory is then invalid.
        `on_cells` may be called, on this thread, when the state has its cells and is still to be copied into them."""
        with self._model.at_cells(on_cells):
            size = low.llama_state_seq_set_data_ext(self._context, _pointer(buffer), buffer.nbytes, number, flags)
        return int(size) == buffer.nbytes

    def share(self, number: int, start: int, stop: int) -> None:
        """Gives the live cells of `[start, stop)` to sequence `number` as well, and recurrent state."""
        low.llama_memory_seq_cp(self._memory, SEQUENCE, number, start, stop)

    def adopt(self, number: int, start: int, stop: int) -> None:
        """Gives the cells of `[start, stop)` of sequence `number` to the live one as well."""
        low.llama_memory_seq_cp(self._memory, number, SEQUENCE, start, stop)

    def drop(self, number: int) -> None:
        """Takes everything from sequence `number`; what the live one shares with it stays."""
        low.llama_memory_seq_rm(self._memory, number, -1, -1)

    def remove(self, position: int) -> bool:
        """Removes everything from `position` on, whatever position is reported then. False if the library refuses."""
        return bool(low.llama_memory_seq_rm(self._memory, SEQUENCE, position, -1))

    def close(self) -> None:
        low.llama_batch_free(self._batch)


def _pointer(buffer: Bytes) -> Any:
    return ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
