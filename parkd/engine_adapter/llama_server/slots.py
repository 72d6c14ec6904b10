"""The known content of a llama-server's slots. Each slot holds one live conversation.

slot 0   [A .......... ]   saved: its file is in the store; while A stays in the slot, it needs no restore
slot 1   [B ......... ?]   current: the server may have generated more tokens than are known here
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
    """One slot, as far as its content is known."""

    id: int
    ids: Ids = field(default_factory=no_ids)
    """`[position]` ids whose state the slot holds."""
    is_exact: bool = True
    """The slot holds no tokens after `ids`."""
    is_foreign: bool = True
    """The slot's content is unknown and must not be reused: the next request reads its whole prompt."""
    saved: int | None = None
    """Checksum of the file with the slot's whole content; None if it is not saved."""
    task: int | None = None
    """The server's id of the slot's last request when `saved` was set."""
    used: int = 0

    @property
    def position(self) -> int:
        return len(self.ids)

    def holds(self, ids: Ids, *, exact: bool = True) -> None:
        """Notes the slot's content after reading, generating, a restore or a cut."""
        self.ids, self.is_exact, self.is_foreign, self.saved = ids, exact, False, None

    def forget(self) -> None:
        self.ids, self.is_exact, self.is_foreign, self.saved = no_ids(), True, True, None


class SlotTable:
    """One slot is current. The others keep saved conversations until another conversation needs a slot."""

    def __init__(self, count: int, current: Slot | None = None) -> None:
        """`current` is a slot with known content; that of all others is unknown."""
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
        """Forgets a slot, makes it current and returns it, for another conversation. It is the least recently used slot
        other than the current one, preferably one that is not saved; or the current one if that is not saved, since its
        state could not be found again."""
        others = [slot for slot in self._slots if slot is not self.current]
        slot = self.current
        if self.current.saved is not None and others:
            slot = min(others, key=lambda other: (other.saved is not None, other.used))
        slot.forget()
        return self.select(slot)

    def holding(self, checksum: int, states: Callable[[], list[SlotState]]) -> Slot | None:
        """The slot that still holds the whole state of a file. Calls `states` to check that nothing has used it since;
        forgets the slot otherwise."""
        slot = next((slot for slot in self._slots if slot.saved == checksum), None)
        if slot is None:
            return None
        state = next((state for state in states() if state.id == slot.id), None)
        # The server does not tell the number of tokens of a slot that was restored and not used since.
        same = state is not None and not state.is_processing and state.task == slot.task
        if state is None or not same or state.tokens not in (None, slot.position):
            slot.forget()
            return None
        return slot
