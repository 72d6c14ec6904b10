"""Captures a slot's state into a transfer, and restores a transfer into a slot."""

from __future__ import annotations

import numpy as np
import xxhash

from parkd.engine_adapter.llama_server.slots import Slot, SlotTable
from parkd.engine_adapter.llama_server.start import Upstream
from parkd.engine_adapter.llama_server.states import SlotFiles
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Checksums, Resume, StateSizes, Transfer

NO_BYTES_SUM = xxhash.xxh3_64_intdigest(b"")
SIZE_SPARE_BYTES = 64 * 1024
"""Reserved for a slot file in addition to its computed size."""


class SlotParking:
    """Runs on the engine's thread. The caller has checked that the server was not restarted."""

    def __init__(self, upstream: Upstream, files: SlotFiles) -> None:
        self._client = upstream.client
        self._facts = upstream.facts
        self._layout = upstream.info.layout
        self._files = files

    def sizes(self, slot: Slot) -> StateSizes:
        """The maximum size of the slot's file. Raises UpstreamFailed."""
        tokens = slot.position
        if not slot.is_exact:  # after an abandoned answer, the slot may hold more tokens
            states = {state.id: state.tokens for state in self._client.slots()}
            tokens = max(tokens, states.get(slot.id) or 0)
        return StateSizes(self._facts.base_bytes + tokens * self._facts.row_bytes + SIZE_SPARE_BYTES)

    def capture(self, slot: Slot, transfer: Transfer) -> Checksums:
        """Writes the slot's state to the transfer's file. Raises EngineFailure."""
        [stage] = transfer.stages
        [run] = stage.rows
        assert run.file is not None
        if slot.position != transfer.stop:
            raise EngineFailure("The llama-server lost the live conversation.")
        whole = self._layout.resume is Resume.AT_END
        checksum, size = self._files.save(slot, run.file.path, run.file.bytes, whole=whole)
        self._note_saved(slot, checksum)
        fixed = [[NO_BYTES_SUM]] * len(stage.fixed)
        return Checksums(
            np.array([[checksum]], dtype=np.uint64), np.array(fixed, dtype=np.uint64).reshape(len(fixed), 1), size
        )

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
