"""What a prompt is: its units, its key and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.uint64]
"""The identity of a prompt, `[n]`: a token id, or for an image position a value with the top bit set, derived from
the image's digest and the position inside the image. Two prompts share state exactly where these are equal."""

TokenIds = npt.NDArray[np.int64]

Proof = Callable[[], None]
"""Confirms something that is used before it is checked. Blocks, so it is called on a thread that may wait. Raises the
error to report instead of an answer."""

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """What must be equal, besides the units, before state may be reused."""

    namespace: str
    """The cache namespace of the caller's API key."""
    fingerprint: bytes
    """Digest of weights, configuration, compute dtype, KV dtype and adapter: `EngineInfo.fingerprint`."""
    steering: bytes = b""
    """Digest of the effective steering vectors, scales and layers; empty when nothing steers."""

    @property
    def digest(self) -> bytes:
        """16 bytes; seeds the prefix hashes and is the hash of the empty prefix."""
        parts = (self.namespace.encode(), self.fingerprint, self.steering)
        hasher = blake2b(digest_size=HASH_BYTES, person=b"parkd-key")
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class NamedKey:
    """An API key as the operator wrote it down."""

    name: str
    """For logs and people."""
    key: str = field(repr=False)
    namespace: str | None = None
    """Keys of one namespace share parked conversations; None: a namespace of its own."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A named part of a prompt, for explaining where a prompt diverged."""

    start: int
    stop: int
    label: str
    """For people: `system`, `tools`, `message 3 (user)`, `generation prompt`."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions `[start, stop)` that one image takes in a prompt."""

    start: int
    stop: int
    digest: bytes
    """SHA-256 of mode, width, height, decoded pixels and preprocessing configuration."""
    data: bytes = field(default=b"", repr=False, compare=False)
    """The image file, for as long as its turn may have to read it."""
    sees_itself: bool = False
    """Its positions attend to each other in both directions, so nothing can resume inside it."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What a rule of the server changed in a prompt before it was rendered."""

    rule: str
    """Its name."""
    places: int
    """Matches that were replaced."""


@dataclass(frozen=True)
class PromptIdentity:
    """A rendered, tokenised and hashed prompt."""

    key: ConversationKey
    token_ids: TokenIds
    """`[n]` ids as the model reads them."""
    units: Units
    """`[n]`; equal to `token_ids` where there is no image."""
    prefix_hashes: tuple[bytes, ...]
    """`prefix_hashes[i]` covers `units[: (i + 1) * block_tokens]`, chained from `key.digest`; full blocks only."""
    segments: tuple[SegmentSpan, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    """Ascending positions where a later prompt is likely to fork: checkpoint places."""
    generation_stays: bool = False
    """The last boundary is the start of the generation prompt, and later prompts contain all of it in the same place,
    because the template opens earlier answers with the same text. So they fork after it."""
    template_tokens: int = 0
    """Tokens at the start that the template writes before anything the client said, so that every conversation shares
    them; 0 if that is not known."""
    rewrites: tuple[Rewrite, ...] = ()
    proof: Proof | None = field(default=None, compare=False, repr=False)
    """Nothing of an answer may be sent before this has ended without an error; None: nothing to confirm."""

    def __len__(self) -> int:
        return len(self.units)
