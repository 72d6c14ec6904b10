"""Segments of shared memory that killed processes left.

vLLM's tier in memory is a file in /dev/shm, as large as its budget. A process that is killed leaves it there, and the
next start may find no room. So each process writes the name of its own into its directory before the segment is made;
whoever holds the directory's lock later knows that the one who wrote that is dead.
"""

from __future__ import annotations

import logging
from pathlib import Path

from parkd.store.budget import mib
from parkd.store.files.fs import FileSystem
from parkd_tier.files import put_file

log = logging.getLogger(__name__)

NOTE_NAME = "segment"
NOTE_LIMIT_BYTES = 4096
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place of segments, not a temporary file
PREFIX, SUFFIX = "vllm_offload_", ".mmap"


def segment_name(engine_id: str) -> str:
    return f"{PREFIX}{engine_id}{SUFFIX}"


def replace_segment(fs: FileSystem, name: str, folder: Path = SHARED_MEMORY) -> int:
    """Removes the segment that the last process with this directory left, and notes the name of the one to come.
    Returns the bytes that were freed. Raises OSError if the name cannot be noted."""
    freed = _remove_last(fs, folder, name)
    put_file(fs, NOTE_NAME, name.encode())
    return freed


def _remove_last(fs: FileSystem, folder: Path, own: str) -> int:
    if not 0 < fs.sizes().get(NOTE_NAME, 0) <= NOTE_LIMIT_BYTES:
        return 0
    last = fs.load(NOTE_NAME).decode(errors="replace")
    if last == own or "/" in last or not (last.startswith(PREFIX) and last.endswith(SUFFIX)):
        return 0
    path = folder / last
    try:
        size = path.stat(follow_symlinks=False).st_blocks * 512
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("%s, which a process that is dead left, could not be removed: %s", path, error)
        return 0
    log.warning("removed %s (%s of memory), which a killed process left", path, mib(size))
    return size
