"""The descriptions of layouts in a park directory: a manifest names its layout by a digest, and these say what it is.

    <32 hex>.layout   the description whose digest is the name

A directory of an earlier version has none. Then what is in it can only be used under the layout that wrote it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Mapping

import numpy as np

from parkd.state import LAYOUT_LIMIT_BYTES, DamagedLayout, StateLayout, describe, layout_from
from parkd.store.files.fs import FileSystem

log = logging.getLogger(__name__)

LAYOUT_SUFFIX = ".layout"
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(LAYOUT_SUFFIX)}")
_NEW = ".new"


def layout_name(digest: bytes) -> str:
    return digest.hex() + LAYOUT_SUFFIX


def described_layouts(fs: FileSystem) -> Mapping[bytes, StateLayout]:
    """The layouts that a directory describes, by digest. Files that describe another one than their name says are left
    out. Raises OSError if the directory cannot be read."""
    found = {}
    for name, size in fs.sizes().items():
        if not _NAME.fullmatch(name) or size > LAYOUT_LIMIT_BYTES:
            continue
        try:
            layout = layout_from(fs.load(name))
        except (OSError, DamagedLayout) as error:
            log.warning("%s is not used: %s", name, error)
            continue
        if layout_name(layout.digest) == name:
            found[layout.digest] = layout
    return found


def keep_layouts(fs: FileSystem, layout: StateLayout, named: Collection[bytes]) -> None:
    """Describes `layout` in a directory, and removes the descriptions that no manifest names (`named`: the digests that
    some do). A failure is only logged: what is parked is then of use under this layout alone."""
    wanted = layout_name(layout.digest)
    needed = {wanted, *map(layout_name, named)}
    try:
        names = fs.sizes()
        for name in names:
            if (_NAME.fullmatch(name) and name not in needed) or name.endswith(LAYOUT_SUFFIX + _NEW):
                with contextlib.suppress(OSError):
                    fs.remove(name)
        text = describe(layout)
        if wanted in names and fs.load(wanted) == text:
            return
        file = fs.create(wanted + _NEW)
        try:
            file.write(0, [np.frombuffer(text, dtype=np.uint8)])
            file.sync()
        finally:
            file.close()
        fs.rename(wanted + _NEW, wanted)
        fs.sync()
    except (OSError, ValueError) as error:
        log.warning("the layout of parked state could not be described: %s", error)
