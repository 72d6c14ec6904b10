"""Captures a slot's state into a transfer, and restores a transfer into a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from parkd.engine_adapter.llama_server.slot_file import Ids
from parkd.engine_adapter.llama_server.slots import Slot, SlotTable
from parkd.engine_adapter.llama_server.start import Upstream
from parkd.engine_adapter.llama_server.states import SavedFile, SlotFiles
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Checksums, Resume, StateSizes, Transfer

NO_BYTES_SUM = xxhash.xxh3_64_intdigest(b"")
LOST = "The llama-server lost the live conversation."
SIZE_SPARE_BYTES = 64 * 1024
"""Reserved for a slot file in addition to its computed size."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A file that was saved to learn its size, until it is captured or let go."""

    slot: Slot
    ids: Ids
    """The slot's ids when it was saved: the file is theirs as long as the slot has the same array."""
    file: SavedFile


class SlotParking:
    """Runs on the engine's thread. The caller has checked that the server was not restarted.

    How many bytes a state has follows from its tokens only where every token leaves the same. Windows fill up, and a
    server may append its checkpoints, as many as it has taken. Such a state is saved first, and then the store makes
    room for what was written; until it has, one file at most lies beside the budget.
    """

    def __init__(self, upstream: Upstream, files: SlotFiles) -> None:
        self._client = upstream.client
        self._facts = upstream.facts
        self._layout = upstream.info.layout
        self._files = files
        self._is_computed = upstream.facts.is_linear
        self._waiting: _Waiting | None = None

    def learn_sizes(self) -> None:
        """Called when the server was started anew, perhaps with another KV type: what was measured of it is past."""
        self._is_computed = False

    def sizes(self, slot: Slot) -> StateSizes:
        """The size of the slot's file, or the most that it may have. Raises EngineFailure."""
        self.let_go()
        if not self._is_computed:
            saved = self._saved(slot)
            self._waiting = _Waiting(slot, slot.ids, saved)
            return StateSizes(saved.bytes)
        tokens = slot.position
        if not slot.is_exact:  # after an abandoned answer, the slot may hold more tokens
            states = {state.id: state.tokens for state in self._client.slots()}
            tokens = max(tokens, states.get(slot.id) or 0)
        return StateSizes(self._facts.base_bytes + tokens * self._facts.row_bytes + SIZE_SPARE_BYTES)

    def let_go(self) -> None:
        """Removes the file that was saved to learn its size, if nobody has taken it."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.file.remove()

    def capture(self, slot: Slot, transfer: Transfer) -> Checksums:
        """Writes the slot's state to the transfer's file. Raises EngineFailure."""
        [stage] = transfer.stages
        [run] = stage.rows
        assert run.file is not None
        if slot.position != transfer.stop:
            raise EngineFailure(LOST)
        waiting, self._waiting = self._waiting, None
        is_it = waiting is not None and waiting.slot is slot and waiting.ids is slot.ids
        if waiting is not None and not is_it:
            waiting.file.remove()
        saved = waiting.file if waiting is not None and is_it else self._saved(slot)
        try:
            if saved.bytes > run.file.bytes:
                self._is_computed = False
                raise EngineFailure(
                    f"The llama-server's slot file has {saved.bytes} bytes where {run.file.bytes} were expected. "
                    f"The next ones are saved before room is made for them."
                )
            self._files.move(saved, run.file.path)
        except BaseException:
            saved.remove()
            raise
        self._note_saved(slot, saved.checksum)
        fixed = [[NO_BYTES_SUM]] * len(stage.fixed)
        return Checksums(
            np.array([[saved.checksum]], dtype=np.uint64),
            np.array(fixed, dtype=np.uint64).reshape(len(fixed), 1),
            saved.bytes,
        )

    def _saved(self, slot: Slot) -> SavedFile:
        return self._files.save(slot, whole=self._layout.resume is Resume.AT_END)

    def check(self, transfer: Transfer) -> None:
        """Checks what can be checked without the server. Raises RestoreFailed."""
        if transfer.layout_digest != self._layout.digest or transfer.checksums is None:
            raise RestoreFailed("The parked state has another layout than this llama-server's slots.")

    def restore(self, table: SlotTable, transfer: Transfer) -> None:
        """Makes the state of a checked transfer live in the current slot, without a restore if a slot still holds it.
        Raises RestoreFailed, UpstreamFailed and OSError, after which the current slot's content is unknown."""
        assert transfer.checksums is not None
        [[run]] = (stage.rows for stage in transfer.stages)
        assert run.file is not None
        checksum, position = int(transfer.checksums[0, 0]), transfer.position
        slot = table.holding(checksum, self._client.slots)
        if slot is not None and (table.is_single or 2 * position >= slot.position):
            table.select(slot)  # the state is still there
        else:
            slot = table.take()
            slot.holds(self._files.restore(slot, run.file.path, checksum, transfer.stop))
            self._note_saved(slot, checksum)
        if position < slot.position:
            slot.holds(slot.ids[:position], exact=False)

    def _note_saved(self, slot: Slot, checksum: int) -> None:
        if slot.is_exact:
            states = {state.id: state.task for state in self._client.slots()}
            slot.saved, slot.task = checksum, states.get(slot.id)
