"""Opens a tier over a directory, and says what of the state there cannot be used, and why.

DIRECTORY/HEX.identity   the facts of whoever wrote here, so that the next process can say in what it differs
DIRECTORY/HEX.proof      whether a canary has passed for it, if one has run
DIRECTORY/facts.json     what the canary must know of the server
DIRECTORY/canary-token   by which the tier knows that whoever asks as the canary may read this directory
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from parkd.store.budget import mib
from parkd.store.chunks import ChunkOptions, ChunkStore
from parkd.store.disk import OnDisk
from parkd.store.files.fs import FileSystem
from parkd.store.files.park_directory import open_directory
from parkd_tier.files import put_file
from parkd_tier.identity import FACTS_LIMIT_BYTES, Identity
from parkd_tier.tier import Tier

log = logging.getLogger(__name__)

IDENTITY_SUFFIX = ".identity"
PROOF_SUFFIX = ".proof"
TOKEN_NAME = "canary-token"  # noqa: S105 - the name of a file
TOKEN_BYTES = 16
FACTS_NAME = "facts.json"
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(IDENTITY_SUFFIX)}")
DIFFERENCES_SHOWN = 3


def open_tier(directory: Path, options: ChunkOptions, chunk_bytes: int, identity: Identity) -> Tier:
    """Raises ConfigError if the directory cannot be used, OSError if it cannot be read."""
    fs = open_directory(directory)
    try:
        store = ChunkStore(fs, options, chunk_bytes, identity.fingerprint, clock=time.monotonic, wall=time.time)
        known = known_identities(fs)
        for sentence in unusable(store, identity, known):
            log.warning("%s", sentence)
        keep_identities(fs, identity, known, {each.parked.key_digest for each, _ in store.table.on_disk()})
    except BaseException:
        fs.close()
        raise
    return Tier(store, fs)


def unusable(store: ChunkStore, identity: Identity, known: Mapping[bytes, Identity]) -> list[str]:
    """A sentence for each identity whose conversations are on disk and cannot be used by this one. `known`: those that
    are described, by fingerprint."""
    foreign: dict[bytes, list[OnDisk]] = {}
    for each, disk in store.table.on_disk():
        if each.is_foreign:
            foreign.setdefault(each.parked.key_digest, []).append(disk)
    told = []
    for fingerprint, places in foreign.items():
        size = sum(ref.size for ref in {ref.id: ref for disk in places for ref in disk.extents}.values())
        told.append(
            f"{len(places)} conversation{'s' * (len(places) > 1)} on disk ({mib(size)}) cannot be used here and will "
            f"make room first: written with {_how(identity, known.get(fingerprint))}"
        )
    return told


def _how(identity: Identity, other: Identity | None) -> str:
    if other is None:
        return "an engine that is not described"
    differences = identity.differences(other)
    more = len(differences) - DIFFERENCES_SHOWN
    return "; ".join(differences[:DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def known_identities(fs: FileSystem) -> dict[bytes, Identity]:
    """Those that are described in the directory, by fingerprint."""
    found = {}
    for name, size in fs.sizes().items():
        if not _NAME.fullmatch(name) or size > FACTS_LIMIT_BYTES:
            continue
        with contextlib.suppress(OSError):
            other = Identity.decode(fs.load(name))
            if other is not None and name == file_name(other.fingerprint):
                found[other.fingerprint] = other
    return found


def keep_identities(
    fs: FileSystem, identity: Identity, known: Mapping[bytes, Identity], named: Collection[bytes]
) -> None:
    """Describes this identity in the directory, and removes the descriptions of those that left nothing there (`named`:
    the fingerprints of those that did). A failure is only logged: the next process then cannot say what differs."""
    try:
        for fingerprint in known:
            if fingerprint not in named and fingerprint != identity.fingerprint:
                fs.remove(file_name(fingerprint))
                with contextlib.suppress(FileNotFoundError):
                    fs.remove(fingerprint.hex() + PROOF_SUFFIX)
        if identity.fingerprint not in known:
            put_file(fs, file_name(identity.fingerprint), identity.encode())
    except OSError as error:
        log.warning("what this engine is could not be written down: %s", error)


def file_name(fingerprint: bytes) -> str:
    return fingerprint.hex() + IDENTITY_SUFFIX


@dataclass(frozen=True)
class Proof:
    """What a canary found."""

    passed: bool
    told: str


def proof_of(fs: FileSystem, fingerprint: bytes) -> Proof | None:
    """None if no canary has run for this identity."""
    try:
        known = json.loads(fs.load(fingerprint.hex() + PROOF_SUFFIX))
        return Proof(known["passed"] is True, str(known["told"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def canary_token(fs: FileSystem) -> str:
    """The directory's token, made if there is none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        known = fs.load(TOKEN_NAME).decode(errors="replace")
        if len(known) == 2 * TOKEN_BYTES:
            return known
    token = secrets.token_hex(TOKEN_BYTES)
    put_file(fs, TOKEN_NAME, token.encode())
    return token
