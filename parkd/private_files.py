"""Files for this user alone, opened in no way that leads elsewhere.

Not every system has every flag: where links cannot be refused while opening (Windows), only what was looked at before
keeps them out.
"""

from __future__ import annotations

import os

FILE_MODE = 0o600
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
AS_BYTES = getattr(os, "O_BINARY", 0)
"""Windows would translate ends of lines."""


def private_opener(path: str, flags: int) -> int:
    """An `opener` for `open`: creates the file for this user alone, and never opens it through a link. Raises
    OSError."""
    return os.open(path, flags | NO_LINK | AS_BYTES, FILE_MODE)
