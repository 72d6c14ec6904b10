"""Conversations that are expected back: an answer that ends in a tool call is followed by the tool's result.

    tool call -> (others run, and it leaves memory) -> nobody runs -> read from disk into RAM -> it comes back: a hit
                                                                                             or not in time: waste

What is read ahead takes only room that is worth less by the store's policy, once for each return that is expected.
Nothing is computed, and what is live stays so anyway while nobody else runs. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parkd.lane.disk_worker import DiskWorker
from parkd.lane.metrics import Metrics
from parkd.store.records import ConversationId, Tier
from parkd.store.store import ConversationStore
from parkd.types import PromptIdentity

EXPECTED_LIMIT = 32
"""Most returns that are expected at once; the oldest is forgotten."""
WITHIN_S = 900.0
"""A return that takes longer is no longer expected."""


@dataclass(eq=False)
class _Return:
    key_digest: bytes
    hashes: tuple[bytes, ...]
    """Of the prompt that was answered, with which the next one begins."""
    parked_id: ConversationId
    noted_s: float
    read_id: ConversationId | None = None
    """What was read ahead; None: nothing."""
    was_tried: bool = False


class Returns:
    def __init__(
        self, store: ConversationStore, disk: DiskWorker | None, metrics: Metrics, monotonic: Callable[[], float]
    ) -> None:
        self._store = store
        self._disk = disk
        self._metrics = metrics
        self._monotonic = monotonic
        self._expected: list[_Return] = []
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, prompt: PromptIdentity, parked_id: ConversationId) -> None:
        """Called when an answer to `prompt` has ended in a tool call and is parked. Ignored for a prompt shorter than a
        block."""
        if prompt.prefix_hashes:
            self._expected.append(_Return(prompt.key.digest, prompt.prefix_hashes, parked_id, self._monotonic()))
        self._forget_old()

    def came(self, prompt: PromptIdentity) -> None:
        """Called when a turn begins: what it continues has returned."""
        for each in list(self._expected):
            if each.key_digest == prompt.key.digest and each.hashes == prompt.prefix_hashes[: len(each.hashes)]:
                self._end(each, has_returned=True)
        self._forget_old()

    async def read_ahead(self, is_idle: Callable[[], bool]) -> None:
        """Called when nobody runs or waits: reads what is expected and only on disk, the newest first, since tools
        mostly take as long as each other. None of them is evicted for another."""
        self._forget_old()
        if self._disk is None:
            return
        held = list[Callable[[], None]]()
        try:
            for each in list(reversed(self._expected)):
                if not is_idle():
                    return
                if each not in self._expected:
                    continue  # it came back meanwhile
                parked = self._store.get(each.parked_id)
                if parked is not None and parked.tier is Tier.DISK and not each.was_tried:
                    each.was_tried = True
                    read = await self._disk.promote_ahead(parked.id, parked.position)
                    if read is not None:
                        each.read_id = read.id
                        self._metrics.read_ahead.inc()
                held.append(self._store.expect(each.key_digest, each.hashes))
        finally:
            for release in held:
                release()

    def _end(self, expected: _Return, *, has_returned: bool) -> None:
        self._expected.remove(expected)
        if expected.read_id is not None:
            parked = self._store.get(expected.read_id)
            is_there = parked is not None and parked.tier is not Tier.DISK
            (self._metrics.read_ahead_hits if has_returned and is_there else self._metrics.read_ahead_waste).inc()

    def _forget_old(self) -> None:
        since_s = self._monotonic() - WITHIN_S
        excess = max(0, len(self._expected) - EXPECTED_LIMIT)
        for number, each in enumerate(list(self._expected)):
            if number < excess or each.noted_s < since_s:
                self._end(each, has_returned=False)
