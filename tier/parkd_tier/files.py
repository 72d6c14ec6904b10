"""Small files of the tier in its directory."""

from __future__ import annotations

import numpy as np

from parkd.store.files.fs import FileSystem

NEW = ".new"
"""Ends the name of a file that is being written."""


def put_file(fs: FileSystem, name: str, data: bytes) -> None:
    """Writes a small file, or replaces it as a whole. Raises OSError."""
    if name + NEW in fs.sizes():
        fs.remove(name + NEW)
    file = fs.create(name + NEW)
    try:
        file.write(0, [np.frombuffer(data, dtype=np.uint8)])
        file.sync()
    finally:
        file.close()
    fs.rename(name + NEW, name)
    fs.sync()
