"""A live conversation: the engine's seat that holds its state, what that state means, and its moves to and from the
store.

    start_from -> begin -> (the turn reads and generates, then `advance`) -> check -> park
                            set_aside -> (other turns) -> take_up

Used only by the turn that has the seat, or by one that takes a seat. Engine calls run on the engine's thread; `rows`
changes, and the store is used, only on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from parkd.engine_adapter.base import CaptureInFlight, Seat
from parkd.errors import EngineFailure, EngineLost, ParkdError, RestoreFailed
from parkd.identity.chain import prefix_hashes
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.live_rows import LiveRows, restored
from parkd.lane.metrics import Metrics
from parkd.lane.prompt_tail import PromptTail, read_while_restoring
from parkd.lane.start import NO_STATE, Seated, Start, restore_of
from parkd.lane.thread.engine_thread import EngineThread
from parkd.lane.thread.work import Work
from parkd.lane.turn import Pauses, Turn
from parkd.state import Checksums, Resume, StateSizes, Transfer
from parkd.store.records import (
    Capture,
    CaptureRequest,
    ConversationGone,
    ConversationId,
    Lease,
    Parked,
    RefusalReason,
    Refused,
    Tier,
)
from parkd.store.store import ConversationStore
from parkd.types import CacheOutcome, CacheReport, ConversationKey, Units

log = logging.getLogger(__name__)

WRITE_WAIT_S = 10.0
"""Longest wait for writes to disk to free the room that a capture needs. After that, the conversation is not parked."""
_WAITING = (RefusalReason.BUDGET, RefusalReason.SLOTS, RefusalReason.BUSY)

P = ParamSpec("P")
T = TypeVar("T")
NoteParked = Callable[[ConversationId | None], None]


def _no_note(_parked: ConversationId | None) -> None:
    pass


@dataclass(eq=False)
class BackgroundCapture:
    """A capture whose copy goes on while the next turn runs."""

    capture: Capture
    in_flight: CaptureInFlight
    rows: LiveRows
    """The live rows when the capture began."""
    began_s: float
    intact: int
    """Rows `[0, intact)` in the arenas have not changed since the capture began."""
    note: NoteParked
    """Called with the id of what was parked when the copy has ended; None: nothing was."""
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class BeginningCapture:
    """A capture of the beginning of what is live, while the turn that has the seat goes on."""

    intact: int
    """As of `BackgroundCapture`."""


@dataclass(eq=False)
class SetAside:
    """A live conversation whose turn is paused: parked whole, at exactly its position, and kept there."""

    rows: LiveRows
    """The live rows at the pause. As long as they are those of the seat, nothing has touched it."""
    parked_id: ConversationId
    put_back: Callable[[Seat], None]
    """Gives a seat the prompt and the answer that were under way; on the engine's thread."""
    release: Callable[[], None]
    """Ends that the store keeps it. Idempotent."""
    is_private: bool
    """Parked under a key of its own, for a turn of which nothing is kept; dropped at its release."""

    @property
    def position(self) -> int:
        return self.rows.position


class LiveConversation:
    """What is live in one seat of the engine. `rows` and the seat's position always agree between two calls."""

    def __init__(
        self,
        seat: Seat,
        thread: EngineThread,
        store: ConversationStore | None,
        metrics: Metrics,
        costs: CostMeter,
        monotonic: Callable[[], float],
        disk: DiskWorker | None = None,
    ) -> None:
        self.seat = seat
        self.checkpoints: tuple[int, ...] = ()
        """Positions below `rewind_floor` that the live state can be cut to, as of the last engine call. From
        `rewind_floor` on, it can be cut anywhere."""
        self.rewind_floor = 0
        self._rows = self._no_rows()
        self._thread = thread
        self._store = store
        self._metrics = metrics
        self._costs = costs
        self._monotonic = monotonic
        self._disk = disk
        self._background: BackgroundCapture | None = None
        self._beginnings: list[BeginningCapture] = []
        self._is_unwanted = False

    @property
    def rows(self) -> LiveRows:
        """What the rows in the seat mean."""
        return self._rows

    @property
    def seated(self) -> Seated:
        return Seated(self._rows, self.checkpoints, self.rewind_floor)

    def _no_rows(self) -> LiveRows:
        return LiveRows(block_tokens=self.seat.info.layout.block_tokens)

    def _set_rows(self, rows: LiveRows, unchanged: int | None = None) -> None:
        """`[0, unchanged)` are as they were; None: all of `rows`. A capture in progress does not match the others."""
        self._rows = rows
        if rows.position == 0:
            self.checkpoints, self.rewind_floor = (), 0
        kept = rows.position if unchanged is None else min(unchanged, rows.position)
        for capture in (self._background, *self._beginnings):
            if capture is not None:
                capture.intact = min(capture.intact, kept)

    # -- the engine's position --

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One engine call. Raises only ParkdError: after any other error the seat is reset and EngineFailure
        raised."""
        return await self._valid(self._thread.run(function, *args, **kwargs))

    async def work(self, work: Work[T]) -> T:
        """Engine calls between which others may come. Raises as `call` does."""
        return await self._valid(self._thread.work(work))

    @property
    def is_shared(self) -> bool:
        """Whether others wait for the engine's thread; asked there."""
        return self._thread.is_shared

    async def _valid(self, called: Coroutine[Any, Any, T]) -> T:
        try:
            return await called
        except ParkdError:
            raise
        except Exception as error:
            log.exception("the engine raised an unexpected error and is reset")
            await self.reset()
            raise EngineFailure(
                "The engine failed unexpectedly; the server's log has the details. Try again."
            ) from error

    async def advance(self, key: ConversationKey, units: Units) -> None:
        """Adopts the engine's position after it read from `units`. Resets the engine if that position is impossible."""
        position = await self._refresh()
        if position > len(units):
            log.error("the engine is at %d but only %d tokens are known; it is reset", position, len(units))
            await self.reset()
            return
        self._set_rows(self._rows.advance(key, units, position))

    async def check(self) -> None:
        """Called after what may have lost live state: keeps only what the engine still holds."""
        await self._reconcile(await self._refresh())

    async def truncate(self, position: int) -> None:
        try:
            await self._call_and_refresh(_cut, self.seat, position)
        except RestoreFailed:  # it is empty now
            self._set_rows(self._no_rows())
            raise
        self._set_rows(self._rows.truncate(position))

    async def checkpoint(self) -> None:
        """Takes a checkpoint at the engine's position, if the model has fixed state."""
        if self.seat.info.layout.resume.needs_checkpoints and self._rows.position not in self.checkpoints:
            await self._call_and_refresh(self.seat.checkpoint)

    async def reset(self) -> None:
        """Empties the seat. Raises EngineLost if that fails."""
        self._set_rows(self._no_rows())
        try:
            await self._thread.run(self.seat.reset)
        except Exception as error:
            raise EngineLost("The engine cannot be made valid again; the server stops.") from error

    def discard(self) -> None:
        """What is live now is to be forgotten. The seat belongs to the lane, so it is emptied by `empty_if_unwanted`;
        until then nothing of it is parked."""
        self._is_unwanted = self._rows.position > 0

    @property
    def is_unwanted(self) -> bool:
        return self._is_unwanted

    async def empty_if_unwanted(self) -> None:
        """Empties the seat if its content was discarded: called when a turn begins. Raises EngineLost."""
        if self._is_unwanted:
            await self.settle()
            self._is_unwanted = False
            await self.reset()

    async def forget(self, keep_rows: int) -> None:
        """Cuts the live state to `keep_rows`, or to the last position before it that it can be cut to."""
        position = self._rows.position
        kept = keep_rows
        if keep_rows < min(position, self.rewind_floor):
            kept = max((place for place in self.checkpoints if place <= keep_rows), default=0)
        if kept == 0:
            await self.reset()
        elif kept < position:
            await self.truncate(kept)

    async def _reconcile(self, position: int) -> None:
        """Cuts the rows to the engine's `position`; resets the engine if it claims more than is known."""
        if position > self._rows.position:
            await self.reset()
        elif position < self._rows.position:
            self._set_rows(self._rows.truncate(position))

    async def _refresh(self) -> int:
        """Asks the engine for its checkpoints and rewind floor. Returns its position."""
        _, position = await self._call_and_refresh(lambda: None)
        return position

    async def _call_and_refresh(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
        """Calls `function`, then reads the engine's position, checkpoints and rewind floor in the same visit to its
        thread.

        Returns the result and the position.
        """

        def both() -> tuple[T, int, tuple[int, ...], int]:
            result, seat = function(*args, **kwargs), self.seat
            return result, seat.position, seat.checkpoints, seat.rewind_floor

        result, position, self.checkpoints, self.rewind_floor = await self.call(both)
        return result, position

    # -- the start of a turn --

    async def start_from(
        self,
        start: Start,
        key: ConversationKey,
        tail: PromptTail | None = None,
        leaving: Sequence[LiveConversation] = (),
    ) -> float:
        """Carries out `start`: parks what would be lost, here and of those that are `leaving` their seats for it, then
        restores, truncates or resets.

        During a restore, the engine may also read `tail` if that saves time; the position is then at its end. Returns
        the seconds of the restore. Raises ConversationGone, with nothing changed, if another turn's state took the
        place of what was to be restored since that was decided; RestoreFailed, after which the parked conversation is
        dropped and the engine is empty; EngineFailure.
        """
        if start.parked is None:
            for other in leaving:
                await other.leave()
            await self._park_before_loss(start.keep_rows)
            self._check_kept(start.keep_rows)
            if start.position == 0:
                await self.reset()
            elif start.keep_rows < self._rows.position:
                await self.truncate(start.keep_rows)
            return 0.0
        assert self._store is not None
        # Leased first, because parking the live conversation could otherwise evict the one to be restored.
        with self._store.lease(start.parked.id, start.position, start.keep_rows) as lease:
            for other in leaving:
                await other.leave()
            await self._park_before_loss(start.keep_rows)
            self._check_kept(start.keep_rows)
            try:
                return await self._restore(lease, start.parked, start.source, key, tail)
            except RestoreFailed as error:
                failed = error
        log.warning("a restore failed, so the turn reads its prompt cold: %s", failed.message)
        self._metrics.restore_failures.inc()
        self._set_rows(self._no_rows())
        self._store.drop(start.parked.id, failed.message)
        raise failed

    async def leave(self) -> None:
        """Parks what the store does not hold, and empties the seat."""
        await self._park_before_loss(0)
        await self.reset()

    async def begin(self, turn: Turn, limit: int | None, start: Start, report: CacheReport) -> CacheReport:
        """Tells the engine the turn's steering and its whole prompt, and corrects the report by the number of tokens
        that the engine really reuses.

        If that are fewer than were restored, the parked conversation is dropped, since restoring it again would not
        help; not if the engine goes on near where it was told, or was told to go on inside the state, which may be of
        use to another prompt. The prompt is proved when this returns. What was parked for the start was copied, not
        computed, so this steering cannot have touched it. Raises EngineFailure, InvalidRequest, and the proof's errors.
        """
        promised = self._rows.position
        position, reached = await self._call_and_refresh(_begin_and_prove, self.seat, turn, limit)
        await self._reconcile(reached)
        if position >= promised:
            return report
        outcome = report.outcome if position else CacheOutcome.COLD
        is_inside = start.parked is None or promised < start.parked.position
        if self.seat.info.resumes_near and (position > 0 or is_inside):
            why = f"{NO_STATE} between tokens {position} and {promised}"
            why = "; ".join(filter(None, (why, report.why)))
            return replace(report, outcome=outcome, reused_tokens=position, why=why)
        why = f"the engine still held {position} of the {promised} tokens that were expected"
        if start.parked is not None and self._store is not None:
            self._metrics.restore_failures.inc()
            self._store.drop(start.parked.id, why)
        why = "; ".join(filter(None, (report.why, why)))
        return replace(report, outcome=outcome, reused_tokens=position, why=why, is_damaged=True)

    def _check_kept(self, keep_rows: int) -> None:
        """Raises RestoreFailed if a failure while parking lost live rows that the start keeps."""
        if self._rows.position < keep_rows:
            raise RestoreFailed("The live state was lost while it was parked.")

    async def _restore(
        self, lease: Lease, parked: Parked, source: CacheOutcome, key: ConversationKey, tail: PromptTail | None
    ) -> float:
        transfer = lease.transfer
        began_s = self._monotonic()
        position = await self.call(_restore_rows, self.seat, lease, tail)
        if position not in (lease.stop, lease.stop if tail is None else tail.stop):
            await self.reset()
            raise RestoreFailed(f"the engine is at {position} after a restore to {lease.stop}")
        took_s = self._monotonic() - began_s
        await self._refresh()
        parked_id = parked.id if lease.stop == parked.position else None
        is_opaque = self.seat.info.layout.is_opaque
        size = self.seat.info.layout.block_tokens
        rows = restored(key, parked.units, lease.lineage, lease.stop, parked_id, is_opaque=is_opaque, block_tokens=size)
        self._set_rows(rows, unchanged=transfer.start)
        if position > lease.stop and tail is not None:
            await self.advance(key, tail.prompt.units)
        self._metrics.moved("restore", transfer.bytes, took_s)
        self._costs.note_move(source, transfer.bytes, took_s)
        return took_s

    # -- captures into the store --

    async def park(
        self, note: NoteParked = _no_note, passing: Sequence[int] = (), *, pause: Pauses | None = None
    ) -> None:
        """Copies the live state into the store, as far as the store does not hold it. Changes nothing if the store
        refuses or the copy fails. `passing` are positions at which the turn was paused before, whose checkpoints nobody
        needs any more; `pause` says that it is paused now.

        If the engine can overlap the copy with other work, this returns once the copy has begun; `settle` waits for its
        end. `note` is called with the id of what is parked of the live state, when that is known; with None if nothing
        is. Raises EngineLost.
        """
        await self.settle()
        rows, store = self._rows, self._store
        if store is None or rows.key is None or rows.position == 0:
            note(None)
            return
        if rows.parked_id is not None and store.get(rows.parked_id) is not None:
            store.touch(rows.parked_id)
            note(rows.parked_id)
            return
        try:
            await self.checkpoint()
            passing = tuple(place for place in passing if place < rows.position)
            checkpoints, sizes = await self._checkpoints_to_park(rows.position, passing)
        except EngineLost:
            raise
        except EngineFailure as error:
            log.warning("not parked: %s", error.message)
            await self.check()
            note(None)
            return
        digest = rows.key.digest if pause is None else pause.key_digest
        capture = await self._reserve(
            store,
            CaptureRequest(
                key_digest=digest,
                units=rows.units,
                prefix_hashes=prefix_hashes(rows.units, digest, rows.block_tokens),
                lineage=rows.lineage,
                layout_digest=self.seat.info.layout.digest,
                checkpoints=checkpoints,
                namespace=rows.key.namespace,
                sizes=sizes,
                covered=rows.covered,
                is_indivisible=pause is not None,
                is_returning=pause is not None,
                passing=passing,
            ),
        )
        if isinstance(capture, Refused):
            await self.call(self.seat.forget_sizes)
            note(None)
            if capture.reason is RefusalReason.OFF:
                return
            self._metrics.refusals.labels(capture.reason.value).inc()
            log.info("not parked (%d tokens): %s", rows.position, capture.message)
            return
        began_s = self._monotonic()
        try:
            copy = await self.call(_copy, self.seat, capture.transfer)
        except Exception as error:  # Not on cancellation, when the server ends: the engine may still be writing.
            store.abort(capture)
            if isinstance(error, EngineFailure) and not isinstance(error, EngineLost):
                log.warning("not parked: the copy failed: %s", error.message)
                note(None)
                return
            raise
        if not isinstance(copy, Checksums):
            self._background = BackgroundCapture(capture, copy, rows, began_s, rows.position, note)
            self._background.task = asyncio.create_task(self._finish(store, self._background))
            return
        if self._is_unwanted:
            store.abort(capture)
            note(None)
            return
        parked = self._commit(store, capture, copy, began_s)
        self._set_rows(rows.captured(parked.blocks, parked.position, parked.id))
        note(parked.id)

    async def park_beginning(self, key: ConversationKey, units: Units) -> bool:
        """Captures the beginning `units` of what is live, for another turn, while the one that has the seat goes on: it
        has read so far, though `rows` need not say so yet. The seat's rows then descend from what was captured, so that
        nothing is stored twice. Returns whether all of it is parked; if not, nothing has changed."""
        store, position, size = self._store, len(units), self._rows.block_tokens
        if store is None or self._rows.key not in (None, key):
            return False
        rows = self._rows.truncate(position) if position <= self._rows.position else self._rows
        rows = rows.advance(key, units, position)
        state = BeginningCapture(position)
        self._beginnings.append(state)
        try:
            reached, checkpoints = await self._thread.run(lambda: (self.seat.position, self.seat.checkpoints))
            places = tuple(place for place in checkpoints if place <= position)
            if reached < position or (self.seat.info.layout.resume.needs_checkpoints and position not in places):
                return False
            capture = await self._reserve(
                store,
                CaptureRequest(
                    key_digest=key.digest,
                    units=units,
                    prefix_hashes=prefix_hashes(units, key.digest, size),
                    lineage=rows.lineage,
                    layout_digest=self.seat.info.layout.digest,
                    checkpoints=places,
                    namespace=key.namespace,
                    covered=rows.covered,
                    is_indivisible=True,
                    is_returning=True,
                ),
            )
            if isinstance(capture, Refused):
                return False
            began_s = self._monotonic()
            try:
                copy = await self._thread.run(_copy, self.seat, capture.transfer)
                checksums = copy if isinstance(copy, Checksums) else await asyncio.to_thread(copy.wait)
            except Exception as error:  # the turn that has the seat is not harmed: nothing of it was written
                store.abort(capture)
                if isinstance(error, EngineLost):
                    raise
                log.warning("what a turn has read was not parked for another: %s", error)
                return False
            if state.intact < position or self._is_unwanted:
                store.abort(capture)
                return False
            parked = self._commit(store, capture, checksums, began_s)
        finally:
            self._beginnings.remove(state)
        known = self._rows if self._rows.position >= position else self._rows.advance(key, units, position)
        covered = position if known.position == position else position // size * size
        if covered > known.covered:
            self._set_rows(known.captured(parked.blocks, covered, parked.id))
        return True

    async def settle(self) -> None:
        """Waits until the capture in progress, if there is one, is committed or aborted."""
        if self._background is not None and self._background.task is not None:
            await self._background.task

    async def set_aside(self, pauses: Pauses) -> SetAside | None:
        """Parks the live state whole and keeps it for a turn that goes on from it. None, with nothing changed, if it
        cannot be parked so. Raises EngineLost."""
        position, before = self._rows.position, self.checkpoints
        await self.park(passing=pauses.positions, pause=pauses)
        await self.settle()
        rows, store = self._rows, self._store
        if store is None or rows.position != position or rows.parked_id is None:
            return None
        try:
            keep = store.keep(rows.parked_id)
        except ConversationGone:
            return None
        parked_id, put_back = rows.parked_id, await self.call(self.seat.set_aside)
        if position not in before:
            pauses.positions.append(position)
        parked = store.get(parked_id)
        is_private = parked is not None and rows.key is not None and parked.key_digest != rows.key.digest

        def release() -> None:
            keep()
            if is_private:
                store.drop(parked_id, "its turn asked to keep nothing")

        return SetAside(rows, parked_id, put_back, release, is_private)

    async def take_up(self, aside: SetAside) -> bool:
        """Makes live what was set aside, here or in another seat, from where it now is. False if it is lost: the seat
        is empty then. Raises EngineFailure."""
        await self.check()  # Another seat may have taken its rows.
        if self._rows is aside.rows:
            return True
        assert self._store is not None
        assert aside.rows.key is not None
        try:
            parked = self._store.get(aside.parked_id)
            if parked is not None and parked.tier is Tier.DISK and self._disk is not None:
                await self._disk.promote(parked.id, aside.position)
                parked = self._store.get(aside.parked_id)
            if parked is None or parked.tier is Tier.DISK:
                raise RestoreFailed("the state of a paused turn is gone")
            start = restore_of(parked, aside.position, 0, self._rows, self.seat.info.layout)
            await self.start_from(start, aside.rows.key)
        except (RestoreFailed, ConversationGone) as failed:
            log.warning("a paused turn reads its tokens again: %s", failed)
            await self.reset()
            return False
        return True

    async def _checkpoints_to_park(
        self, position: int, passing: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], StateSizes | None]:
        """The checkpoints to park, and the sizes of an opaque state (None for rows). The checkpoint at the end of an
        opaque state takes no bytes of its own: the whole state includes it."""
        places = tuple(place for place in self.checkpoints if place <= position and place not in passing)
        layout = self.seat.info.layout
        if not layout.is_opaque:
            return places, None
        at_checkpoints = layout.resume is Resume.AT_CHECKPOINTS
        inner = tuple(place for place in places if place < position) if at_checkpoints else ()
        sizes = await self.call(self.seat.state_sizes, inner)
        if not layout.resume.needs_checkpoints:
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

    async def _finish(self, store: ConversationStore, background: BackgroundCapture) -> None:
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
            background.note(None)
            return
        if self._is_unwanted:
            self._background = None
            store.abort(capture)
            background.note(None)
            return
        parked = self._commit(store, capture, checksums, background.began_s)
        self._background = None
        background.note(parked.id)
        covered = min(background.intact, parked.position)
        if covered < parked.position:
            covered = covered // self._rows.block_tokens * self._rows.block_tokens
        rows = self._rows
        if covered > rows.covered or covered == rows.position == parked.position:
            self._set_rows(rows.captured(parked.blocks, covered, parked.id))

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
        if background is not None and background.rows is self._rows and background.capture.is_whole:
            return  # Every row is being copied already, and the engine overwrites no row before it is copied.
        if keep_rows < self._rows.position:
            await self.park()


def steer_for(seat: Seat, turn: Turn) -> None:
    """Steers as the turn asks. For the engine's thread. Raises EngineFailure unless that is what its prompt's key
    says."""
    request = turn.request
    if seat.steer(request.steering, request.adapters) != turn.prompt.key.steering:
        raise EngineFailure(
            "The engine steers by another set of control vectors or adapters than was requested. Try again."
        )


def _begin_and_prove(seat: Seat, turn: Turn, limit: int | None) -> int:
    """Steers, tells the prompt, then proves it, in one call on the engine's thread: a process reads the prompt during
    the proof. Returns the position from which the engine starts."""
    steer_for(seat, turn)
    request, prompt = turn.request, turn.prompt
    position = seat.begin(
        prompt.token_ids,
        request.sampling,
        images=prompt.images,
        mask=turn.mask,
        schema=request.response_schema if seat.info.enforces_schemas else None,
        form=request.response_form if seat.info.enforces_schemas else None,
        limit=limit,
        request=request,
        cancel=turn.channel.cancel,
    )
    if prompt.proof is not None:
        prompt.proof()
    return position


def _cut(seat: Seat, position: int) -> None:
    """Truncates, unless the rows of a seat that is not held were taken for an answer in another a moment ago: then
    raises RestoreFailed."""
    if seat.position < position:
        raise RestoreFailed("The live state was lost a moment ago.")
    seat.truncate(position)


def _restore_rows(seat: Seat, lease: Lease, tail: PromptTail | None) -> int:
    """Restores, and reads `tail` meanwhile if that saves time. Returns the position reached."""
    if tail is None or not read_while_restoring(seat, lease, tail):
        seat.restore(lease.transfer)
    return seat.position


def _copy(seat: Seat, transfer: Transfer) -> CaptureInFlight | Checksums:
    """Copies the live state, or begins to, if the engine can do that while it works."""
    in_flight = seat.start_capture(transfer)
    return seat.capture(transfer) if in_flight is None else in_flight
