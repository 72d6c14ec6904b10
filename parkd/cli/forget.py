"""`parkd forget`: removes parked conversations from a park directory that no server holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from parkd.config.keys import read_key_file
from parkd.errors import ConfigError
from parkd.identity.answer_file import NAME
from parkd.proxy.access import namespace_of
from parkd.store.fs import open_directory
from parkd.store.manifest import Manifest
from parkd.store.opening import forget


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (parkd forget --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parkd forget",
        description="Removes parked conversations from a park directory. Stop the server that uses it first.",
        allow_abbrev=False,
    )
    parser.add_argument("--park-dir", metavar="DIR", required=True, help="the directory that parkd serve was given")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every conversation")
    which.add_argument("--key", metavar="KEY", help="those of an API key: the key, its namespace or its name")
    which.add_argument("--conversation", metavar="ID", help="one conversation")
    parser.add_argument("--api-key-file", metavar="FILE", help="where names of keys are looked up")
    return parser


def run(words: Sequence[str]) -> int:
    """Runs `parkd forget`. Returns the exit code: 1 if nothing matched. Raises ConfigError."""
    given = _parser().parse_args(words)
    path = Path(given.park_dir).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--park-dir {path}: there is no such directory")
    fs = open_directory(path)
    try:
        gone, left = forget(fs, _chosen(given))
        (path / NAME).unlink(missing_ok=True)  # answers do not record their conversation, so all are removed
    except OSError as error:
        raise ConfigError(f"--park-dir {path} cannot be read: {error.strerror}") from error
    finally:
        fs.close()
    print(f"forgot {len(gone)} conversation{'' if len(gone) == 1 else 's'}")
    if left:
        raise ConfigError(f"{len(left)} files in {path} could not be removed; remove the directory itself")
    return 0 if gone or given.all else 1


def _chosen(given: argparse.Namespace) -> Callable[[Manifest], bool]:
    if given.all:
        return lambda _manifest: True
    if given.conversation is not None:
        wanted: str = given.conversation
        return lambda manifest: manifest.id == wanted
    namespaces = _namespaces(given.key, given.api_key_file)
    # A request's `cache_salt` makes a sub-namespace of its key's namespace, after a slash; it belongs to the key too.
    return lambda manifest: manifest.namespace.partition("/")[0] in namespaces


def _namespaces(text: str, key_file: str | None) -> set[str]:
    """The namespaces that `text` may stand for: as a key, as the name of a namespace, or as the name of a key."""
    found = {namespace_of(text), f"={text}"}
    for key in read_key_file(Path(key_file).expanduser()) if key_file is not None else ():
        if text in (key.name, key.key):
            found.add(namespace_of(key.key) if key.namespace is None else f"={key.namespace}")
    return found
