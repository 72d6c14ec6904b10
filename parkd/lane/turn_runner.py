"""One request's path through the lane.

    decide -> park what would be lost, restore -> read the rest -> generate -> Finished -> park behind the reply
                                                     |  ^           |  ^
                                                    pause: park, others run, restore

After a failed restore the prompt is read cold, and the client only waits longer. A failed engine call fails this
request and leaves valid state for the next. A lost engine ends the lane.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import numpy as np

from parkd.answers.base import OutputFormat, Parser
from parkd.answers.formats import call_ids
from parkd.answers.parser import make_parser
from parkd.answers.transcript import Transcript
from parkd.engine_adapter.base import Engine, Seat
from parkd.errors import Cancelled, EngineFailure, EngineLost, ParkdError
from parkd.identity.matcher import common_prefix, divergence_of
from parkd.identity.output_memory import Said
from parkd.lane.answer import Answer, AnswerLoop
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.forecast import Forecast
from parkd.lane.groups import Groups
from parkd.lane.joining import LEAST_TOKENS, Joint, common_tokens, is_worth_waiting, joint
from parkd.lane.lane import Lane
from parkd.lane.live_conversation import LiveConversation, SetAside, steer_for
from parkd.lane.metrics import Metrics
from parkd.lane.reading import Reading
from parkd.lane.reports.explain import diagnose, lasting_tokens
from parkd.lane.reports.roster import Roster
from parkd.lane.reports.told import told_report, told_timings
from parkd.lane.reports.turn_log import TurnLog
from parkd.lane.retention import Retention
from parkd.lane.returns import Returns
from parkd.lane.seating import AHEAD_TOKENS, ANSWER_TOKENS, first_rows, is_safe, most_rows
from parkd.lane.seats import Seats
from parkd.lane.start import Start, cold_start
from parkd.lane.turn import Pauses, Turn, output_limit
from parkd.lane.turn_starter import Beside, TurnStarter
from parkd.store.records import ConversationGone, ConversationId, name_of
from parkd.store.store import ConversationStore
from parkd.types import (
    CacheMode,
    CacheReport,
    DiagnosisKind,
    Event,
    Finished,
    FinishReason,
    Progress,
    PromptIdentity,
    Started,
    Timings,
    TokenIds,
    Told,
    TurnClass,
    Unit,
    Units,
)

log = logging.getLogger(__name__)
CALL_ID_BYTES = 12
ROOM_STEP_S = 0.25
"""How often an answer that waits for rows looks whether it is to be paused, or nobody reads it any more."""
START_LIMIT = 4
"""How often a turn looks for its start, if what it would restore goes before it is leased: turns beside it end, and
park more in its place. After that it reads cold."""
GONE = "what was parked went while the turn began"
_SEEN_HERE = (DiagnosisKind.CHANGED, DiagnosisKind.NOT_FOUND)
"""What can be told of a prompt without knowing what was reused."""


class TurnRunner:
    """Runs turns, as many at once as the lane is wide, each in a seat of its own: the lane's only caller of the engine
    and the store."""

    def __init__(
        self,
        engine: Engine,
        lives: Sequence[LiveConversation],
        store: ConversationStore | None,
        metrics: Metrics,
        costs: CostMeter,
        output: OutputFormat,
        *,
        max_output_tokens: int | None,
        monotonic: Callable[[], float],
        log: TurnLog,
        owners: int = 1,
        disk: DiskWorker | None = None,
        remember: Callable[[PromptIdentity, Sequence[int], Said], None] | None = None,
    ) -> None:
        """`lives` are those in the engine's seats; `owners`, how many keys there are."""
        self._engine = engine
        self.seats = Seats(lives)
        self._starter = TurnStarter(engine.info, store, disk, costs, monotonic)
        self._log = log
        self._remember = remember
        self.retention = None if store is None else Retention(store, owners=owners)
        self.roster = Roster()
        self.groups = None if store is None else Groups(store)
        self.returns = None if store is None else Returns(store, disk, metrics, monotonic)
        self._store = store
        self._metrics = metrics
        self._costs = costs
        self._output = output
        self._call_ids = call_ids(output.tools, lambda: secrets.token_hex(CALL_ID_BYTES))
        self._max_output_tokens = max_output_tokens
        self._monotonic = monotonic
        self.lane: Lane[Turn] | None = None
        """Where turns are paused; None: none is."""
        self._freed = anyio.Event()
        """Set when a turn has given back its rows, and then a new one."""
        self.forecast = Forecast(engine.info, costs, max_output_tokens)

    def may_join(self, turn: Turn, beside: Sequence[Turn]) -> bool:
        """Whether a turn can be under way beside others: steered as they are, and with room for all their rows."""
        if any(other.prompt.key.steering != turn.prompt.key.steering for other in beside):
            return False
        return self._fits(turn, self._rows_of(turn), beside)

    def _fits(self, turn: Turn, rows: int, beside: Sequence[Turn]) -> bool:
        """Whether a turn can have so many rows beside others, and all of them what they may come to need in the end."""
        info = self._engine.info
        if not info.row_tokens:
            return True
        turns = [(rows, self._most_rows(turn)), *((self._rows_of(each), self._most_rows(each)) for each in beside)]
        return is_safe(info.row_tokens, turns, info.layout.block_tokens)

    def _rows_of(self, turn: Turn) -> int:
        """The rows that a turn has for sure."""
        return turn.row_tokens or first_rows(len(turn.prompt), self._limit(turn), self._engine.info.context_tokens)

    def _most_rows(self, turn: Turn) -> int:
        return most_rows(len(turn.prompt), self._limit(turn), self._engine.info.context_tokens)

    def awaits(self, turn: Turn, begun: Sequence[Turn]) -> bool:
        """Whether a turn had better begin later, since one of those that have begun reads what it would."""
        joints = self._joints(turn, begun)
        if not is_worth_waiting(joints.values(), 0):
            return False
        position = self._starter.position(turn, self.seats.free or self.seats.all)
        return is_worth_waiting(joints.values(), position, self._saves)

    def _saves(self, start: int, stop: int) -> bool:
        """Whether restoring `stop` tokens takes less time than reading those from `start` on."""
        layout, costs = self._engine.info.layout, self._costs.measured
        moving_s = costs.moving_s(stop * layout.row_bytes + layout.fixed_bytes, from_disk=False)
        return moving_s < costs.reading_s(start, stop)

    def _joints(self, turn: Turn, begun: Sequence[Turn]) -> Mapping[Turn, Joint]:
        """From where a turn can go on behind what others read. Not from one of which nothing is to be kept."""
        info, joints = self._engine.info, dict[Turn, Joint]()
        if self._store is None or not info.holds_state or turn.request.cache.mode is CacheMode.OFF:
            return joints
        for other in begun:
            if other.request.cache.mode is not CacheMode.USE:
                continue
            if other not in turn.common:
                turn.common[other] = common_tokens(turn.prompt, other.prompt)
            places = other.places
            if places is None:
                places = checkpoints_to_take(other.prompt, 0, 0, info.ctx_checkpoints)
            is_behind = other.is_aside and other.kind is TurnClass.BATCH and turn.kind is not TurnClass.BATCH
            goes_on = not (is_behind or other.channel.cancel.is_set())
            joints[other] = joint(
                turn.prompt, turn.common[other], other.live_tokens, places, info.layout, goes_on=goes_on
            )
        return joints

    async def _park_joint(self, turn: Turn) -> None:
        """Parks what another turn under way has read and this one can go on from, unless it has something as good."""
        joints = self._joints(turn, self.seats.turns)
        other = max(joints, key=lambda each: joints[each].now, default=None)
        if other is None or joints[other].now < LEAST_TOKENS:
            return
        own_position = self._starter.position(turn, self.seats.free)
        position = joints[other].now
        if position - own_position < LEAST_TOKENS or not self._saves(own_position, position):
            return
        live = self._seat_of(other)
        if await live.park_beginning(other.prompt.key, other.prompt.units[:position]):
            self._metrics.joined.inc()

    def foresee(self, turn: Turn) -> None:
        """Notes what the start of a waiting turn would cost now, for the schedule."""
        self._starter.foresee(turn, self.seats.free or self.seats.all)

    async def prefetch(self, turn: Turn, is_waiting: Callable[[], bool]) -> None:
        """Promotes what a waiting turn would start from, and keeps it in RAM until the turn runs."""
        await self._starter.read_ahead(turn, self.seats.free or self.seats.all, is_waiting)

    async def run(self, turn: Turn) -> None:
        """Runs the turn: pushes its events, ends its channel, then parks. Raises only EngineLost."""
        turn.began_s = self._monotonic()
        turn.timings = Timings(wait_s=turn.began_s - turn.queued_s)
        self._metrics.waited(turn.kind, turn.timings.wait_s)
        error: ParkdError | None = None
        try:
            if self.retention is not None:
                self.retention.apply(turn.began_s)
            if self.returns is not None:
                self.returns.came(turn.prompt)
            if turn.channel.cancel.is_set():
                raise Cancelled("The client left before its turn came.")
            await self._answer(turn)
        except ParkdError as raised:
            error = raised
        except Exception as raised:
            log.exception("request %s failed unexpectedly", turn.request_id)
            error = EngineFailure("The request failed unexpectedly; the server's log has the details.")
            error.__cause__ = raised
        if error is not None:
            turn.channel.fail(error)
            if not isinstance(error, Cancelled):  # what a turn has read whose client left is kept
                turn.live_tokens = 0
        live = self.seats.of(turn)
        try:
            self._log.record(turn, error)
            self.forecast.note_answer(turn)
            if isinstance(error, EngineLost) or live is None:
                self._log.bill(turn)
            if isinstance(error, EngineLost):
                raise error
            if live is not None:
                self._log.note(turn, live.rows, error)
                await self._keep(turn, live)
        finally:
            self._give_back(turn)

    def _give_back(self, turn: Turn) -> None:
        """Frees the turn's seat and its rows."""
        self.seats.give_back(turn)
        freed, self._freed = self._freed, anyio.Event()
        freed.set()

    async def _refresh_free(self) -> None:
        """Learns what the free seats still hold. An engine that is another process may have lost its live state, and
        the rows of a seat may have been taken for an answer in another that grew longer than was foreseen. Raises
        EngineFailure, EngineLost."""
        is_awake, several = self._engine.is_awake, len(self.seats.all) > 1
        if not is_awake and self.seats.free:
            await self.seats.free[0].call(self._engine.awake)
        for live in self.seats.free if several or not is_awake else ():
            if live.rows.position:  # one that is empty has nothing to lose, and is asked nothing: there may be hundreds
                await live.check()
        for live in self.seats.free:
            await live.empty_if_unwanted()

    async def _holds_still(self, live: LiveConversation) -> bool:
        """Whether a seat that was just taken still holds what it did. Until then, its rows could be taken for an answer
        in another."""
        rows = live.rows
        if rows.position and len(self.seats.turns) > 1:
            await live.check()
        return live.rows is rows

    def _seat_of(self, turn: Turn) -> LiveConversation:
        live = self.seats.of(turn)
        assert live is not None, "a turn that runs has a seat"
        return live

    async def _begin(self, turn: Turn) -> tuple[LiveConversation, Start, CacheReport]:
        """Takes a seat and brings it to where the turn starts."""
        disk_s = 0.0
        if self.seats.turns:  # others need not wait for the disk with this one
            disk_s = await self._starter.read_ahead(turn, self.seats.free or self.seats.all, lambda: True)
        async with self.seats.changing:
            for attempt in range(START_LIMIT):
                try:
                    live, start, report, restore_s, from_disk_s = await self._start(
                        turn, anew=attempt + 1 == START_LIMIT
                    )
                    break
                except ConversationGone:  # a turn that ended has parked more, in place of what this one would restore
                    self.seats.give_back(turn)
        turn.release_awaited()
        turn.common.clear()
        report = await live.begin(turn, self._limit(turn), start, report)
        turn.live_tokens = live.rows.position
        if self.lane is not None:
            self.lane.look_again()
        turn.timings = dataclasses.replace(turn.timings, restore_s=restore_s + from_disk_s + disk_s)
        return live, start, report

    async def _start(self, turn: Turn, *, anew: bool) -> tuple[LiveConversation, Start, CacheReport, float, float]:
        """Takes a free seat and makes live there what the turn starts from; `anew`: nothing that is parked. Returns the
        seat, the start, the report, and the seconds of the restore and of the disk. Raises ConversationGone if what was
        to be restored went meanwhile, and EngineFailure."""
        while True:  # ends: a seat that was emptied is taken as one that is empty
            await self._refresh_free()
            await self._park_joint(turn)
            turns, free = self.seats.turns, self.seats.free
            beside = Beside(len(turns), tuple(map(self._rows_of, turns)) if self._engine.info.row_tokens else ())
            start, why, from_disk_s = await self._starter.find_start(turn, free, beside)
            if anew and start.parked is not None:
                start, why = dataclasses.replace(cold_start(), seat=start.seat, displaced=start.displaced), GONE
            live, leaving = free[start.seat], [free[number] for number in start.displaced]
            shares_rows = self._engine.info.row_tokens > 0
            is_long = shares_rows and start.parked is None and live.rows.position > self._rows_of(turn)  # and is cut
            self.seats.take(live, turn, keeps=start.keep_rows > 0 and not is_long)
            if start.keep_rows == 0 or await self._holds_still(live):
                break
            self.seats.give_back(turn)
        report, restore_s = await self._starter.start(turn, live, start, why, leaving, is_alone=not turns)
        self.seats.hold(live)
        return live, start, report, restore_s, from_disk_s

    async def _answer(self, turn: Turn) -> None:
        live, start, report = await self._begin(turn)
        report = turn.report = await self._complete_report(turn, start, report)
        told = live.seat.told
        if told is None:
            self._metrics.started(report)
        turn.report = told_report(report, told, is_over=False)
        turn.channel.push(Started(turn.report))
        try:
            read_s = await self._read(turn, live, start.common)
            live = self._seat_of(turn)
            with self._starter.trusting(start, live):
                answer = await self._generate(turn, live, read_s)
        finally:
            if told is not None:
                report = turn.report = self._as_told(turn, report, live.seat.told)
        if answer.reason is FinishReason.CANCELLED:
            raise Cancelled("The client left; its answer was stopped.")
        if turn.explained is not None:
            turn.explained.end = answer.reason.value
        reasoning_tokens = answer.reasoning_tokens
        if told is not None:
            known = None if live.seat.told is None else live.seat.told.reasoning_tokens
            reasoning_tokens = self._engine.tokens_in(reasoning_tokens) if known is None else known
        turn.channel.push(Finished(answer.reason, report, turn.timings, reasoning_tokens, answer.stop_string))

    def _as_told(self, turn: Turn, report: CacheReport, told: Told | None) -> CacheReport:
        """The report of a turn that is over, with what another server said of it. Also for metrics and
        `/parkd/explain`."""
        report = told_report(report, told, is_over=True, own_tokens=partial(_own_tokens, turn))
        turn.timings = told_timings(turn.timings, told)
        self._metrics.started(report)
        if turn.explained is not None:
            turn.explained.report = report
        return report

    def _limit(self, turn: Turn) -> int | None:
        return output_limit(turn.request.max_output_tokens, self._max_output_tokens)

    async def _complete_report(self, turn: Turn, start: Start, report: CacheReport) -> CacheReport:
        """Adds what is written, the divergence and the diagnosis to the report, also for `/parkd/explain`."""
        explained = turn.explained
        if turn.request.cache.mode is CacheMode.USE:
            lasting = min(lasting_tokens(turn.prompt), len(turn.prompt) - 1)
            report = dataclasses.replace(report, written_tokens=max(0, lasting - report.reused_tokens))
        if start.nearest is not None:
            tokenizer = self._engine.tokenizer
            # In a thread: the tokenizer may be in another process.
            unit = self._engine.info.unit
            divergence = await asyncio.to_thread(divergence_of, turn.prompt, start.nearest, tokenizer, unit)
            report = dataclasses.replace(report, divergence=divergence)
        if explained is not None:
            if turn.request.cache.compare_to is not None:
                diagnosis = diagnose(explained, turn.earlier, report.reused_tokens)
                is_known = self._engine.info.holds_state or diagnosis.kind in _SEEN_HERE
                report = dataclasses.replace(report, diagnosis=diagnosis if is_known else None)
            explained.state, explained.report = "running", report
        return report

    async def _read(self, turn: Turn, live: LiveConversation, fork: int) -> float:
        """Reads the prompt up to its last token. `fork` is where it left what was known, a likely place to fork again.

        Returns the seconds. Raises Cancelled, with what was read kept, and EngineFailure.
        """
        prompt, channel = turn.prompt, turn.channel
        start, stop = live.rows.position, len(prompt) - 1
        if start == stop:
            already = start - turn.report.reused_tokens if turn.report else 0  # read while the rest was restored
            turn.timings = dataclasses.replace(turn.timings, prefill_tokens=already)
            await live.checkpoint()
            return 0.0
        places = checkpoints_to_take(prompt, start, fork, self._engine.info.ctx_checkpoints)
        turn.places = (*live.checkpoints, *places)
        began_s = self._monotonic()

        def progress(position: int) -> Progress:
            return Progress(position - start, stop - start, start, self._monotonic() - began_s)

        def read(event: Event) -> None:
            assert isinstance(event, Progress)
            self._log.reading(turn, event)
            if turn.explained is not None:
                turn.explained.progress = event
            turn.live_tokens = start + event.read_tokens
            if self.lane is not None:
                self.lane.look_again()
            channel.push(event)

        emit, pause, computed_s = self._emitter(read), self._pause_flag(turn), 0.0
        read(progress(start))
        while True:
            reading = Reading(live, channel.cancel, pause, self._monotonic)
            try:
                await live.work(
                    reading.work(prompt.token_ids[:stop], places, on_chunk=lambda position: emit(progress(position)))
                )
            finally:
                await live.advance(prompt.key, prompt.units)
            computed_s += reading.computed_s
            took_s = self._monotonic() - began_s - turn.timings.paused_s
            tokens = live.rows.position - start
            turn.timings = dataclasses.replace(turn.timings, prefill_s=took_s, prefill_tokens=tokens)
            if live.rows.position >= stop:
                break
            if channel.cancel.is_set() or not reading.rests:
                raise Cancelled("The client left while its prompt was read.")
            live = await self._give_way(turn, live, prompt.token_ids)
        self._costs.note_read(tokens, computed_s, start)
        return took_s

    async def _give_way(self, turn: Turn, live: LiveConversation, token_ids: TokenIds) -> LiveConversation:
        """Lets others run if they still wait and the state can be kept whole; returns when the turn goes on, in the
        same state, with the seat in which it does. `token_ids` are those of prompt and answer so far.

        Raises what ends the turn meanwhile, with `is_aside` set: Cancelled, ShuttingDown, EngineLost. Raises
        EngineFailure.
        """
        turn.pause.clear()
        lane = self.lane
        if lane is None:
            return live
        began_s, position = self._monotonic(), live.rows.position
        aside = await live.set_aside(self._pauses_of(turn)) if lane.is_to_pause(turn) else None
        if aside is None:
            lane.keep_running(turn)
            if live.rows.position < position:  # what failed while it was parked has emptied the seat
                await self._read_again(turn, live, token_ids, position)
            return live
        if turn.request.cache.mode is not CacheMode.USE:
            await live.forget(turn.report.reused_tokens if turn.report else 0)
        parking_s, turn.is_aside = self._monotonic() - began_s, True
        if turn.explained is not None:
            turn.explained.state = "paused"
        try:
            turn.pause.clear()  # it may have been asked again while it was parked
            live_tokens, turn.live_tokens = turn.live_tokens, 0
            self._give_back(turn)
            await lane.pause(turn)
            turn.is_aside = False
            taken_s = self._monotonic()
            async with self.seats.changing:
                live = self._seat_again(live, aside)
                if live.rows is not aside.rows:  # what was to be forgotten there is not this turn's
                    await live.empty_if_unwanted()
                self.seats.take(live, turn, keeps=live.rows is aside.rows)
            is_whole = await live.take_up(aside)
            self.seats.hold(live)
            if is_whole and live.rows is not aside.rows:
                self.forecast.note_switch(turn, parking_s + self._monotonic() - taken_s)
        finally:
            aside.release()
            paused_s = self._monotonic() - began_s
            self._metrics.paused(paused_s)
            timings = turn.timings
            turn.timings = dataclasses.replace(timings, paused_s=timings.paused_s + paused_s, pauses=timings.pauses + 1)
        if turn.explained is not None:
            turn.explained.state = "running"
        await live.call(_steer_again, live.seat, turn, aside.put_back)
        if not is_whole:
            await self._read_again(turn, live, token_ids, aside.position)
        turn.live_tokens = live_tokens
        lane.look_again()
        return live

    async def _read_again(self, turn: Turn, live: LiveConversation, token_ids: TokenIds, position: int) -> None:
        """Reads what a turn's seat held up to `position`, since it was lost. The state is true again, though not in
        every bit: other tokens are read in one go. Raises EngineFailure; Cancelled if the client leaves meanwhile."""
        try:
            reading = Reading(live, turn.channel.cancel, threading.Event(), self._monotonic)
            await live.work(reading.work(token_ids[:position]))
        finally:
            await live.advance(turn.prompt.key, _units_with(turn.prompt, token_ids[len(turn.prompt) :]))
        if live.rows.position < position:
            raise Cancelled("The client left; its answer was stopped.")

    def _seat_again(self, live: LiveConversation, aside: SetAside) -> LiveConversation:
        """The free seat in which a paused turn goes on: `live`, where it was, if its state is still there; else an
        empty one, or the one used longest ago."""
        free = self.seats.free
        if live in free and live.rows is aside.rows:
            return live
        return min(free, key=lambda each: each.rows.position > 0)

    def _pause_flag(self, turn: Turn) -> threading.Event:
        return turn.pause if self._engine.info.can_pause else threading.Event()

    def _pauses_of(self, turn: Turn) -> Pauses:
        """What is kept of the turn's pauses. The state of a turn of which nothing is to be kept is parked meanwhile
        under a key that nobody can name."""
        if turn.pauses is None:
            digest = turn.prompt.key.digest
            if turn.request.cache.mode is not CacheMode.USE:
                digest = secrets.token_bytes(len(digest))
            turn.pauses = Pauses(digest)
        return turn.pauses

    async def _generate(self, turn: Turn, live: LiveConversation, read_s: float) -> Answer:
        limit, told = self._limit(turn), live.seat.told is not None
        if limit == 0:
            return Answer()
        if self._engine.info.unit is not Unit.TOKEN:
            limit = None  # the engine ends the answer there, since it alone counts its tokens
        transcript, push = Transcript(), self._emitter(turn.channel.push)

        def emit(event: Event) -> None:
            transcript.feed(event)
            push(event)

        began_s, read_tokens, paused_before_s = self._monotonic(), turn.timings.prefill_tokens, turn.timings.paused_s

        def timings(answer: Answer) -> Timings:
            """Up to now; the first token belongs to the reading."""
            first_s = answer.first_token_at_s
            if first_s is None:
                return turn.timings
            measured = dataclasses.replace(
                turn.timings,
                first_token_s=first_s - turn.arrived_s,
                prefill_s=read_s + first_s - began_s,
                prefill_tokens=read_tokens + 1,
                decode_s=self._monotonic() - first_s - (turn.timings.paused_s - paused_before_s),
                output_tokens=answer.output_tokens,
                drafts=answer.drafts,
            )
            return told_timings(measured, live.seat.told) if told else measured

        loop = AnswerLoop(
            self._engine,
            live.seat,
            turn.request,
            limit,
            parser=self._parser(turn),
            cancel=turn.channel.cancel,
            pause=self._pause_flag(turn),
            bound=self._bound(turn),
            emit=emit,
            monotonic=self._monotonic,
            timings=timings if turn.request.timings_per_token else None,
        )
        turn.answer = answer = loop.answer
        try:
            while not await self._slice(turn, live, loop):
                ids = _ids_with(turn.prompt, answer.token_ids)
                if turn.pause.is_set():
                    live = await self._give_way(turn, live, ids)
                live = await self._grow(turn, live, ids)
                loop.seat, loop.bound = live.seat, self._bound(turn)
        finally:
            loop.close()
            turn.timings = timings(answer)
        self._recognise(turn, answer, transcript)
        return answer

    def _bound(self, turn: Turn) -> int | None:
        """The rows at which the turn's answer rests; None: it has all that it can need."""
        rows = self._rows_of(turn)
        return rows if self._engine.info.row_tokens and rows < self._most_rows(turn) else None

    async def _grow(self, turn: Turn, live: LiveConversation, token_ids: TokenIds) -> LiveConversation:
        """Gives an answer that is at its bound more rows, or waits in its seat until others have ended or are paused;
        it may be paused itself meanwhile. Returns the seat in which it goes on. Raises as `_give_way`."""
        while self.lane is not None and (bound := self._bound(turn)) is not None:
            position = live.rows.position
            if position + 2 * (AHEAD_TOKENS + 1) <= bound:
                break
            wanted = min(self._most_rows(turn), position + ANSWER_TOKENS)
            if self._fits(turn, wanted, [each for each in self.lane.running_turns if each is not turn]):
                turn.row_tokens = wanted
                break
            with anyio.move_on_after(ROOM_STEP_S):
                await self._freed.wait()
            if turn.channel.cancel.is_set():
                break
            if turn.pause.is_set():
                live = await self._give_way(turn, live, token_ids)
        return live

    async def _slice(self, turn: Turn, live: LiveConversation, loop: AnswerLoop) -> bool:
        """Generates up to the answer's end, or to a pause. Returns whether it ended."""
        try:
            return await live.work(loop.work())
        finally:
            units = _units_with(turn.prompt, loop.answer.token_ids)
            turn.note_answer(units)
            await live.advance(turn.prompt.key, units)

    def _recognise(self, turn: Turn, answer: Answer, transcript: Transcript) -> None:
        """Remembers the answer's token ids, unless the client has not seen all of them: it left, a stop string cut the
        answer, or it began the answer itself."""
        whole = not (answer.reason is FinishReason.CANCELLED or answer.stop_string or turn.request.continues)
        if self._remember is None or not whole or turn.request.cache.mode is not CacheMode.USE:
            return
        said, ids = transcript.said(), answer.token_ids[: answer.output_tokens]
        if ids and ids[-1] in self._engine.info.end_token_ids:
            ids = ids[:-1]
        if said is not None:
            self._remember(turn.prompt, ids, said)

    def _parser(self, turn: Turn) -> Parser:
        return make_parser(self._output, turn.request, turn.tail, self._call_ids)

    async def _keep(self, turn: Turn, live: LiveConversation) -> None:
        """Runs after the reply: parks what the turn added, unless its client asked to keep nothing."""
        try:
            if not self._engine.info.holds_state:
                await live.reset()
                self._note_parked(turn, None)
                return
            await live.check()
            if self._store is not None:
                self._store.measured(self._costs.measured)
            if turn.request.cache.mode is CacheMode.USE:
                turn.note_kept(live.rows.position)
                if self.groups is not None and turn.request.cache.group is not None:
                    self.groups.used(turn.request.cache.group, turn.prompt)
                passing = () if turn.pauses is None else turn.pauses.positions
                await live.park(partial(self._note_parked, turn), passing)
                self._retain(turn)
            else:
                await live.forget(turn.report.reused_tokens if turn.report else 0)
                self._note_parked(turn, None)
        except EngineLost:
            raise
        except ParkdError as error:
            log.warning("nothing was parked after request %s: %s", turn.request_id, error.message)
            self._note_parked(turn, None)
        except Exception:
            log.exception("parking after request %s failed unexpectedly", turn.request_id)
            self._note_parked(turn, None)

    def _note_parked(self, turn: Turn, parked_id: ConversationId | None) -> None:
        """Notes to which conversation a turn belongs, which is known once it is parked; None: to none."""
        self._log.bill(turn, "" if parked_id is None else name_of(parked_id))
        calls = turn.answer is not None and turn.answer.reason is FinishReason.TOOL_CALLS
        if parked_id is not None and self.returns is not None and calls:
            self.returns.expect(turn.prompt, parked_id)
        if parked_id is not None and turn.explained is not None:
            self.roster.note(name_of(parked_id), turn.explained, turn.words)

    def _retain(self, turn: Turn) -> None:
        asked_s, retention = turn.request.cache.min_retention_s, self.retention
        if retention is not None and asked_s is not None:
            now_s = self._monotonic()
            retention.wish(turn.prompt, asked_s, now_s, "" if turn.explained is None else turn.explained.owner)
            retention.apply(now_s)

    def _emitter(self, push: Callable[[Event], None]) -> Callable[[Event], None]:
        """A function that hands events from the engine's thread to `push` on the event loop, in order, without waiting.
        Those that come before the loop has taken the last ones cost it no wake-up of their own."""
        loop = asyncio.get_running_loop()
        waiting: deque[Event] = deque()

        def deliver() -> None:
            while waiting:
                push(waiting.popleft())

        def emit(event: Event) -> None:
            waiting.append(event)
            if len(waiting) == 1:  # else the loop is on its way: it takes all, also what comes while it does
                loop.call_soon_threadsafe(deliver)

        return emit


def _own_tokens(turn: Turn) -> int:
    """How many tokens of the prompt the same key sent, or got, before."""
    if turn.own_nearest is None:
        return len(turn.prompt)
    return common_prefix(turn.own_nearest().units, turn.prompt.units)


def _units_with(prompt: PromptIdentity, token_ids: TokenIds | list[int]) -> Units:
    """Units of the prompt and of the tokens generated after it."""
    return np.concatenate([prompt.units, np.array(token_ids, dtype=np.uint64)])


def _ids_with(prompt: PromptIdentity, token_ids: list[int]) -> TokenIds:
    """Ids of the prompt and of the tokens generated after it."""
    return np.concatenate([prompt.token_ids, np.array(token_ids, dtype=np.int64)])


def _steer_again(seat: Seat, turn: Turn, put_back: Callable[[Seat], None]) -> None:
    steer_for(seat, turn)
    put_back(seat)
