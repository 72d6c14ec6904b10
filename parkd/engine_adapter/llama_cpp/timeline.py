"""The position of the sequence, and the positions to which it can return.

    full attention     cut anywhere                                 [0 .............. position]
    sliding windows    cut as far back as the windows still reach   [0 .. floor ..... position]   else a checkpoint
    recurrent layers   valid at the end                             [0 .............. position]   else a checkpoint

If the library refuses an operation, the sequence is left empty, which is a valid state.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from parkd.engine_adapter.base import Cancel
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.ranges import CellRanges
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Bytes, KeptStates
from parkd.types import TokenIds

_NOWHERE = -1
"""The position if no state was noted."""


class Timeline:
    """One sequence, its position and its checkpoints (partial states)."""

    def __init__(self, model: LlamaModel, sequence: TokenSequence, ctx_checkpoints: int) -> None:
        self._model = model
        self._sequence = self.sequence = sequence
        self.window = model.window_tokens
        self.has_fixed_state = model.is_recurrent or self.window > 0
        self.limit = ctx_checkpoints if self.has_fixed_state else 0
        """The most checkpoints."""
        self._kept: KeptStates[Bytes] = KeptStates(self.limit)
        self._before_batch: tuple[int, Bytes] = (_NOWHERE, np.empty(0, dtype=np.uint8))
        """The position before the current batch, and the partial state there."""
        self.position = 0
        """As the memory last reported it."""

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self._kept.positions

    @property
    def rewind_floor(self) -> int:
        if self._model.is_recurrent:
            return self.position
        if not self.window:
            return 0
        first = self._sequence.first
        return 0 if first <= 0 else min(self.position, first + self.window)

    def checkpoint(self) -> None:
        """Also arranges sliding windows as a restore would, so that going on gives the same bits either way. Raises
        EngineFailure."""
        if self.limit:
            self._kept.keep(self.position, lambda _: self._arranged() if self.window else self._partial())
        elif self.window and self.position:
            self._arranged()

    def held(self, position: int) -> Bytes:
        """The partial state of the checkpoint at `position`. Raises EngineFailure."""
        held = self._kept.get(position)
        if held is None:
            raise EngineFailure(f"The engine holds no checkpoint at {position}.")
        return held

    def partial_at(self, position: int) -> Bytes:
        """The partial state at `position`, which is a checkpoint or where it stands. Raises EngineFailure."""
        held = self._kept.get(position)
        return self._partial() if held is None and position == self.position else self.held(position)

    def last_words(self) -> str:
        """What the library said last."""
        return self._model.last_words()

    def reset(self) -> None:
        self._sequence.clear()
        self._kept.clear()
        self.position = 0

    def truncate(self, position: int) -> None:
        """Raises RestoreFailed if the library refuses a cut that should be possible; the sequence is then empty."""
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot keep {position} of {self.position} tokens")
        if position == self.position:
            return
        if position == 0:
            self.reset()
            return
        if position < self.rewind_floor:
            if position not in self._kept:
                raise ValueError(f"the state at {position} is not exact")
            self.set(self._kept.use(position), PARTIAL, position)
        self.cut(position)

    def set(self, state: Bytes, flags: int, position: int) -> None:
        """Raises RestoreFailed unless the library took the whole state and reports `position`; the sequence is then
        empty."""
        if not self._sequence.write_state(state, flags):
            self.reset()
            raise RestoreFailed(f"llama.cpp refused the state of {position} tokens: {self.last_words()}")
        self.stand_at(position)

    def keep(self, position: int, ranges: CellRanges) -> bool:
        """Keeps the rows `[0, position)`, to which others are then added: the state is not valid before that. False if
        the library refuses."""
        if position == 0:
            self.reset()
            return True
        self._kept.forget_beyond(position)
        return ranges.cut(position)

    def stand_at(self, position: int) -> None:
        """After rows were added up to `position`. Raises RestoreFailed if the library reports another one; the
        sequence is then empty."""
        reached = self._sequence.position
        if reached != position:
            self.reset()
            raise RestoreFailed(f"The state brought llama.cpp to {reached} tokens, not to {position}.")
        self.position = reached

    def cut(self, position: int) -> None:
        """Raises RestoreFailed; the sequence is then empty."""
        if not self._sequence.cut(position):
            self.reset()
            raise RestoreFailed(f"llama.cpp refused to cut its memory at {position} tokens.")
        self.position = position
        self._kept.forget_beyond(position)

    def decode(self, token_ids: TokenIds, cancel: Cancel | None) -> bool:
        """Computes tokens after the position. False if it was cancelled meanwhile. Then, and after an error, the state
        is valid at the position, which may be an earlier one. Raises EngineFailure."""
        start = self.position
        if cancel is not None and self._model.is_recurrent and start:
            self._note_start()
        else:
            self._before_batch = (_NOWHERE, self._before_batch[1])
        try:
            done = self._sequence.decode(token_ids, start, is_cancelled=None if cancel is None else cancel.is_set)
        except EngineFailure:
            self._settle(start)
            raise
        if done:
            self.position = start + len(token_ids)
        else:
            self._settle(start)
        return done

    def _partial(self) -> Bytes:
        held = np.empty(self._sequence.state_size(PARTIAL), dtype=np.uint8)
        if not self._sequence.read_state(held, PARTIAL):
            raise EngineFailure("llama.cpp wrote a partial state of another size than it announced.")
        return held

    def _arranged(self) -> Bytes:
        """The partial state, written back. Raises EngineFailure; the sequence is then empty.

        A window's cells are reused in a ring, and sums over them round by where they lie. Written back, they lie as
        after a restore.
        """
        held = self._partial()
        try:
            self.set(held, PARTIAL, self.position)
        except RestoreFailed as error:
            raise EngineFailure(f"{error.message.rstrip('.')}. Send the request again.") from error
        return held

    def _note_start(self) -> None:
        """Keeps the partial state before a batch, because a batch that is stopped has changed it in some layers."""
        size = self._sequence.state_size(PARTIAL)
        held = self._before_batch[1]
        if held.nbytes != size:
            held = np.empty(size, dtype=np.uint8)
        is_whole = self._sequence.read_state(held, PARTIAL)
        self._before_batch = (self.position if is_whole else _NOWHERE, held)

    def _settle(self, start: int) -> None:
        """After a batch that was not completed: returns to its beginning if possible, else to the last checkpoint."""
        if self._model.is_recurrent and self._before_batch[0] == start:
            self._go_back(self._before_batch[1], start)
            return
        if not self._model.is_recurrent and self._sequence.cut(start):
            self.position = start
            if start >= self.rewind_floor:
                return
        place = self._kept.last(start)
        if place == 0:
            self.reset()
        else:
            self._go_back(self.held(place), place)

    def _go_back(self, state: Bytes, position: int) -> None:
        with suppress(RestoreFailed):  # An empty sequence is valid.
            self.set(state, PARTIAL, position)
            self.cut(position)
