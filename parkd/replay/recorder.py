"""Writes a trace of a server's turns, outside of its event loop and without any text of a prompt.

Hashes of prompts are keyed with a secret that is drawn for each recording and stored nowhere. So a trace cannot be
searched for a guessed text, and two traces cannot be matched.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from parkd.errors import ConfigError
from parkd.identity.chain import prefix_hashes
from parkd.private_files import private_opener
from parkd.replay.trace import HASH_BYTES, TraceHeader, TurnRecord, header_line, turn_line
from parkd.types import Units

log = logging.getLogger(__name__)

QUEUE_TURNS = 256
"""The most turns that wait to be written; further ones are dropped and counted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    at_s: float
    key_digest: bytes
    prompt_tokens: int
    units: Units
    end: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """A trace file and the thread that writes it."""

    def __init__(self, path: Path, header: TraceHeader, began_s: float) -> None:
        """`began_s` is time 0 of the trace. Raises ConfigError if the file exists or cannot be created."""
        try:
            self._file = open(path, "x", encoding="utf-8", opener=private_opener)  # noqa: SIM115 - closed by `close`
        except FileExistsError:
            raise ConfigError(f"--record {path}: the file exists already; name another one") from None
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from error
        self._file.write(header_line(header) + "\n")
        self._file.flush()
        self._block_tokens = header.block_tokens
        self._began_s = began_s
        self._secret = secrets.token_bytes(16)
        self._waiting: queue.Queue[_Seen | None] = queue.Queue(QUEUE_TURNS)
        self.dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="parkd-record", daemon=True)
        self._thread.start()

    def note(
        self,
        *,
        at_s: float,
        key_digest: bytes,
        prompt_tokens: int,
        units: Units,
        end: str,
        extra: Mapping[str, Any],
    ) -> None:
        """Queues a turn without waiting. `units` are those that are live after the turn; they must not change."""
        try:
            self._waiting.put_nowait(_Seen(at_s, key_digest, prompt_tokens, units, end, extra))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes the queued turns and closes the file."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()
        if self.dropped:
            log.warning(
                "%d turns are missing from the recorded trace: they came faster than they could be written",
                self.dropped,
            )

    def _write_all(self) -> None:
        while (seen := self._waiting.get()) is not None:
            try:
                self._file.write(self._line(seen) + "\n")
                if self._waiting.empty():
                    self._file.flush()
            except OSError as error:
                self.dropped += 1
                log.warning("a turn could not be recorded: %s", error)

    def _line(self, seen: _Seen) -> str:
        key = blake2b(seen.key_digest, key=self._secret, digest_size=16).digest()
        chain = tuple(part[:HASH_BYTES] for part in prefix_hashes(seen.units, key, self._block_tokens))
        turn = TurnRecord(
            max(0.0, seen.at_s - self._began_s),
            key[:4].hex(),
            seen.prompt_tokens,
            len(seen.units),
            chain,
            seen.end,
        )
        return turn_line(turn, seen.extra)
