"""Reading the end of a prompt while the state before it is still being restored.

    parked rows  |=============================|.......|x|
                 0                       restored     n-1  the last token is read by the first step of the answer

Only for short ends: for a long one, the time to start reading is small compared with the reading itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parkd.engine_adapter.base import Seat
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.store.records import Lease
from parkd.types import PromptIdentity

MOST_TOKENS = 512
LEAST_BYTES = 64 << 20
"""A smaller restore has ended before the reading starts."""


@dataclass(frozen=True, eq=False)
class PromptTail:
    """The part of a prompt that a turn reads after its start."""

    prompt: PromptIdentity
    fork: int
    """The first position at which the prompt differs from what was known."""
    steering: Mapping[str, float] | None
    """The request's control vectors; they must be in effect before anything is read."""
    adapters: Mapping[int, float] | None = None
    """The same of its adapters."""

    @property
    def stop(self) -> int:
        """Where reading ends: at the last token, which the first step of the answer reads."""
        return len(self.prompt) - 1


def read_while_restoring(seat: Seat, lease: Lease, tail: PromptTail) -> bool:
    """Restores what is leased and reads the tail, if the engine can do both at once and that saves time. Otherwise
    does nothing and returns False. Runs on the engine's thread.

    Raises as `Seat.restore_and_read` does.
    """
    prompt = tail.prompt
    if not seat.info.reads_while_restoring:
        return False
    if not 0 < tail.stop - lease.stop <= MOST_TOKENS or lease.transfer.bytes < LEAST_BYTES or prompt.images:
        return False
    if seat.steer(tail.steering, tail.adapters) != prompt.key.steering:
        return False  # The turn finds the same, and fails.
    places = checkpoints_to_take(prompt, lease.stop, tail.fork, seat.info.ctx_checkpoints)
    seat.restore_and_read(lease.transfer, prompt.token_ids[lease.stop : tail.stop], places)
    return True
