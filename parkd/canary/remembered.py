"""Which canaries have passed, so that the next start with the same model, settings, devices and build need not try.

CACHE/canary/KEY.json     one passed canary: what it was of, for people who look
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from parkd.canary.exercise import Verdict
from parkd.engine_adapter.base import EngineInfo
from parkd.engine_adapter.base.build import sources_of

KEY_BYTES = 16
SOURCES = Path(__file__).parents[1]
"""Of all of parkd but its torch engine, which says so itself."""


def canary_key(info: EngineInfo) -> str:
    """Of all that decides how state is computed, laid out and moved. Weights, configuration and dtypes are in the
    engine's fingerprint, stages in its layout, and its settings and libraries in what it says of its build."""
    hasher = blake2b(digest_size=KEY_BYTES, person=b"parkd-canary")
    for part in (
        info.fingerprint,
        info.layout.digest,
        *map(str.encode, (*info.devices, info.build, sources_of(SOURCES))),
    ):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


class PassedCanaries:
    """The passed canaries of one cache folder. What cannot be read or written counts as not passed."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "canary"

    def has(self, key: str) -> bool:
        return (self._folder / f"{key}.json").is_file()

    def note(self, key: str, info: EngineInfo, verdict: Verdict) -> None:
        """Remembers that a canary has passed."""
        told = {"model": info.model_name, "devices": info.devices, "tokens": verdict.tokens, "steps": verdict.steps}
        draft = self._folder / f"{key}.{os.getpid()}.part"
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(told))
            draft.replace(self._folder / f"{key}.json")
