"""The store of states that the engine itself writes to files. The store moves the files, never their bytes.

    begin_capture   after admission to memory, reserves room on disk and names a path      (engine writes the file)
    commit          published, and waits for its manifest    sync of the file, manifest, sync of the directory
    evicted         from memory: only its metadata goes; from disk: the file goes, and with it the conversation

After a crash, the next start removes files that no manifest names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from parkd.state import Checksums, StateFile
from parkd.store.budget import mib
from parkd.store.disk_policy import worth_writing
from parkd.store.disk_records import DiskEntry, file_bytes, index_limit_bytes
from parkd.store.history import History
from parkd.store.manifest import ExtentRef
from parkd.store.planning import CapturePlan
from parkd.store.records import Capture, CaptureRequest, ConversationId, Lease, Parked, RefusalReason, Refused
from parkd.store.segments import SegmentPool
from parkd.store.tiers import TieredStore


class FileStore(TieredStore):
    """`TieredStore` for layouts whose grain is FILE."""

    def __init__(self, *args: Any, path_of: Callable[[str], Path], **options: Any) -> None:
        """`path_of` returns the path of a file name in the directory. The rest is as for TieredStore."""
        super().__init__(*args, **options)
        self._path_of = path_of
        self._written: dict[int, ExtentRef] = {}
        """Files of open captures, at their largest possible size until the commit."""
        self.disk.on_forget = self._file_gone
        self.queue.on_lost = self._lost

    def begin_capture(self, request: CaptureRequest) -> Capture | Refused:
        if self._loading is not None:
            return super().begin_capture(request)
        assert request.sizes is not None
        ref = self.queue.new_extent(request.sizes.whole)
        file = StateFile(self._path_of(ref.name), ref.size)
        # No lineage: a file belongs to one conversation and is always written whole. Nothing is written twice: a state
        # that cannot be cut descends from a parked one only at its end, and then its id shows that it is parked.
        capture = super().begin_capture(replace(request, file=file, lineage=(), covered=0))
        if isinstance(capture, Capture):
            self.disk.charge(ref.taken_bytes)
            self._written[capture.serial] = ref
        return capture

    def commit(self, capture: Capture, checksums: Checksums) -> Parked:
        """As in RAM. Also raises ValueError if the file is empty or longer than was reserved."""
        reserved = self._written.get(capture.serial)
        if reserved is not None:
            if not 0 < checksums.file_bytes <= reserved.size:
                raise ValueError(f"a file of {checksums.file_bytes} bytes where {reserved.size} were reserved")
            ref = ExtentRef(reserved.id, checksums.file_bytes)
            self.disk.uncharge(reserved.taken_bytes - ref.taken_bytes)
            self._written[capture.serial] = ref
            blocks = self._shelf.blocks
            assert isinstance(blocks, SegmentPool)
            blocks.resize_file(self._captures[capture.serial].fresh_blocks[0], ref.size)
        return super().commit(capture, checksums)

    def abort(self, capture: Capture) -> None:
        ref = self._written.pop(capture.serial, None)
        if ref is not None:
            self.disk.condemn((ref.name,), ref.taken_bytes)
            self.queue.on_work()
        super().abort(capture)

    def lease(self, conversation_id: ConversationId, stop: int, start: int = 0) -> Lease:
        lease = super().lease(conversation_id, stop, start)
        entry = self.disk.entries.get(conversation_id)
        if entry is None:
            return lease
        entry.readers += 1  # keeps the file, too
        release = lease.release

        def let_go() -> None:
            entry.readers -= 1
            release()

        return Lease(lease.parked, start, stop, lease.transfer, lease.lineage, let_go)

    def _offer(self, capture: Capture, parked: Parked) -> None:
        self.queue.adopt(self._shelf.entries[parked.id], self._written.pop(capture.serial))

    def _file_on_disk(self, entry: DiskEntry) -> StateFile | None:
        [ref] = entry.manifest.extents
        return StateFile(self._path_of(ref.name), ref.size)

    def _reserve_elsewhere(self, plan: CapturePlan, history: History) -> Refused | None:
        """Reserves the room on disk that the file may take."""
        if self._loading is not None:
            return None
        request = plan.request
        assert request.file is not None
        disk, queue, size = self.disk, self.queue, file_bytes(request.file.bytes)
        queue.allowance.refill(self._clock())
        returned = history.turns > 1
        if not worth_writing(size, queue.allowance.left_bytes, queue.allowance.share, has_returned=returned):
            return Refused(RefusalReason.VALUE, "what may be written to disk today is nearly used up")
        if queue.is_paused:
            return Refused(RefusalReason.BUSY, "the disk failed a moment ago")
        index_bytes = index_limit_bytes(len(request.units), self.config.block_tokens)
        if not disk.make_room(size, index_bytes, self._clock(), set()):
            return Refused(RefusalReason.BUDGET, f"needs {mib(size)} on disk, of {mib(disk.config.budget_bytes)}")
        if not disk.has_room(size):
            queue.on_work()
            return Refused(RefusalReason.BUSY, f"needs {mib(size)} on disk, where files are being removed for it")
        return None

    def _file_gone(self, gone: DiskEntry) -> None:
        """Called when a conversation is removed from disk: drops what RAM still knows of it."""
        self._lost(gone.manifest.id)

    def _lost(self, conversation_id: ConversationId) -> None:
        entry = self._shelf.entries.get(conversation_id)
        if entry is not None:
            self._forget(entry, "dropped", "its file is gone")
