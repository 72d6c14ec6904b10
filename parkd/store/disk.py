"""The disk tier's accounts: which conversations are on disk, in which files, and what may be written or must go.

Touches no file: it hands out jobs (`disk_jobs.py`) and is told how they ended. Bytes are charged before a job is handed
out and credited when the files are gone, so that all files together never exceed the budget.

    conversation ──> manifest file          one per conversation
                 ──> extents                shared; each exists while a manifest, a write or a read needs it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from parkd.store.disk_jobs import MarkJob, RemoveJob, WriteJob
from parkd.store.disk_policy import Removable, next_removal
from parkd.store.disk_records import DiskConfig, DiskEntry, index_bytes_of, manifest_limit_bytes
from parkd.store.index import PrefixIndex
from parkd.store.manifest import (
    TEMPORARY_SUFFIX,
    DiskBlock,
    DiskCheckpoint,
    ExtentRef,
    Manifest,
)
from parkd.store.records import BlockId, CheckpointId, ConversationId, Parked


@dataclass(eq=False)
class _Extent:
    ref: ExtentRef
    holders: int = 0
    """Manifests, writes and reads that need it."""
    blocks: list[BlockId] = field(default_factory=list)
    checkpoints: list[CheckpointId] = field(default_factory=list)
    """Ids of its parts in the tables of `DiskTier`."""
    read_failures: int = 0


class DiskTier:
    """What is on disk, and what is charged for it."""

    def __init__(self, config: DiskConfig) -> None:
        self.config = config
        self.entries: dict[ConversationId, DiskEntry] = {}
        self.index = PrefixIndex()
        """Of conversations that the running model can use."""
        self.blocks: dict[BlockId, DiskBlock] = {}
        self.checkpoints: dict[CheckpointId, DiskCheckpoint] = {}
        """By the ids that the checkpoints have in memory."""
        self.index_bytes = 0
        self.evictions = 0
        self.on_moved: Callable[[ConversationId], None] = lambda _: None
        """Called with each conversation that is added or forgotten."""
        self._extents: dict[int, _Extent] = {}
        self._file_bytes = 0
        """Bytes of extents and manifests, including those being written and those not yet removed."""
        self._condemned: dict[str, int] = {}
        """Names of files to be removed, manifests first, and the bytes that each removal frees."""
        self._removing: RemoveJob | None = None
        self.on_forget: Callable[[DiskEntry], None] = lambda _entry: None

    @property
    def bytes_in_use(self) -> int:
        return self._file_bytes

    @property
    def extent_count(self) -> int:
        return len(self._extents)

    def extents(self) -> Iterator[tuple[ExtentRef, int]]:
        """Each extent, with the number of manifests, writes and reads that need it."""
        for extent in self._extents.values():
            yield extent.ref, extent.holders

    @property
    def condemned(self) -> Mapping[str, int]:
        """The names of files to be removed, and the bytes that each removal frees."""
        return MappingProxyType(dict(self._condemned))

    # What is there

    def add(self, manifest: Manifest, parked: Parked, manifest_bytes: int, *, is_foreign: bool = False) -> DiskEntry:
        """Adds a conversation whose files are written and charged."""
        entry = DiskEntry(parked, manifest, manifest_bytes, is_foreign)
        self.entries[manifest.id] = entry
        for ref in manifest.extents:
            self._hold(ref)
        if not is_foreign:
            self.index.add(parked.id, parked.key_digest, parked.prefix_hashes)
            for block in manifest.blocks:
                if self.blocks.setdefault(block.id, block) is block:
                    self._extents[block.extent].blocks.append(block.id)
        self.index_bytes += index_bytes_of(manifest)
        self.on_moved(manifest.id)
        return entry

    def know_checkpoint(self, checkpoint_id: CheckpointId, place: DiskCheckpoint) -> None:
        """Notes that a checkpoint in memory is the one at `place` on disk."""
        if checkpoint_id not in self.checkpoints and place.extent in self._extents:
            self.checkpoints[checkpoint_id] = place
            self._extents[place.extent].checkpoints.append(checkpoint_id)

    def forget(self, entry: DiskEntry) -> None:
        """Removes a conversation from the tables at once. Its files go with the next removal; those in use, later."""
        del self.entries[entry.manifest.id]
        self.on_moved(entry.manifest.id)
        if not entry.is_foreign:
            self.index.remove(entry.parked.id, entry.parked.key_digest, entry.parked.prefix_hashes)
        self.index_bytes -= index_bytes_of(entry.manifest)
        self._condemned = {entry.manifest.name: entry.manifest_bytes, **self._condemned}
        for ref in entry.manifest.extents:
            self._let_go(ref.id)
        self.on_forget(entry)

    def damaged(self, extent_id: int) -> list[DiskEntry]:
        """Forgets all conversations that need a damaged extent, and returns them."""
        going = [e for e in self.entries.values() if any(ref.id == extent_id for ref in e.manifest.extents)]
        for entry in going:
            self.forget(entry)
        extent = self._extents.get(extent_id)
        if extent is not None:
            self._unlist(extent)
        return going

    def failed_read(self, extent_id: int) -> int:
        """Counts a failed read of an extent. Returns how many there were."""
        extent = self._extents.get(extent_id)
        if extent is None:
            return 0
        extent.read_failures += 1
        return extent.read_failures

    def ref(self, extent_id: int) -> ExtentRef:
        return self._extents[extent_id].ref

    def hold(self, refs: Iterable[ExtentRef]) -> None:
        """Keeps extents that a write reuses, or a read needs, until `let_go`."""
        for ref in refs:
            self._hold(ref)

    def let_go(self, refs: Iterable[ExtentRef]) -> None:
        for ref in refs:
            self._let_go(ref.id)

    # Room

    def charge(self, size: int) -> None:
        assert self._file_bytes + size <= self.config.budget_bytes
        self._file_bytes += size

    def uncharge(self, size: int) -> None:
        """Credits room that was charged and is not needed."""
        self._file_bytes -= size

    def charge_found(self, size: int) -> None:
        """Charges files that were found at start, even if they exceed the budget."""
        self._file_bytes += size

    def make_room(self, size: int, index_bytes: int, used_before_s: float, superseded: set[ConversationId]) -> bool:
        """Forgets conversations until `size` and `index_bytes` fit once their files are removed. False, with nothing
        changed, if that is impossible."""
        going: list[DiskEntry] = []
        condemned = sum(self._condemned.values())
        removable = {
            e.manifest.id: Removable(
                e.manifest.id, e.parked.last_used_s, e.is_foreign, is_superseded=e.manifest.id in superseded
            )
            for e in self.entries.values()
            if not e.is_pinned and not e.readers
        }
        freed_index = 0
        holders = {extent.ref.id: extent.holders for extent in self._extents.values()}
        while (
            self._file_bytes - condemned + size > self.config.budget_bytes
            or self.index_bytes - freed_index + index_bytes > self.config.index_bytes
        ):
            chosen = next_removal(removable.values(), used_before_s)
            if chosen is None:
                return False
            del removable[chosen]
            entry = self.entries[chosen]
            going.append(entry)
            freed_index += index_bytes_of(entry.manifest)
            condemned += entry.manifest_bytes
            for ref in entry.manifest.extents:
                holders[ref.id] -= 1
                condemned += ref.taken_bytes if holders[ref.id] == 0 else 0
        for entry in going:
            self.forget(entry)
            self.evictions += entry.manifest.id not in superseded
        return True

    def has_room(self, size: int) -> bool:
        return self._file_bytes + size <= self.config.budget_bytes

    def marks(self, wall_shift_s: float, step_s: float) -> MarkJob | None:
        """A job that writes down last uses that are more than `step_s` later than those in the directory; None if there
        are none.

        `wall_shift_s` is added to the store's clock to get seconds since the epoch.
        """
        due = [e for e in self.entries.values() if e.parked.last_used_s > e.marked_s + step_s]
        for entry in due:
            entry.marked_s = entry.parked.last_used_s
        return MarkJob(tuple((e.manifest.name, e.parked.last_used_s + wall_shift_s) for e in due)) if due else None

    # Files that must go

    def next_removal_job(self) -> RemoveJob | None:
        if self._removing is not None or not self._condemned:
            return None
        self._removing = RemoveJob(tuple(self._condemned))
        return self._removing

    def removed(self, job: RemoveJob, left: Iterable[str]) -> None:
        """Ends a removal. Files that are `left` stay charged; the next start removes them."""
        stuck = set(left)
        stuck |= {name + TEMPORARY_SUFFIX for name in stuck}
        for name in job.names:
            size = self._condemned.pop(name)
            self._file_bytes -= 0 if name in stuck else size
        self._removing = None

    def condemn(self, names: Iterable[str], size: int) -> None:
        """Adds files to the next removal, which frees `size` bytes together."""
        for name in names:
            self._condemned.setdefault(name, 0)
            self._condemned[name] += size
            size = 0

    def write_failed(self, job: WriteJob, leftovers: tuple[str, ...]) -> None:
        """Condemns what a failed write may have left: each file with its own bytes, since each removal may fail. The
        manifest has one of two names."""
        extent_bytes = job.extent.taken_bytes if job.extent is not None else 0
        for name in leftovers:
            is_extent = job.extent is not None and name == job.extent.name
            is_temporary = name == job.temporary_name
            self.condemn((name,), extent_bytes if is_extent else manifest_limit_bytes(job.manifest) * is_temporary)

    @property
    def is_removing(self) -> bool:
        return self._removing is not None

    @property
    def has_removals(self) -> bool:
        """Whether files are being removed or are to be removed."""
        return bool(self._condemned)

    def prefixes_of(self, parked: Parked) -> Iterator[DiskEntry]:
        """Other conversations whose full blocks are the first of this one: they may be prefixes of it."""
        for conversation_id in self.index.ending_within(parked.key_digest, parked.prefix_hashes):
            if conversation_id != parked.id:
                yield self.entries[conversation_id]

    def _hold(self, ref: ExtentRef) -> None:
        extent = self._extents.get(ref.id)
        if extent is None:
            extent = self._extents[ref.id] = _Extent(ref)
        extent.holders += 1

    def _let_go(self, extent_id: int) -> None:
        extent = self._extents[extent_id]
        extent.holders -= 1
        if extent.holders == 0:
            self._unlist(extent)
            del self._extents[extent_id]
            self._condemned[extent.ref.name] = extent.ref.taken_bytes

    def _unlist(self, extent: _Extent) -> None:
        for block_id in extent.blocks:
            self.blocks.pop(block_id, None)
        for checkpoint_id in extent.checkpoints:
            self.checkpoints.pop(checkpoint_id, None)
        extent.blocks, extent.checkpoints = [], []
