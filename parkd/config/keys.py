"""The file of named API keys: one `name:key:namespace` per line.

Keys with the same namespace share parked conversations, so that a team's system prompt is stored once. A key without a
namespace has its own. No field contains a `:`, since a field too many would become part of a key that nobody sends.
Blank lines and lines that begin with `#` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from parkd.errors import ConfigError
from parkd.types import NamedKey, TurnClass

NAMES_SHOWN = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_key_file(path: Path) -> tuple[NamedKey, ...]:
    """The keys in a file. Raises ConfigError, whose message names the line and never contains a key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}") from error
    keys: list[NamedKey] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            keys.append(_key(line.strip(), f"--api-key-file {path}, line {number}"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: it contains no key. Add a line name:key:namespace.")
    for what, values in (("name", [key.name for key in keys]), ("key", [key.key for key in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"--api-key-file {path}: two lines have the same {what}. Give each line its own.")
    return tuple(keys)


def _key(line: str, where: str) -> NamedKey:
    name, *rest = line.split(":")
    if len(rest) not in (1, 2):
        raise ConfigError(f"{where}: expected name:key:namespace or name:key, and it has {len(rest) + 1} fields")
    key, namespace = rest[0], rest[1] if len(rest) == 2 else ""
    if not _NAME.fullmatch(name) or not key or (namespace and not _NAME.fullmatch(namespace)):
        raise ConfigError(
            f"{where}: expected name:key:namespace, names of letters, digits, `_`, `.` and `-` (the key may hold any "
            f"character but `:`)"
        )
    return NamedKey(name, key, namespace or None)


def check_classes(classes: Sequence[tuple[str, TurnClass]], keys: Sequence[NamedKey]) -> None:
    """Raises ConfigError for a class of keys that no key is of."""
    names = [key.name for key in keys]
    for pattern, kind in classes:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = f"its names are {', '.join(sorted(names)[:NAMES_SHOWN])}" if names else "there is none"
            raise ConfigError(f"--class {pattern}={kind}: no key of --api-key-file has such a name; {known}")
