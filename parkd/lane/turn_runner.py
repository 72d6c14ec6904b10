"""One request's path through the lane.

    decide -> park what would be lost, restore -> read the rest -> generate -> Finished -> park behind the reply

After a failed restore the prompt is read cold, and the client only waits longer. A failed engine call fails this
request and leaves valid state for the next. A lost engine ends the lane.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from parkd.answers.base import OutputFormat, Parser
from parkd.answers.formats import call_ids
from parkd.answers.parser import make_parser
from parkd.answers.transcript import Transcript
from parkd.engine_adapter.base import Engine
from parkd.errors import Cancelled, EngineFailure, EngineLost, ParkdError
from parkd.identity.matcher import divergence_of
from parkd.identity.output_memory import Said
from parkd.lane.answer import Answer, AnswerLoop
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.explain import diagnose, lasting_tokens
from parkd.lane.groups import Groups
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.metrics import Metrics
from parkd.lane.retention import Retention
from parkd.lane.roster import Roster
from parkd.lane.start import Start
from parkd.lane.turn import Turn, output_limit
from parkd.lane.turn_log import TurnLog
from parkd.lane.turn_starter import TurnStarter
from parkd.store.records import ConversationId, name_of
from parkd.store.store import ConversationStore
from parkd.types import (
    CacheMode,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Progress,
    PromptIdentity,
    Started,
    Timings,
    Units,
)

log = logging.getLogger(__name__)
CALL_ID_BYTES = 12


class TurnRunner:
    """Runs turns one at a time: the lane's only caller of the engine and the store."""

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
        disk: DiskWorker | None = None,
        remember: Callable[[PromptIdentity, Sequence[int], Said], None] | None = None,
    ) -> None:
        """`lives` are those in the engine's seats."""
        self._engine = engine
        self._lives = list(lives)
        """The least recently used first."""
        self._starter = TurnStarter(engine.info, store, disk, costs, monotonic)
        self._log = log
        self._remember = remember
        self.retention = None if store is None else Retention(store)
        self.roster = Roster()
        self.groups = None if store is None else Groups(store)
        self._store = store
        self._metrics = metrics
        self._costs = costs
        self._output = output
        self._call_ids = call_ids(output.tools, lambda: secrets.token_hex(CALL_ID_BYTES))
        self._max_output_tokens = max_output_tokens
        self._monotonic = monotonic

    async def prefetch(self, turn: Turn, is_waiting: Callable[[], bool]) -> None:
        """Promotes what a waiting turn would start from, and keeps it in RAM until the turn runs."""
        await self._starter.prefetch(turn, tuple(self._lives), is_waiting)

    async def run(self, turn: Turn) -> None:
        """Runs the turn: pushes its events, ends its channel, then parks. Raises only EngineLost."""
        live: LiveConversation | None = None
        turn.began_s = self._monotonic()
        turn.timings = Timings(wait_s=turn.began_s - turn.queued_s)
        error: ParkdError | None = None
        try:
            if self.retention is not None:
                self.retention.apply(turn.began_s)
            if turn.channel.cancel.is_set():
                raise Cancelled("The client left before its turn came.")
            await self._wake()
            for each in self._lives:
                await each.empty_if_unwanted()
            start, why, from_disk_s = await self._starter.find_start(turn, self._lives)
            live = self._lives.pop(start.seat)
            self._lives.append(live)
            await self._answer(turn, live, start, why, from_disk_s)
        except ParkdError as raised:
            error = raised
        except Exception as raised:
            log.exception("request %s failed unexpectedly", turn.request_id)
            error = EngineFailure("The request failed unexpectedly; the server's log has the details.")
            error.__cause__ = raised
        if error is not None:
            turn.channel.fail(error)
        self._log.record(turn, error)
        if isinstance(error, EngineLost):
            raise error
        if live is not None:
            self._log.note(turn, live.rows, error)
            await self._keep(turn, live)

    async def _wake(self) -> None:
        """An engine that is another process may have lost its live state. Raises EngineFailure, EngineLost."""
        if not self._engine.is_awake:
            await self._lives[0].call(self._engine.awake)
            for live in self._lives:
                await live.check()

    async def _answer(self, turn: Turn, live: LiveConversation, start: Start, why: str, from_disk_s: float) -> None:
        report, restore_s = await self._starter.start(turn, live, start, why)
        turn.release_awaited()
        report = await live.begin(turn, self._limit(turn), start, report)
        report = turn.report = await self._complete_report(turn, start, report)
        turn.timings = dataclasses.replace(turn.timings, restore_s=restore_s + from_disk_s)
        self._metrics.started(report)
        turn.channel.push(Started(report))
        read_s = await self._read(turn, live, start.common)
        with self._starter.trusting(start, live):
            answer = await self._generate(turn, live, read_s)
        if answer.reason is FinishReason.CANCELLED:
            raise Cancelled("The client left; its answer was stopped.")
        if turn.explained is not None:
            turn.explained.end = answer.reason.value
        turn.channel.push(Finished(answer.reason, report, turn.timings, answer.reasoning_tokens, answer.stop_string))

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
            divergence = await asyncio.to_thread(divergence_of, turn.prompt, start.nearest, tokenizer)
            report = dataclasses.replace(report, divergence=divergence)
        if explained is not None:
            if turn.request.cache.compare_to is not None:
                diagnosis = diagnose(explained, turn.earlier, report.reused_tokens)
                report = dataclasses.replace(report, diagnosis=diagnosis)
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
        began_s = self._monotonic()

        def progress(position: int) -> Progress:
            return Progress(position - start, stop - start, start, self._monotonic() - began_s)

        def read(event: Event) -> None:
            assert isinstance(event, Progress)
            self._log.reading(turn, event)
            if turn.explained is not None:
                turn.explained.progress = event
            channel.push(event)

        emit = self._emitter(read)
        read(progress(start))
        try:
            await live.call(
                live.seat.extend,
                prompt.token_ids[start:stop],
                cancel=channel.cancel,
                on_chunk=lambda position: emit(progress(position)),
                checkpoint_at=places,
            )
        finally:
            await live.advance(prompt.key, prompt.units)
        took_s = self._monotonic() - began_s
        tokens = live.rows.position - start
        turn.timings = dataclasses.replace(turn.timings, prefill_s=took_s, prefill_tokens=tokens)
        self._costs.note_read(tokens, took_s, start)
        if live.rows.position < stop:
            raise Cancelled("The client left while its prompt was read.")
        return took_s

    async def _generate(self, turn: Turn, live: LiveConversation, read_s: float) -> Answer:
        limit = self._limit(turn)
        if limit == 0:
            return Answer()
        transcript, push = Transcript(), self._emitter(turn.channel.push)

        def emit(event: Event) -> None:
            transcript.feed(event)
            push(event)

        loop = AnswerLoop(
            self._engine,
            live.seat,
            turn.request,
            limit,
            parser=self._parser(turn),
            cancel=turn.channel.cancel,
            emit=emit,
            monotonic=self._monotonic,
        )
        answer = turn.answer = loop.answer
        began_s = self._monotonic()
        try:
            await live.call(loop.run)
        finally:
            units = _units_with(turn.prompt, answer.token_ids)
            turn.note_answer(units)
            await live.advance(turn.prompt.key, units)
            first_s = answer.first_token_at_s
            if first_s is not None:
                turn.timings = dataclasses.replace(
                    turn.timings,
                    first_token_s=first_s - turn.arrived_s,
                    prefill_s=read_s + first_s - began_s,
                    prefill_tokens=turn.timings.prefill_tokens + 1,
                    decode_s=self._monotonic() - first_s,
                    output_tokens=answer.output_tokens,
                    drafts=answer.drafts,
                )
        self._recognise(turn, answer, transcript)
        return answer

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
            await live.check()
            if self._store is not None:
                self._store.measured(self._costs.measured)
            if turn.request.cache.mode is CacheMode.USE:
                if self.groups is not None and turn.request.cache.group is not None:
                    self.groups.used(turn.request.cache.group, turn.prompt)
                await live.park(partial(self._note_parked, turn))
                self._retain(turn)
            else:
                await live.forget(turn.report.reused_tokens if turn.report else 0)
        except EngineLost:
            raise
        except ParkdError as error:
            log.warning("nothing was parked after request %s: %s", turn.request_id, error.message)
        except Exception:
            log.exception("parking after request %s failed unexpectedly", turn.request_id)

    def _note_parked(self, turn: Turn, parked_id: ConversationId | None) -> None:
        """Notes to which conversation a turn belongs, which is known once it is parked."""
        if parked_id is not None and turn.explained is not None:
            self.roster.note(name_of(parked_id), turn.explained, turn.words)

    def _retain(self, turn: Turn) -> None:
        asked_s, retention = turn.request.cache.min_retention_s, self.retention
        if retention is not None and asked_s is not None:
            now_s = self._monotonic()
            retention.wish(turn.prompt, asked_s, now_s)
            retention.apply(now_s)

    def _emitter(self, push: Callable[[Event], None]) -> Callable[[Event], None]:
        """A function that hands events from the engine's thread to `push` on the event loop, in order, without
        waiting."""
        loop = asyncio.get_running_loop()
        return lambda event: _post(loop, push, event)


def _post(loop: asyncio.AbstractEventLoop, push: Callable[[Event], None], event: Event) -> None:
    loop.call_soon_threadsafe(push, event)


def _units_with(prompt: PromptIdentity, token_ids: list[int]) -> Units:
    """Units of the prompt and of the tokens generated after it."""
    return np.concatenate([prompt.units, np.array(token_ids, dtype=np.uint64)])
