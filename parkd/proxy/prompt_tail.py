"""The end of a prompt that is read while what comes before it is still being restored.

    parked rows  |=============================|.......|x|
                 0                       restored     n-1  the last token is read by the first step of the answer

Short ends only: of a long one, what it takes to get it under way is small beside the reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parkd.engine_adapter.base import Engine, ReadingRestoreEngine
from parkd.proxy.checkpoints import checkpoints_to_take
from parkd.store.records import Lease
from parkd.types import PromptIdentity

MOST_TOKENS = 512
LEAST_BYTES = 64 << 20
"""What is smaller has arrived before the reading is under way."""


@dataclass(frozen=True, eq=False)
class PromptTail:
    """What a turn reads behind its start."""

    prompt: PromptIdentity
    fork: int
    """Where the prompt left what was known."""
    steering: Mapping[str, float] | None
    """What the request steers by; it must be in effect before anything is read."""

    @property
    def stop(self) -> int:
        """Where reading ends."""
        return len(self.prompt) - 1


def read_while_restoring(engine: Engine, lease: Lease, tail: PromptTail) -> bool:
    """Restores what is leased and reads the tail, if the engine can do both at once and it is worth it; else does
    nothing and returns False. On the engine's thread.

    Raises as `ReadingRestoreEngine.restore_and_read` does.
    """
    prompt = tail.prompt
    if not isinstance(engine, ReadingRestoreEngine) or not engine.reads_while_restoring:
        return False
    if not 0 < tail.stop - lease.stop <= MOST_TOKENS or lease.transfer.bytes < LEAST_BYTES or prompt.images:
        return False
    if engine.steer(tail.steering) != prompt.key.steering:
        return False  # The turn finds that out too, and ends.
    places = checkpoints_to_take(prompt, lease.stop, tail.fork, engine.info.ctx_checkpoints)
    engine.restore_and_read(lease.transfer, prompt.token_ids[lease.stop : tail.stop], places)
    return True
