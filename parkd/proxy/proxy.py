"""What lives as long as the app: the lane and the other parts, and the path of a request to the lane.

A request's life: 1. access and size are checked; 2. its dialect parses the body; 3. a worker thread renders,
tokenises and hashes it; 4. a prompt that cannot fit the context is refused; 5. the turn waits for the lane; 6. the lane
runs the turn; 7. its events are streamed to the client; 8. after the reply, new state is parked.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from parkd.errors import Cancelled, ContextOverflow, EngineLost
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.lane.events import EventChannel
from parkd.lane.forecast import class_of
from parkd.lane.groups import HASH_BYTES, HASHES_LIMIT
from parkd.lane.lane import Lane
from parkd.lane.late_copies import outlive_copies
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.metrics import Metrics, Remembered
from parkd.lane.reports.explain import EXPLAINED_BYTES, Explained, PromptParts, RequestMemory
from parkd.lane.reports.ledger_rows import LedgerWriter, client_family
from parkd.lane.reports.roster import FirstWords
from parkd.lane.reports.turn_log import TurnLog
from parkd.lane.resend import Resends
from parkd.lane.schedule import SCHEDULES
from parkd.lane.thread.engine_thread import EngineThread
from parkd.lane.turn import Turn
from parkd.lane.turn_runner import TurnRunner
from parkd.proxy.access import Caller, narrowed
from parkd.proxy.bodies import BodyRoom, Charge, MemoryReturn
from parkd.proxy.config import Services
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import Dialect, ResponseMeta
from parkd.proxy.dialects.frames import encoded
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.proxy.guard import caller_of, note_refused
from parkd.proxy.leaving import while_connected
from parkd.proxy.prompts import Prompts
from parkd.proxy.requests import id_headers, parse_object, read_body
from parkd.proxy.sse import TurnResponse, stream_headers
from parkd.types import ToolChoice

log = logging.getLogger(__name__)

FLUSH_DEADLINE_S = 10.0
"""Longest wait for pending writes to disk when the server stops."""
MARK_DEADLINE_S = 1.0
"""Longest wait, after the flush, for writing when conversations were last used."""
CUT_WAIT_S = 5.0
"""Longest wait for a stopped turn to reach its next chunk or token."""


class Proxy:
    """Owns everything that lives as long as the app. `create_app` stores it as `app.state.parkd`."""

    def __init__(self, services: Services) -> None:
        config, store = services.config, services.store
        self.services = services
        self.config = config
        self.created_s = int(services.wall())
        self.lost: EngineLost | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called once if the engine is lost: the process must end with an error."""
        engine = services.engine
        threads = len(engine.seats) if engine.has_own_threads else 1
        self.threads = tuple(
            EngineThread(step_ahead=engine.step_ahead, read_share=config.read_share) for _ in range(threads)
        )
        self.costs = costs = CostMeter(
            services.disk_bytes_per_s, services.monotonic, ram_bytes_per_s=services.ram_bytes_per_s
        )
        self.metrics = Metrics(waiting=lambda: self.lane.waiting, store_stats=store.stats if store else None)
        self.metrics.watch("parkd_cost", lambda: costs.measured)
        self.metrics.watch("parkd_remembered", self.remembered)
        for prefix, stats in engine.stats.items():
            self.metrics.watch(prefix, stats)
        self.disk: DiskWorker | None = None
        if store is not None and store.has_disk and services.files is not None:
            self.disk = DiskWorker(store, services.files, costs, services.monotonic)
            self.metrics.watch("parkd_disk", store.disk_stats)
        self.lives = tuple(
            LiveConversation(seat, thread, store, self.metrics, costs, services.monotonic, self.disk)
            for seat, thread in zip(engine.seats, cycle(self.threads), strict=False)
        )
        writer = None
        if services.ledger is not None:
            self.metrics.watch("parkd_ledger", services.ledger.stats)
            writer = LedgerWriter(
                services.ledger, services.engine.tokenizer.decode, shows_text=services.config.shows_text
            )
        self.log = TurnLog(self.metrics, services.trace, writer, services.engine.tokens_in)
        self.runner = TurnRunner(
            services.engine,
            self.lives,
            store,
            self.metrics,
            costs,
            services.output,
            max_output_tokens=config.max_output_tokens,
            monotonic=services.monotonic,
            disk=self.disk,
            remember=services.remember,
            log=self.log,
            owners=config.owners,
        )
        owners = config.owners
        self.lane: Lane[Turn] = Lane(
            self.runner.run,
            max_queue=config.max_queue,
            monotonic=services.monotonic,
            on_queued=self._queued,
            on_slice=lambda: self.resends.give_way(),
            on_idle=self._idle,
            schedule=SCHEDULES[config.schedule],
            work_of=self.runner.forecast.work,
            owners=owners,
            owner_of=lambda turn: turn.explained.owner if turn.explained is not None else "",
            width=engine.turns_at_once,
            may_join=self.runner.may_join,
            awaits=self.runner.awaits,
            passes_over=config.schedule != "fifo",
            can_pause=engine.info.can_pause,
        )
        self.runner.lane = self.lane
        self.requests = RequestMemory()
        self.resends = Resends(self.lane, config.resend_grace_s, self._give_up)
        self.prompts = Prompts(services, owners)
        self.bodies = BodyRoom(
            config.bodies_limit_bytes,
            self.lane.retry_after_s,
            self._large_body_gone,
            owners=owners,
        )
        self._memory_return = MemoryReturn(services.return_memory)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.stops_at_once = False
        """The process ends without waiting for the engine's running call."""

    @asynccontextmanager
    async def life(self, _app: Starlette) -> AsyncIterator[None]:
        for thread in self.threads:
            thread.start()
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self.resends.serve_in(tasks)
                tasks.start_soon(self._serve_lane)
                await self._prepare()
                if self.disk is not None:
                    tasks.start_soon(self.disk.serve)
                yield
                await self._drain()
                for live in self.lives:
                    await live.settle()
                if self.disk is not None:
                    await self.disk.flush(FLUSH_DEADLINE_S)
                    with anyio.move_on_after(MARK_DEADLINE_S):
                        await self.disk.mark(stops=True)
                tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            self.resends.serve_in(None)
            if self.disk is not None:
                self.disk.stop()
            until_s = time.monotonic() + (0.0 if self.stops_at_once else CUT_WAIT_S)
            ended = [thread.stop(max(0.0, until_s - time.monotonic())) for thread in self.threads]
            if not all(ended):
                log.warning("the engine is still busy; the process ends without waiting for it")
            outlive_copies(self.services.store)

    def _queued(self, turn: Turn) -> None:
        """Called when a turn has to wait. Until it runs, keeps the state that it will start from, and reads that state
        from disk."""
        self.resends.give_way()
        self.runner.foresee(turn)
        if self.services.store is not None:
            turn.release_awaited = self.services.store.expect(turn.prompt.key.digest, turn.prompt.prefix_hashes)
        if self.disk is not None and self._tasks is not None:
            self._tasks.start_soon(self.runner.prefetch, turn, partial(self.lane.is_waiting, turn))

    def _idle(self) -> None:
        """Called when nobody runs or waits: reads from disk what is expected back."""
        returns = self.runner.returns
        if returns is not None and len(returns) and self.disk is not None and self._tasks is not None:
            self._tasks.start_soon(returns.read_ahead, lambda: self.lane.is_idle)

    def _give_up(self, turn: Turn) -> None:
        """Ends a turn whose client did not come back."""
        turn.release_body()
        if self.lane.leave(turn):
            self.log.record(turn, Cancelled("The client left while it waited."))

    def _large_body_gone(self) -> None:
        if self._tasks is not None:
            self._memory_return.ask(self._tasks)

    def begin_shutdown(self) -> None:
        """Called on the event loop when the server is to stop. No further turn starts; the running turn may end within
        the deadline."""
        if self._tasks is not None and not self.lane.closed:
            self._tasks.start_soon(self._drain)

    async def turn_response(self, request: Request, dialect: Dialect, request_id: str) -> ASGIApp:
        """Does everything before the queue: checks access, reads and parses the body, builds the prompt. Raises
        ParkdError, which the caller answers in the dialect's format."""
        services, config = self.services, self.services.config
        arrived_s = services.monotonic()
        caller = self.caller_of(request)
        if not len(self.resends):  # a repeated request may take over a turn, which needs no place in the queue
            self.lane.check_room(caller.owner)
        with self.bodies.charge(caller.owner) as charge:
            body = await self.body_of(request, charge)
            model, created_s = str(body.get("model") or self.model_id), int(services.wall())
            document = dialect.at_once(body, ResponseMeta(request_id, model, created_s))
            if document is not None:
                return Response(
                    encoded(document) + b"\n", headers=id_headers(request_id), media_type="application/json"
                )
            parsed = dialect.parse(body, request.headers)
            turn_request = dataclasses.replace(parsed, namespace=narrowed(caller, parsed.cache.salt))
            turn = self.resends.take(turn_request, caller.owner)
            meta = ResponseMeta(turn.request_id if turn is not None else request_id, model, created_s)
            encoder = dialect.encoder(turn_request, body, meta)
            if turn is None:
                try:
                    build = partial(self.prompts.build, turn_request, caller.owner)
                    ready = await while_connected(request, build)
                    self.prompts.check_fits(len(ready.prompt), turn_request)
                except ContextOverflow as overflow:
                    if turn_request.stream and overflow.code in dialect.streamed_errors:
                        note_refused(request, overflow, config)
                        headers = stream_headers(dialect) | id_headers(request_id)
                        return StreamingResponse(encoder.failure(overflow), headers=headers)
                    raise
                turn = Turn(
                    request_id,
                    caller.shown,
                    ready.request,
                    ready.prompt,
                    arrived_s,
                    services.monotonic(),
                    ready.mask,
                    ready.tail,
                )
                turn.kind = class_of(body, turn.request, caller.name, config.classes)
                self._remember(turn, caller)
                turn.client, turn.key_name = client_family(request.headers.get("user-agent", "")), caller.name
                turn.api = request.url.path
                turn.release_body = charge.keep()
        again = partial(self._again, turn)
        return TurnResponse(
            turn, self.lane, self.log, self.resends, dialect, encoder, config, services.monotonic, again
        )

    async def _again(self, first: Turn, number: int) -> Turn:
        """The turn of one more answer to the same request. It finds the prompt live or parked, or waits until the first
        turn has read it. With a seed, it has the seed `number` above the request's. Raises ParkdError."""
        sampling = first.request.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + number)
        request = dataclasses.replace(first.request, sampling=sampling)
        now_s = self.services.monotonic()
        assert first.explained is not None
        ready = await self.prompts.build(request, first.explained.owner)
        queued_s = self.services.monotonic()
        turn = Turn(first.request_id, first.caller, request, ready.prompt, now_s, queued_s, ready.mask, ready.tail)
        turn.channel = EventChannel(first.channel)
        turn.explained = dataclasses.replace(first.explained)  # its own: what is remembered tells of the first answer
        turn.kind = first.kind
        turn.release_body, turn.own_nearest = first.release_body, first.own_nearest
        turn.note_answer, turn.note_kept = first.note_answer, first.note_kept
        turn.own_earlier = first.own_earlier
        turn.client, turn.key_name, turn.api = first.client, first.key_name, first.api
        return turn

    @property
    def thread(self) -> EngineThread:
        """That of the first seat, and of all others unless the engine `has_own_threads`."""
        return self.threads[0]

    @property
    def keeps_ledger(self) -> bool:
        """Whether turns are noted; not once the ledger's file could not be used."""
        return self.services.ledger is not None and not self.services.ledger.is_lost

    def _remember(self, turn: Turn, caller: Caller) -> None:
        """Remembers the turn for `/parkd/explain` and for comparison with later requests."""
        cache, owner = turn.request.cache, caller.owner
        has_ledger = self.keeps_ledger
        parts = PromptParts.of(turn.request) if cache.wants_diagnosis or has_ledger else None
        if cache.compare_to is not None:
            turn.earlier = self.requests.get(cache.compare_to, owner)
        # The entry outlives the turn, so it contains neither image files nor a proof, which refers to the messages.
        images = tuple(dataclasses.replace(image, data=b"") for image in turn.prompt.images)
        prompt = dataclasses.replace(turn.prompt, images=images, proof=None)
        began_s = self.services.wall()
        turn.explained = Explained(turn.request_id, owner, prompt, parts, began_s, arrived_s=turn.arrived_s)
        self.requests.add(turn.explained)
        if self.config.shows_text:
            turn.words = FirstWords.of(turn.request)
        if caller.shares_namespace or not self.services.engine.info.holds_state:
            turn.own_nearest = partial(self.requests.own_nearest, turn.explained)
        if caller.shares_namespace or has_ledger or not self.services.engine.info.holds_state:
            turn.note_answer = partial(self.requests.note_answer, turn.explained)
            turn.note_kept = partial(self.requests.note_kept, turn.explained)
        turn.own_earlier = partial(self.requests.own_before, turn.explained)

    def remembered(self) -> Remembered:
        """What is remembered outside the parking budget."""
        kinds = {**self.services.remembered(), "requests": (self.requests.bytes, EXPLAINED_BYTES)}
        if self.services.store is not None and self.runner.groups is not None:
            kinds["histories"] = self.services.store.histories_bytes
            kinds["groups"] = (self.runner.groups.memory_bytes, HASHES_LIMIT * HASH_BYTES)
        return Remembered.of(kinds)

    def caller_of(self, request: Request) -> Caller:
        """Who sends the request. Raises Unauthorized."""
        return caller_of(request.headers, self.config)

    def may_know_when_others_run(self, caller: Caller) -> bool:
        """Whether there is nobody else, or the caller is an operator."""
        return caller.is_operator or self.config.owners <= 1

    async def body_of(self, request: Request, charge: Charge) -> Mapping[str, Any]:
        """The request's body as a JSON object. Raises ParkdError if it cannot be read."""
        config = self.config
        return await parse_object(await read_body(request, config.body_limit_bytes, config.body_silence_s, charge))

    async def count_tokens(self, request: Request, dialect: AnthropicMessages | OpenAIResponses) -> int:
        """The number of tokens of the prompt that this body would give. Raises ParkdError."""
        caller = self.caller_of(request)
        with self.bodies.charge(caller.owner) as charge:
            body = await self.body_of(request, charge)
            parsed = dialect.parse_count(body, request.headers)
            counted = dataclasses.replace(
                parsed,
                namespace=narrowed(caller, parsed.cache.salt),
                response_schema=None,
                response_form=None,
                tool_choice=ToolChoice(),
            )
            prompt = (await while_connected(request, partial(self.prompts.build, counted, caller.owner))).prompt
            if prompt.proof is not None:
                await self.prompts.run(caller.owner, prompt.proof)
        return self.services.engine.tokens_in(len(prompt))

    @property
    def model_id(self) -> str:
        return self.services.config.alias or self.services.engine.info.model_name

    async def _prepare(self) -> None:
        """Runs `services.prepare` before any request is answered, since it holds the interpreter lock and would delay
        streams."""
        try:
            if self.services.prepare is not None:
                await anyio.to_thread.run_sync(self.services.prepare)
        except Exception:
            log.exception("preparing structured output failed; the first request that needs it tries again")

    async def _serve_lane(self) -> None:
        try:
            await self.lane.serve()
        except EngineLost as lost:
            log.critical("the engine is lost: %s", lost.message, exc_info=lost)
            self.lost = lost
            self.on_lost()

    async def _drain(self) -> None:
        if not await self.lane.drain(self.services.config.shutdown_deadline_s):
            with anyio.move_on_after(CUT_WAIT_S):
                await self.lane.idle()
