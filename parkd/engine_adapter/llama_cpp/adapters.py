"""LoRA adapters: loaded with the model, and what a set of them is known by.

The set that applies by default is part of the engine's fingerprint, as the weights are. Any other set has a digest,
which is part of the key of what a turn reads: rows computed under one set are never continued under another.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as low

from parkd.config.llama_settings import LoraAdapter
from parkd.engine_adapter.base import AdapterInfo, check_adapters
from parkd.errors import ModelError

DIGEST_BYTES = 16


class Adapters:
    """Those of one model. Immutable, so thread-safe."""

    def __init__(
        self,
        model: Any,
        loras: Sequence[LoraAdapter],
        digest_of: Callable[[Path], bytes],
        last_words: Callable[[], str],
    ) -> None:
        """Loads them. `digest_of` tells files by their content. Raises ModelError."""
        self._last_words = last_words
        self.pointers = [self._load(model, lora.path) for lora in loras]
        self._digests = [digest_of(lora.path) for lora in loras]
        self.infos = tuple(AdapterInfo(lora.path.name, float(lora.scale)) for lora in loras)

    def identity(self) -> Sequence[bytes]:
        """What the default set adds to the fingerprint."""
        return [part for digest, scale in self._contents(self.in_use(None)) for part in (digest, repr(scale).encode())]

    def digest(self, scales: Mapping[int, float] | None) -> bytes:
        """16 bytes over contents and scales; empty for the default set, in whatever order it is named. Raises
        InvalidRequest for an adapter that there is not."""
        check_adapters(self.infos, scales)
        contents = self._contents(self.in_use(scales))
        if contents == self._contents(self.in_use(None)):
            return b""
        hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-adapters")
        for content, scale in contents:
            hasher.update(content + struct.pack("<d", scale))
        return hasher.digest()

    def in_use(self, scales: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
        """Places and scales, of those whose scale is not 0; None: of the default set."""
        named = dict(enumerate(info.scale for info in self.infos)) if scales is None else scales
        return tuple(sorted((place, float(scale)) for place, scale in named.items() if scale))

    def _load(self, model: Any, path: Path) -> Any:
        pointer = low.llama_adapter_lora_init(model, os.fsencode(path))
        if not pointer:
            raise ModelError(f"llama.cpp cannot use the adapter {path} with this model: {self._last_words()}.")
        if low.llama_adapter_get_alora_n_invocation_tokens(pointer):
            raise ModelError(
                f"{path} is an activated adapter, which applies behind certain tokens only: that is not supported."
            )
        return pointer

    def _contents(self, used: Sequence[tuple[int, float]]) -> list[tuple[bytes, float]]:
        return sorted((self._digests[place], scale) for place, scale in used)
