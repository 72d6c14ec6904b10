"""What must be equal before state that one process left may be used by another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16
FACTS_LIMIT_BYTES = 1 << 20
"""Most bytes of the facts of one identity, written down."""
SHOWN_CHARS = 60
"""Most characters of a fact that a sentence repeats."""

Facts = Mapping[str, Any]
"""Names of facts and values that JSON can hold."""


@dataclass(frozen=True)
class Identity:
    """Facts about whoever computes state (`model`: weights, configuration, engine) and about what its bytes mean
    (`rows`: sizes, groups, dtypes, topology)."""

    model: Facts
    rows: Facts

    @property
    def fingerprint(self) -> bytes:
        """16 bytes over all facts."""
        return blake2b(self.encode(), digest_size=DIGEST_BYTES, person=b"parkd-tier").digest()

    def encode(self) -> bytes:
        return _canonical({"model": self.model, "rows": self.rows})

    @staticmethod
    def decode(data: bytes) -> Identity | None:
        """None if these bytes are no identity."""
        try:
            known = json.loads(data)
            model, rows = known["model"], known["rows"]
        except (ValueError, KeyError, TypeError):
            return None
        return Identity(model, rows) if isinstance(model, dict) and isinstance(rows, dict) else None

    def differences(self, other: Identity) -> list[str]:
        """In which facts another one differs, as `tensor parallel size 2, here 1`."""
        mine, theirs = {**self.model, **self.rows}, {**other.model, **other.rows}
        return [
            f"{name} {_shown(theirs.get(name))}, here {_shown(mine.get(name))}"
            for name in dict.fromkeys([*mine, *theirs])
            if _canonical(mine.get(name)) != _canonical(theirs.get(name))
        ]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
