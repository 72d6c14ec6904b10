"""TOML files that people write: the settings, and rewrite rules."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from parkd.errors import ConfigError


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """The document in a file. Raises ConfigError, whose message begins with `where` and says why it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a mark of the encoding
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also for numbers too long and lists too deep
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
