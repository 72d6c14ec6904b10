"""The files on disk: what is charged for them, who needs them, and which must go.

Touches no file: it hands out jobs (`disk_jobs.py`) and is told how they ended. Bytes are charged before a job is handed
out and credited when the files are gone, so that all files together never exceed the budget.

    conversation ──> manifest file          one per conversation
                 ──> extents                shared; each exists while a manifest, a write or a read needs it
                       └─> places on disk of blocks and checkpoints, which live as long as their extent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from parkd.state import Recut, StateFile
from parkd.store.blocks import BlockTable
from parkd.store.budget import BLOCK_BYTES, conversation_metadata_bytes
from parkd.store.checkpoints import CheckpointTable
from parkd.store.disk_policy import WriteAllowance
from parkd.store.files.disk_jobs import DamagedPart, ReadJob, RemoveJob, WriteJob
from parkd.store.files.fs import GRAIN_BYTES
from parkd.store.files.manifest import TEMPORARY_SUFFIX, ExtentRef, Manifest, encoded_bytes
from parkd.store.records import BlockId, CheckpointId, DiskConfig
from parkd.store.slabs import round_up

READ_FAILURES = 2
"""Failed reads of a file before what it holds is given up."""


@dataclass(frozen=True)
class DiskSetup:
    """What a store needs to keep conversations on disk."""

    config: DiskConfig
    allowance: WriteAllowance
    wall: Callable[[], float]
    """Seconds since the epoch."""
    new_extent: Callable[[], int]
    """Returns a 64-bit number that no process has used in the directory."""
    first_block: BlockId = 1
    """Block ids count up from here; none of them was ever used in the directory."""
    path_of: Callable[[str], Path] = Path
    """The path of a file by its name; only states that stay in files need it."""


NO_DISK = DiskSetup(DiskConfig(0, bytes(16), 0, 0), WriteAllowance(0, 0.0, 0.0), lambda: 0.0, lambda: 0)
"""For a store in RAM alone."""


@dataclass(eq=False)
class OnDisk:
    """A conversation's place on disk: its files."""

    name: str
    """Of its manifest."""
    extents: tuple[ExtentRef, ...]
    manifest_bytes: int
    index_bytes: int
    """Memory for what describes it."""
    is_foreign: bool = False
    """It is of other weights, or of a layout that nobody describes: what it names is in no table."""
    recut: Recut | None = None
    """It is of another layer split: how its parts become those of this one when they are read. What it names is in no
    table either, since its parts are others than those here."""
    readers: int = 0
    """Reads and restores under way, which keep its files."""
    marked_s: float = float("-inf")
    """The last use that is written down in the directory, by the store's clock."""


@dataclass(eq=False)
class _Extent:
    ref: ExtentRef
    holders: int = 0
    """Manifests, writes and reads that need it."""
    blocks: dict[BlockId, BlockId] = field(default_factory=dict)
    """The blocks that have their place in it: ids in the table by ids in the file."""
    checkpoints: dict[int, CheckpointId] = field(default_factory=dict)
    """The same for checkpoints, by position."""
    read_failures: int = 0


class Disk:
    """The files, and what is charged for them."""

    def __init__(self, setup: DiskSetup, blocks: BlockTable, checkpoints: CheckpointTable) -> None:
        self.setup = setup
        self.config = setup.config
        self.index_bytes = 0
        self.evictions = 0
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._extents: dict[int, _Extent] = {}
        self._file_bytes = 0
        """Bytes of extents and manifests, including those being written and those not yet removed."""
        self._condemned: dict[str, int] = {}
        """Names of files to be removed, manifests first, and the bytes that each removal frees."""
        self._removing: RemoveJob | None = None

    @property
    def is_there(self) -> bool:
        return self.setup is not NO_DISK

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

    # Files that are there

    def add(self, manifest: Manifest, manifest_bytes: int, *, is_foreign: bool = False) -> OnDisk:
        """Holds the files of a conversation, which are written and charged."""
        self.hold(manifest.extents)
        self.index_bytes += index_bytes_of(manifest)
        return OnDisk(manifest.name, manifest.extents, manifest_bytes, index_bytes_of(manifest), is_foreign)

    def remove(self, entry: OnDisk) -> None:
        """Lets the files of a conversation go with the next removal; those in use, later."""
        self.index_bytes -= entry.index_bytes
        self._condemned = {entry.name: entry.manifest_bytes, **self._condemned}
        self.let_go(entry.extents)

    def place_blocks(self, manifest: Manifest, entry: OnDisk) -> tuple[BlockId, ...]:
        """Enters the places of a manifest's blocks into the table. Returns the blocks' ids there: those in the file,
        unless another block has that id.

        A crash can bring back files that were being removed, and with them other places of the same blocks: a block has
        one place, whose extent the conversation then holds too.
        """
        ids = []
        for index, found in enumerate(manifest.blocks):
            extent = self._extents[found.place.extent]
            name = extent.blocks.get(found.id)
            if name is None:
                known = self._blocks.get(found.id)
                is_same = known is None or (known.rows, known.identity, known.sums) == (
                    found.rows,
                    found.identity,
                    found.sums.tobytes(),
                )
                name = found.id if is_same else self._blocks.new_id()
                if known is None or known.disk is None or not is_same:
                    self._blocks.put_on_disk(name, index, found)
                    extent.blocks[found.id] = name
            ids.append(name)
        places = (self._blocks[name].disk for name in ids)
        held = {ref.id for ref in entry.extents}
        others = [self.ref(extent) for extent in dict.fromkeys(p.extent for p in places if p) if extent not in held]
        self.hold(others)
        entry.extents += tuple(others)
        return tuple(ids)

    def place_checkpoints(self, manifest: Manifest, known: Mapping[int, CheckpointId]) -> tuple[CheckpointId, ...]:
        """The same for its checkpoints. `known` are those in the table by position; others are added."""
        ids = []
        for found in manifest.checkpoints:
            extent = self._extents[found.place.extent]
            name = extent.checkpoints.get(found.position)
            if name is None:
                name = known.get(found.position) or self._checkpoints.add(found.position)
                self._checkpoints.put_on_disk(name, found)
                extent.checkpoints[found.position] = name
            ids.append(name)
        return tuple(ids)

    def empty(self, extent_id: int) -> None:
        """Takes all places out of a damaged extent."""
        extent = self._extents.get(extent_id)
        if extent is not None:
            self._blocks.take_off_disk(extent.blocks.values())
            self._checkpoints.take_off_disk(extent.checkpoints.values())
            extent.blocks, extent.checkpoints = {}, {}

    def lost_extents(self, job: ReadJob, error: Exception) -> list[int]:
        """The extents that a failed read shows to be lost: at once if the bytes are not those that were written, else
        after `READ_FAILURES` failures of the device."""
        if isinstance(error, DamagedPart):
            return [error.extent]
        lost = []
        for ref, _ in job.extents:
            extent = self._extents.get(ref.id)
            if extent is not None:
                extent.read_failures += 1
                if extent.read_failures >= READ_FAILURES:
                    lost.append(ref.id)
        return lost

    def ref(self, extent_id: int) -> ExtentRef:
        return self._extents[extent_id].ref

    def new_extent(self, size: int) -> ExtentRef:
        """Names a new file of that size."""
        return ExtentRef(self.setup.new_extent(), size)

    def state_file(self, ref: ExtentRef) -> StateFile:
        return StateFile(self.setup.path_of(ref.name), ref.size)

    def hold(self, refs: Iterable[ExtentRef]) -> None:
        """Keeps extents that a manifest names, a write reuses or a read needs, until `let_go`."""
        for ref in refs:
            self._extents.setdefault(ref.id, _Extent(ref)).holders += 1

    def let_go(self, refs: Iterable[ExtentRef]) -> None:
        for ref in refs:
            extent = self._extents[ref.id]
            extent.holders -= 1
            if extent.holders == 0:
                self.empty(ref.id)
                del self._extents[ref.id]
                self._condemned[ref.name] = extent.ref.taken_bytes

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

    def has_room(self, size: int) -> bool:
        return self._file_bytes + size <= self.config.budget_bytes

    def fits_without(self, going: Iterable[OnDisk], size: int, index_bytes: int) -> bool:
        """Whether so many bytes of files and of index fit, once the files of conversations in `going` are removed."""
        freed, index, ceased = sum(self._condemned.values()), 0, Counter[int]()
        for entry in going:
            index += entry.index_bytes
            freed += entry.manifest_bytes
            for ref in entry.extents:
                ceased[ref.id] += 1
                freed += ref.taken_bytes if self._extents[ref.id].holders == ceased[ref.id] else 0
        files_fit = self._file_bytes - freed + size <= self.config.budget_bytes
        return files_fit and self.index_bytes - index + index_bytes <= self.config.index_bytes

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

    def condemn(self, name: str, size: int) -> None:
        """Adds a file to the next removal, which frees `size` bytes."""
        self._condemned[name] = self._condemned.get(name, 0) + size

    def write_failed(self, job: WriteJob, leftovers: tuple[str, ...]) -> None:
        """Condemns what a failed write may have left: each file with its own bytes, since each removal may fail. The
        manifest has one of two names."""
        extent_bytes = job.extent.taken_bytes if job.extent is not None else 0
        for name in leftovers:
            is_extent = job.extent is not None and name == job.extent.name
            is_temporary = name == job.temporary_name
            self.condemn(name, extent_bytes if is_extent else manifest_limit_bytes(job.manifest) * is_temporary)

    @property
    def is_removing(self) -> bool:
        return self._removing is not None

    @property
    def has_removals(self) -> bool:
        """Whether files are being removed or are to be removed."""
        return bool(self._condemned)


def index_bytes_of(manifest: Manifest) -> int:
    """Bytes of memory for what describes a conversation on disk."""
    records = (len(manifest.blocks) + len(manifest.checkpoints)) * BLOCK_BYTES
    return conversation_metadata_bytes(len(manifest.units), manifest.block_tokens) + records


def index_limit_bytes(tokens: int, block_tokens: int) -> int:
    """The same for a state in a file, before it is written."""
    return conversation_metadata_bytes(tokens, block_tokens) + 2 * BLOCK_BYTES


def file_bytes(size: int) -> int:
    """Bytes of disk that a file of this size takes."""
    return round_up(size, GRAIN_BYTES)


def manifest_limit_bytes(manifest: Manifest) -> int:
    """Bytes of disk that the manifest's file takes, at most."""
    return file_bytes(
        encoded_bytes(
            len(manifest.units), len(manifest.blocks), len(manifest.checkpoints), manifest.stages, len(manifest.extents)
        )
        + len(manifest.id)
        + len(manifest.namespace)
    )


def job_bytes(job: WriteJob) -> int:
    """Bytes charged for a write: its extent, unless that was charged when it was reserved, and its manifest."""
    extent_bytes = 0 if job.extent is None or job.is_adopted else job.extent.taken_bytes
    return extent_bytes + manifest_limit_bytes(job.manifest)
