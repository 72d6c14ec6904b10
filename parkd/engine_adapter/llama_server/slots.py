"""What the slots of a llama-server hold, as far as parkd knows: each is a conversation that is live there.

slot 0   [A .......... ]   saved: its file is in the store, so A may come back without being restored
slot 1   [B ......... ?]   current; the server may have gone further than what is known of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from parkd.engine_adapter.llama_server.client import SlotState
from parkd.engine_adapter.llama_server.slot_file import Ids


def no_ids() -> Ids:
    return np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Slot:
    id: int
    ids: Ids = field(default_factory=no_ids)
    """`[position]`: the slot holds the state of these."""
    is_exact: bool = True
    """Nothing else is in it."""
    is_foreign: bool = True
    """What it holds must not be reused: the next request reads everything."""
    saved: int | None = None
    """Checksum of the file that holds all that is in it; None: there is none."""
    task: int | None = None
    """The server's number of the last request in it, as of when `saved` was set."""
    used: int = 0

    @property
    def position(self) -> int:
        return len(self.ids)

    def holds(self, ids: Ids, *, exact: bool = True) -> None:
        """It was read into, or generated in."""
        self.ids, self.is_exact, self.is_foreign, self.saved = ids, exact, False, None

    def forget(self) -> None:
        self.ids, self.is_exact, self.is_foreign, self.saved = no_ids(), True, True, None


class SlotTable:
    """One slot is current; the others keep what was saved from them until their room is wanted."""

    def __init__(self, count: int, current: Slot | None = None) -> None:
        """`current` is one that is known to hold what it holds; the others hold nothing of worth."""
        self._slots = [Slot(number) for number in range(count)]
        self._uses = 0
        if current is not None and current.id < count:
            self._slots[current.id] = current
        self.current = current or self._slots[0]

    @property
    def is_single(self) -> bool:
        return len(self._slots) == 1

    def select(self, slot: Slot) -> Slot:
        self._uses += 1
        slot.used = self._uses
        self.current = slot
        return slot

    def take(self) -> Slot:
        """A slot for another conversation, forgotten and current: the one used longest ago. What is current is kept
        where it can come back, that is if it was saved."""
        others = [slot for slot in self._slots if slot is not self.current]
        slot = self.current
        if self.current.saved is not None and others:
            slot = min(others, key=lambda other: (other.saved is not None, other.used))
        slot.forget()
        return self.select(slot)

    def holding(self, checksum: int, states: Callable[[], list[SlotState]]) -> Slot | None:
        """The slot that still holds all of a file; its server is asked whether it was used since."""
        slot = next((slot for slot in self._slots if slot.saved == checksum), None)
        if slot is None:
            return None
        state = next((state for state in states() if state.id == slot.id), None)
        # Of a slot that was restored and not used since, the server does not say how much it holds.
        same = state is not None and not state.is_processing and state.task == slot.task
        if state is None or not same or state.tokens not in (None, slot.position):
            slot.forget()
            return None
        return slot
