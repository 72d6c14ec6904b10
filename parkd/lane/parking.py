"""Moves state between the arenas and the store. All changes of the live conversation are made here.

Used only by the lane's running turn. Engine calls run on the engine's thread; the store is only used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from parkd.engine_adapter.base import BLOCK_TOKENS, CaptureInFlight, Engine, OverlappingEngine, RemoteEngine, WholeState
from parkd.errors import EngineFailure, EngineLost, RestoreFailed
from parkd.identity.chain import prefix_hashes
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.engine_thread import EngineThread
from parkd.lane.live_engine import LiveEngine
from parkd.lane.live_rows import LiveRows, restored
from parkd.lane.metrics import Metrics
from parkd.lane.prompt_tail import PromptTail, read_while_restoring
from parkd.lane.start import Start
from parkd.state import Checksums, Resume, StateSizes
from parkd.store.records import Capture, CaptureRequest, ConversationGone, Lease, Parked, RefusalReason, Refused
from parkd.store.store import ConversationStore
from parkd.types import CacheOutcome, CacheReport, ConversationKey, PromptIdentity, SamplingParams, TokenMask

log = logging.getLogger(__name__)

WRITE_WAIT_S = 10.0
"""Longest wait for writes to disk to free the room that a capture needs. After that, the conversation is not parked."""
_WAITING = (RefusalReason.BUDGET, RefusalReason.SLOTS, RefusalReason.BUSY)


@dataclass(eq=False)
class BackgroundPark:
    """A capture whose copy goes on while the next turn runs."""

    capture: Capture
    in_flight: CaptureInFlight
    live: LiveRows
    """The live conversation when the capture began."""
    began_s: float
    intact: int
    """Rows `[0, intact)` in the arenas have not changed since the capture began."""
    task: asyncio.Task[None] | None = None


class LiveState(LiveEngine):
    """The live state, with captures into the store and restores from it."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        store: ConversationStore | None,
        metrics: Metrics,
        costs: CostMeter,
        monotonic: Callable[[], float],
        disk: DiskWorker | None = None,
    ) -> None:
        super().__init__(engine, thread)
        self._disk = disk
        self._background: BackgroundPark | None = None
        self._store = store
        self._metrics = metrics
        self._costs = costs
        self._monotonic = monotonic

    def _rows_lost(self, kept: int) -> None:
        """Called when live rows from `kept` on change: a capture in progress no longer matches them there."""
        if self._background is not None:
            self._background.intact = min(self._background.intact, kept)

    async def begin(self, start: Start, key: ConversationKey, tail: PromptTail | None = None) -> float:
        """Carries out `start`: parks what would be lost, then restores, truncates or resets.

        During a restore, the engine may also read `tail` if that saves time; the position is then at its end. Returns
        the seconds of the restore. Raises RestoreFailed, after which the parked conversation is dropped and the engine
        is empty, and EngineFailure.
        """
        if start.parked is None:
            await self._park_before_loss(start.keep_rows)
            self._check_kept(start.keep_rows)
            if start.position == 0:
                await self.reset()
            elif start.keep_rows < self.conversation.position:
                await self.truncate(start.keep_rows)
            return 0.0
        assert self._store is not None
        # Leased first, because parking the live conversation could otherwise evict the one to be restored.
        try:
            held = self._store.lease(start.parked.id, start.position, start.keep_rows)
        except ConversationGone as gone:
            raise RestoreFailed("The parked conversation was removed a moment ago.") from gone
        with held as lease:
            await self._park_before_loss(start.keep_rows)
            self._check_kept(start.keep_rows)
            try:
                return await self._restore(lease, start.parked, start.source, key, tail)
            except RestoreFailed as error:
                failed = error
        log.warning("a restore failed, so the turn reads its prompt cold: %s", failed.message)
        self._metrics.restore_failures.inc()
        self.conversation = LiveRows()
        self._store.drop(start.parked.id, failed.message)
        raise failed

    async def begin_prompt(
        self,
        start: Start,
        report: CacheReport,
        prompt: PromptIdentity,
        sampling: SamplingParams,
        mask: TokenMask | None,
        limit: int | None,
    ) -> CacheReport:
        """Sends the prompt to an engine in another process, and corrects the report by the number of tokens that the
        process really reuses. Does nothing for other engines.

        If the process reuses less than was restored, the parked conversation is dropped, since restoring it again would
        not help. The prompt is proved when this returns. Raises EngineFailure, InvalidRequest, and the proof's errors.
        """
        engine = self.engine
        if not isinstance(engine, RemoteEngine):
            assert prompt.proof is None, "an engine in this process renders its own prompts"
            return report
        promised = self.conversation.position
        position, reached = await self._call_and_refresh(_begin_and_prove, engine, prompt, sampling, mask, limit)
        await self._reconcile(reached)
        if position >= promised:
            return report
        why = f"the engine still held {position} of the {promised} tokens that were expected"
        if start.parked is not None and self._store is not None:
            self._metrics.restore_failures.inc()
            self._store.drop(start.parked.id, why)
        outcome = report.outcome if position else CacheOutcome.COLD
        return replace(report, outcome=outcome, reused_tokens=position, why="; ".join(filter(None, (report.why, why))))

    async def park(self) -> None:
        """Copies the live state into the store, as far as the store does not hold it. Changes nothing if the store
        refuses or the copy fails.

        If the engine can overlap the copy with other work, this returns once the copy has begun; `settle` waits for its
        end. Raises EngineLost.
        """
        await self.settle()
        live, store = self.conversation, self._store
        if store is None or live.key is None or live.position == 0:
            return
        if live.parked_id is not None and store.get(live.parked_id) is not None:
            store.touch(live.parked_id)
            return
        try:
            await self.checkpoint()
            checkpoints, sizes = await self._checkpoints_to_park(live.position)
        except EngineLost:
            raise
        except EngineFailure as error:
            log.warning("not parked: taking a checkpoint failed: %s", error.message)
            await self.check()
            return
        capture = await self._reserve(
            store,
            CaptureRequest(
                key_digest=live.key.digest,
                units=live.units,
                prefix_hashes=prefix_hashes(live.units, live.key.digest, BLOCK_TOKENS),
                lineage=live.lineage,
                layout_digest=self.engine.info.layout.digest,
                checkpoints=checkpoints,
                rewindable=not self.engine.info.layout.resume.needs_checkpoints,
                namespace=live.key.namespace,
                sizes=sizes,
                covered=live.covered,
            ),
        )
        if isinstance(capture, Refused):
            if capture.reason is RefusalReason.OFF:
                return
            self._metrics.refusals.labels(capture.reason.value).inc()
            log.info("not parked (%d tokens): %s", live.position, capture.message)
            return
        began_s = self._monotonic()
        try:
            in_flight = await self._start_capture(capture)
            if in_flight is not None:
                self._background = BackgroundPark(capture, in_flight, live, began_s, intact=live.position)
                self._background.task = asyncio.create_task(self._finish(store, self._background))
                return
            checksums = await self.call(self.engine.capture, capture.transfer)
        except Exception as error:  # Not on cancellation, when the server ends: the engine may still be writing.
            store.abort(capture)
            if isinstance(error, EngineFailure) and not isinstance(error, EngineLost):
                log.warning("not parked: the copy failed: %s", error.message)
                return
            raise
        parked = self._commit(store, capture, checksums, began_s)
        self.conversation = live.captured(parked.blocks, parked.position, parked.id)

    async def _checkpoints_to_park(self, position: int) -> tuple[tuple[int, ...], StateSizes | None]:
        """The checkpoints to park, and the sizes of an opaque state (None for rows). The checkpoint at the end of an
        opaque state takes no bytes of its own: the whole state includes it."""
        places = tuple(place for place in self.checkpoints if place <= position)
        if not isinstance(self.engine, WholeState):
            return places, None
        resume = self.engine.info.layout.resume
        inner = tuple(place for place in places if place < position) if resume is Resume.AT_CHECKPOINTS else ()
        sizes = await self.call(self.engine.state_sizes, inner)
        if not resume.needs_checkpoints:
            return (), sizes
        return (*inner, position), StateSizes(sizes.whole, (*sizes.checkpoints, 0))

    async def _reserve(self, store: ConversationStore, request: CaptureRequest) -> Capture | Refused:
        """Reserves room for a capture. Conversations that wait to be written to disk cannot be evicted. If they hold
        the room, waits for their writes, at most `WRITE_WAIT_S`."""
        until_s = self._monotonic() + WRITE_WAIT_S
        while True:
            capture = store.begin_capture(request)
            if not isinstance(capture, Refused) or capture.reason not in _WAITING or self._disk is None:
                return capture
            if not await self._disk.room(until_s - self._monotonic()):
                return capture

    async def settle(self) -> None:
        """Waits until the capture in progress, if there is one, is committed or aborted."""
        if self._background is not None and self._background.task is not None:
            await self._background.task

    async def _start_capture(self, capture: Capture) -> CaptureInFlight | None:
        if not isinstance(self.engine, OverlappingEngine):
            return None
        return await self.call(self.engine.start_capture, capture.transfer)

    async def _finish(self, store: ConversationStore, background: BackgroundPark) -> None:
        """Waits for the copy and commits it. Live rows that have not changed since it began now descend from its
        blocks, unless a restore has made more rows descend from others."""
        capture = background.capture
        try:
            checksums = await asyncio.to_thread(background.in_flight.wait)
        except Exception as error:
            # If the device is lost, the next engine call fails too, and its turn gets the error.
            self._background = None
            store.abort(capture)
            log.warning("not parked: the copy failed: %s", error)
            return
        parked = self._commit(store, capture, checksums, background.began_s)
        self._background = None
        covered = min(background.intact, parked.position)
        if covered < parked.position:
            covered = covered // BLOCK_TOKENS * BLOCK_TOKENS
        live = self.conversation
        if covered > live.covered or covered == live.position == parked.position:
            self.conversation = live.captured(parked.blocks, covered, parked.id)

    def _commit(self, store: ConversationStore, capture: Capture, checksums: Checksums, began_s: float) -> Parked:
        self._metrics.moved("park", capture.transfer.bytes, self._monotonic() - began_s)
        parked = store.commit(capture, checksums)
        if not capture.is_whole:
            position = len(capture.request.units)
            self._metrics.refusals.labels("parked in part").inc()
            log.info("parked the first %d of %d tokens: the budget holds no more", parked.position, position)
        return parked

    async def _park_before_loss(self, keep_rows: int) -> None:
        background = self._background
        if background is not None and background.live is self.conversation and background.capture.is_whole:
            return  # Every row is being copied already, and the engine overwrites no row before it is copied.
        if keep_rows < self.conversation.position:
            await self.park()

    def _check_kept(self, keep_rows: int) -> None:
        """Raises RestoreFailed if a failure while parking lost live rows that the start keeps."""
        if self.conversation.position < keep_rows:
            raise RestoreFailed("The live state was lost while it was parked.")

    def _restore_rows(self, lease: Lease, tail: PromptTail | None) -> int:
        """Restores, and reads `tail` meanwhile if possible. Returns the position reached. Runs on the engine's
        thread."""
        if tail is None or not read_while_restoring(self.engine, lease, tail):
            self.engine.restore(lease.transfer)
        return self.engine.position

    async def _restore(
        self, lease: Lease, parked: Parked, outcome: CacheOutcome, key: ConversationKey, tail: PromptTail | None
    ) -> float:
        transfer = lease.transfer
        began_s = self._monotonic()
        position = await self.call(self._restore_rows, lease, tail)
        if position not in (lease.stop, lease.stop if tail is None else tail.stop):
            await self.reset()
            raise RestoreFailed(f"the engine is at {position} after a restore to {lease.stop}")
        took_s = self._monotonic() - began_s
        whole = lease.stop == parked.position
        await self._refresh()
        self._rows_lost(transfer.start)
        is_opaque = self.engine.info.layout.is_opaque
        parked_id = parked.id if whole else None
        self.conversation = restored(key, parked.units, lease.lineage, lease.stop, parked_id, is_opaque=is_opaque)
        if position > lease.stop and tail is not None:
            await self.advance(key, tail.prompt.units)
        self._metrics.moved("restore", transfer.bytes, took_s)
        self._costs.note_move(outcome, transfer.bytes, took_s)
        return took_s


def _begin_and_prove(
    engine: RemoteEngine, prompt: PromptIdentity, sampling: SamplingParams, mask: TokenMask | None, limit: int | None
) -> int:
    """Sends the prompt, then proves it, in one call on the engine's thread: the process reads the prompt during the
    proof."""
    position = engine.begin_prompt(prompt.token_ids, sampling, mask, limit)
    if prompt.proof is not None:
        prompt.proof()
    return position
