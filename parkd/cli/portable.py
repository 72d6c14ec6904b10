"""`parkd export` and `parkd import`: one conversation out of, or into, a running server or a park directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from parkd.cli.remote.client import RemoteServer, in_path
from parkd.cli.remote.flags import add_server_flags, key_of
from parkd.config.keys import read_key_file
from parkd.errors import ConfigError
from parkd.portable import directory
from parkd.portable.header import DamagedFile
from parkd.portable.parts import read_header, verify
from parkd.private_files import private_opener
from parkd.proxy.access import namespace_of
from parkd.proxy.portable import CONTENT_TYPE
from parkd.store.files.manifest import Manifest
from parkd.store.files.park_directory import open_directory
from parkd.store.layouts import described_layouts
from parkd.store.opening import scan
from parkd.store.records import name_of
from parkd.types import NamedKey

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help)")


def parser_of(command: str) -> argparse.ArgumentParser:
    is_export = command == "export"
    parser = _Parser(
        prog=f"parkd {command}",
        description=(
            "Writes one parked conversation to a file: its tokens and the model's state of them, so treat it as you "
            "would its text."
            if is_export
            else "Parks the conversation in a file, if it is of the same model. Of another layer split it is cut anew."
        ),
        allow_abbrev=False,
    )
    if is_export:
        parser.add_argument("id", metavar="ID", help="the conversation (parkd forget --list shows those on disk)")
    parser.add_argument("file", metavar="FILE", type=Path, help="the portable conversation")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--park-dir", metavar="DIR", type=Path, help="a park directory that no server uses")
    add_server_flags(parser, where)
    if is_export:
        parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    else:
        parser.add_argument(
            "--into", metavar="NAME", help="for an operator: the name of the key, or of the namespace, that gets it"
        )
        parser.add_argument("--api-key-file", metavar="FILE", help="where names of keys are looked up, with --park-dir")
    return parser


def run(command: str, words: Sequence[str]) -> int:
    """Runs `parkd export` or `parkd import`. Returns the exit code. Raises ConfigError."""
    given = parser_of(command).parse_args(words)
    if command == "export":
        with _replacing(given.file, force=given.force) as out:
            if given.park_dir is None:
                _fetch(given.url, key_of(given), given.id, out)
            else:
                _export_offline(given.park_dir, given.id, out)
            out.flush()
            size = out.seek(0, os.SEEK_END)
            header = _usable(read_header, out, size)
            _usable(verify, out, header)
        print(f"exported {header.tokens:,} tokens, {size / 2**20:,.1f} MiB: {given.file}")
        return 0
    if given.park_dir is None:
        told = _send(given.url, key_of(given), given.into, given.file)
        cut = ", cut for another layer split" if told.get("recut") else ""
        print(f"imported {told['tokens']:,} tokens as {told['id']}{cut}")
        return 0
    manifest = _import_offline(given.park_dir, given.file, given.into or given.api_key, given.api_key_file)
    print(f"imported {len(manifest.units):,} tokens as {manifest.id}; the next server over {given.park_dir} finds it")
    return 0


@contextlib.contextmanager
def _replacing(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all has gone well, and is gone otherwise. Raises ConfigError."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: name another file, or add --force")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x+b", opener=private_opener) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# A running server


def _fetch(url: str, key: str | None, conversation_id: str, out: BinaryIO) -> None:
    path = f"/parkd/conversations/{in_path(conversation_id, 'ID')}/export"
    with contextlib.closing(RemoteServer(url, key)) as server:
        server.fetch(path, out)


def _send(url: str, key: str | None, into: str | None, path: Path) -> Mapping[str, Any]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    with file, contextlib.closing(RemoteServer(url, key)) as server:
        size = file.seek(0, os.SEEK_END)
        _usable(read_header, file, size)  # what is no conversation is not sent
        file.seek(0)
        return server.send("/parkd/conversations/import", file, size, CONTENT_TYPE, into=into)


# A park directory


def _export_offline(path: Path, conversation_id: str, out: BinaryIO) -> None:
    fs = open_directory(path, creates=False)
    try:
        manifests = [manifest for manifest, _ in scan(fs).manifests]
        found = [each for each in manifests if conversation_id in (each.id, name_of(each.id))]
        if not found:
            raise ConfigError(f"there is no conversation {conversation_id} in {path} (parkd forget --list)")
        manifest = max(found, key=lambda each: len(each.units))
        layout = described_layouts(fs).get(manifest.layout_digest)
        if layout is None:
            raise ConfigError(
                f"{path} does not describe the layout of this conversation, since an earlier version wrote it: start "
                "this version once over it with the same model and layer split"
            )
        steering = directory.steering_of(manifest)
        if steering is None:
            raise ConfigError("control vectors steered this conversation, and its files do not tell which")
        _usable(directory.export, fs, path, manifest, layout, steering, out)
    except OSError as error:
        raise ConfigError(f"--park-dir {path} cannot be read: {error.strerror}") from error
    finally:
        fs.close()


def _import_offline(path: Path, file: Path, owner: str | None, key_file: str | None) -> Manifest:
    keys = () if key_file is None else read_key_file(Path(key_file).expanduser())
    try:
        with file.open("rb") as opened:
            header = _usable(read_header, opened, opened.seek(0, os.SEEK_END))
            _usable(verify, opened, header)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    fs = open_directory(path)
    try:
        return directory.land(fs, file, header, namespace_for(owner, keys), time.time())
    except OSError as error:
        raise ConfigError(f"--park-dir {path} cannot be written: {error.strerror}") from error
    finally:
        fs.close()


def namespace_for(owner: str | None, keys: Sequence[NamedKey]) -> str:
    """The namespace that an operator names: by a key's name or by the namespace's, both in the key file, or by the key
    itself; that of a server without keys if none is named."""
    if owner is None:
        return ""
    for key in keys:
        if owner in (key.name, key.key):
            return namespace_of(key.key) if key.namespace is None else f"={key.namespace}"
    return f"={owner}" if any(key.namespace == owner for key in keys) else namespace_of(owner)


def _usable(function: Callable[..., T], *given: object) -> T:
    try:
        return function(*given)
    except DamagedFile as error:
        raise ConfigError(f"the conversation cannot be used: {error}") from None
