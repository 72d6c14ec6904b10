"""How a turn begins: finds the state that it starts from, reads it from disk if need be, and makes it live."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from parkd.engine_adapter.base import EngineInfo
from parkd.errors import LogitsNotFinite, RestoreFailed
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.prompt_tail import PromptTail
from parkd.lane.seating import ANSWER_TOKENS, rows_left
from parkd.lane.start import NOT_ASKED, OWN_GONE, Start, as_known_to_key, cold_start, decide_start, differs, explain
from parkd.lane.turn import Turn
from parkd.store.store import ConversationStore
from parkd.types import CacheMode, CacheOutcome, CacheReport

log = logging.getLogger(__name__)

UNREADABLE = "what is on disk could not be read"


@dataclass(frozen=True, slots=True)
class Beside:
    """The seats in which other turns are under way."""

    seats: int = 0
    rows: tuple[int, ...] = ()
    """The most rows that each may come to have."""


class TurnStarter:
    """Finds the start of a turn and brings the engine there."""

    def __init__(
        self,
        info: EngineInfo,
        store: ConversationStore | None,
        disk: DiskWorker | None,
        costs: CostMeter,
        monotonic: Callable[[], float],
    ) -> None:
        self._info = info
        self._store = store
        self._disk = disk
        self._costs = costs
        self._monotonic = monotonic

    async def find_start(
        self, turn: Turn, lives: Sequence[LiveConversation], beside: Beside
    ) -> tuple[Start, str, float]:
        """Decides how to start, and promotes what is needed from disk to RAM; goes without it if that fails. The
        start's `seat` says in which of `lives` the turn goes on, `beside` what the other seats have.

        Returns the start, why the rest of the prompt is read, and the seconds that the disk took.
        """
        start, why = self._decide(turn, lives, beside)
        if not start.is_on_disk:
            return start, why, 0.0
        began_s = self._monotonic()
        await self._promote(start)
        start, why = self._decide(turn, lives, beside)
        if start.is_on_disk:
            start, why = self._decide(turn, lives, beside, on_disk=False)
            why = why or UNREADABLE
        return start, why, self._monotonic() - began_s

    def foresee(self, turn: Turn, lives: Sequence[LiveConversation]) -> None:
        """Notes what the start of a waiting turn would cost now. Without state here, all cost the same: everything is
        read."""
        if not self._info.holds_state:
            return
        start, _ = self._decide(turn, lives)
        turn.start_cost_s = start.cost_s(len(turn.prompt), self._costs.measured)

    def position(self, turn: Turn, lives: Sequence[LiveConversation]) -> int:
        """From where a turn could start now, in one of the seats `lives`."""
        return self._decide(turn, lives)[0].position

    async def read_ahead(self, turn: Turn, lives: Sequence[LiveConversation], is_waiting: Callable[[], bool]) -> float:
        """Promotes what a turn would start from, and keeps it in RAM until the turn starts. Returns the seconds that
        this took."""
        if not is_waiting() or self._disk is None:
            return 0.0
        began_s = self._monotonic()
        try:
            start, _ = self._decide(turn, lives)
            if start.is_on_disk:
                await self._promote(start)
                if is_waiting() and self._store is not None:
                    turn.release_awaited()
                    turn.release_awaited = self._store.expect(turn.prompt.key.digest, turn.prompt.prefix_hashes)
        except Exception:
            log.exception("reading ahead from disk for request %s failed unexpectedly", turn.request_id)
        return self._monotonic() - began_s

    async def _promote(self, start: Start) -> None:
        assert self._disk is not None
        assert start.parked is not None
        await self._disk.promote(start.parked.id, start.position)

    def _decide(
        self, turn: Turn, lives: Sequence[LiveConversation], beside: Beside | None = None, *, on_disk: bool = True
    ) -> tuple[Start, str]:
        """The start, and why the rest of the prompt is read. `on_disk`: also consider what is only on disk."""
        prompt, store, info, beside = turn.prompt, self._store, self._info, beside or Beside()
        reuses = turn.request.cache.mode is not CacheMode.OFF
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        candidates = [parked for parked, _ in store.candidates(key_digest, hashes)] if store is not None else []
        asked = turn.request.max_output_tokens
        limit = ANSWER_TOKENS if asked is None else asked
        seats = lives if info.holds_state else lives[:1]  # all are alike, and there may be hundreds
        start = decide_start(
            prompt,
            [live.seated for live in seats],
            candidates,
            reuses=reuses,
            layout=info.layout,
            cost=self._costs.measured,
            on_disk=on_disk,
            has_spare=info.live_conversations > len(lives) + beside.seats,
            row_tokens=max(1, rows_left(info.row_tokens, beside.rows, info.layout.block_tokens))
            * bool(info.row_tokens),
            answer_tokens=min(limit, ANSWER_TOKENS, max(0, (info.most_units or limit + len(prompt)) - len(prompt))),
        )
        if (
            not info.holds_state
        ):  # what it reuses, only the server knows; where the prompt leaves an earlier one is seen
            own = None if turn.own_nearest is None else turn.own_nearest()
            told = start if own is None else as_known_to_key(prompt, start, own.units)
            return replace(start, nearest=told.nearest), differs(prompt, told, info.unit)
        if not reuses:
            return start, NOT_ASKED
        if turn.own_nearest is None:
            told, beyond = start, hashes[start.common // info.layout.block_tokens :]
            gone = store.why_gone(key_digest, beyond) if store is not None else ""
        else:  # nobody is told when and why another key's conversation went
            own = turn.own_nearest()
            told = as_known_to_key(prompt, start, own.units)
            gone = OWN_GONE if own.kept_tokens > start.common else ""
        why, lacking = explain(prompt, told, gone), info.parked_state_lacks
        if lacking and why and told.position < told.common:
            why = f"{why}; {lacking}"
        return replace(start, nearest=told.nearest), why

    async def start(
        self,
        turn: Turn,
        live: LiveConversation,
        start: Start,
        why: str,
        leaving: Sequence[LiveConversation] = (),
        *,
        is_alone: bool = True,
    ) -> tuple[CacheReport, float]:
        """Brings `live` to the start's position, or, for a turn that is alone, to the prompt's end if the engine could
        read it meanwhile; those `leaving` make way. Starts cold if a restore fails.

        Returns the report and the seconds of the restore. Raises EngineFailure; ConversationGone if what was to be
        restored is not there any more: nothing has changed then.
        """
        began_s = self._monotonic()
        tail = PromptTail(turn.prompt, start.common, turn.request.steering, turn.request.adapters)
        is_damaged = why == UNREADABLE
        try:
            restore_s = await live.start_from(start, turn.prompt.key, tail if is_alone else None, leaving)
        except RestoreFailed as failed:
            start, why, is_damaged = cold_start(), f"restore failed: {failed.message}", True
            await live.start_from(start, turn.prompt.key, leaving=leaving)
            restore_s = self._monotonic() - began_s
        assert live.rows.position in (start.position, tail.stop)
        # What every conversation shares is no part of this one: who has said nothing of it before calls it cold.
        outcome = start.outcome if start.position > turn.prompt.template_tokens else CacheOutcome.COLD
        return CacheReport(outcome, len(turn.prompt), start.position, why, is_damaged=is_damaged), restore_s

    @contextmanager
    def trusting(self, start: Start, live: LiveConversation) -> Iterator[None]:
        """A context in which tokens are generated from the state of `start`. If that state gives no finite logits, the
        parked conversation it was restored from is dropped: every repetition would fail in the same way."""
        try:
            yield
        except LogitsNotFinite:
            if start.parked is not None and self._store is not None and live.rows.position == 0:
                self._store.drop(start.parked.id, "its state gave no finite logits")
            raise
