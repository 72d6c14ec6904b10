"""Random lives of a server: whatever its clients, its engine and its store go through, every answer is that of a model
that reads the prompt for the first time, and all state is that of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import numpy as np

from parkd.errors import EngineFailure, EngineLost, RestoreFailed
from tests.integration.api.api_harness import Gate, Running, until
from tests.integration.lives.life_dialects import DIALECTS
from tests.integration.lives.life_server import CONTEXT, Injected, LifeServer
from tests.integration.lives.life_talks import Ask, Talk
from tests.lives.life import Step

STEPS = ("chunk", "token", "capture", "copied", "restore", "restored")


class Life(LifeServer):
    """Every public coroutine is something that may happen to it; those that return True end the process."""

    last: Ask | None = None
    """What was answered last, if nothing has touched the engine since."""

    async def go_on(self, events: int) -> Counter[str]:
        """So many things happen, over several processes; then every client asks once more. Returns what happened."""
        with self.lived():
            while events > 0:
                async with self.serving() as server:
                    ends = False
                    while events > 0 and not ends:
                        events, ends = events - 1, await self._happen(server)
                    if not ends:
                        await self._everyone_asks(server)
                self.last = None
            if self.folder is not None:
                async with self.serving() as server:
                    await self._everyone_asks(server)
        return self.counts

    async def _everyone_asks(self, server: Running) -> None:
        for talk in self.talks.known:
            await self._turn_of(server, talk)
        await self.at_rest(server)
        self.check(server)
        self.check_parked(server)
        await self.check_slots(server)

    async def _happen(self, server: Running) -> bool:
        [step] = self.steps(HAPPENINGS, 1)
        name = self.history.note(step)
        self.counts[name] += 1
        ends = bool(await getattr(self, name)(server))
        if ends:
            return True
        await server.settled()
        if self.talks.chance(0.3):
            await self.at_rest(server)
            self.check_parked(server)
        self.check(server)
        return False

    # -- clients --

    async def turn(self, server: Running) -> None:
        await self._turn_of(server, self.talks.any())

    async def away_and_back(self, server: Running) -> None:
        """Another one is in between, and then its client goes back to what it had asked before."""
        talk = self.talks.opened() if self.talks.chance(0.5) else self.talks.again()
        for next_one in (
            lambda: talk,
            self.talks.opened,
            lambda: self.talks.continued(talk),
            lambda: self.talks.earlier(talk),
        ):
            await self._turn_of(server, next_one())

    async def again_at_once(self, server: Running) -> None:
        """Costs one token, in whatever dialect, and also under another key of the namespace. A key of another one has
        nothing of it."""
        if self.last is not None and self.last.mode == "use" and self.ctx_checkpoints > 2:
            last, namespace = self.last, self.last.client.namespace
            here = [client for client in self.clients if client.namespace == namespace]
            again = replace(last, client=self.pick(here), dialect=self.pick(self.dialects_of(last)))
            reply = await self.ask(server, again)
            assert reply.reused == reply.prompt_tokens - 1, reply
            if elsewhere := [client for client in self.clients if client.namespace != namespace]:
                self.last = None
                await self.ask(server, replace(last, client=self.pick(elsewhere)))

    async def several(self, server: Running) -> None:
        """Some wait while one is answered, and some of those leave."""
        self.last = None
        lane = server.server.proxy.lane
        async with self._held(server, "token", 1) as gate, anyio.create_task_group() as tasks:
            talk = self.talks.any()
            tasks.start_soon(self.ask, server, self.talks.ask_of(talk), talk)
            await gate.wait_reached()
            for _ in range(self.talks.up_to(3)):
                waiting, talk = lane.waiting, self.talks.any()
                ask = self.talks.ask_of(talk)
                if self.talks.chance(0.25):
                    await self._sent_and_left(server, ask, lambda waiting=waiting: lane.waiting > waiting)
                    await until(lambda waiting=waiting: lane.waiting == waiting)
                else:
                    tasks.start_soon(self.ask, server, ask, talk)
                    await until(lambda waiting=waiting: lane.waiting > waiting)
            gate.opened.set()

    async def leave(self, server: Running) -> None:
        """A client goes while its prompt is read or its answer is said."""
        self.last = None
        lane = server.server.proxy.lane
        async with self._held(server, self.pick(["chunk", "token"]), self.talks.up_to(5)) as gate:
            await self._sent_and_left(server, self.talks.ask_of(self.talks.any()), gate.reached.is_set)
            if gate.reached.is_set():
                await until(lambda: lane.running is not None and lane.running.channel.cancel.is_set())

    # -- the engine --

    async def fail(self, server: Running) -> None:
        """At some call of a turn, or of what is parked behind it."""
        self.last = None
        step = self.pick(STEPS)
        errors = [EngineFailure("Injected."), RuntimeError("injected"), RestoreFailed("Injected.")]
        nth = self.talks.up_to(3 if step in ("chunk", "token") else 1)
        await self._with_fault(server, Injected(step, nth, self.pick(errors[: 2 + step.startswith("restore")])))

    async def lose(self, server: Running) -> bool:
        self.last = None
        return await self._with_fault(server, Injected(self.pick(STEPS[:3]), 1, EngineLost("Injected.")))

    async def forget(self, server: Running) -> None:
        self.last = None
        await self.at_rest(server)
        await server.server.proxy.lives[0].reset()

    # -- the store --

    async def drop(self, server: Running) -> None:
        await self.at_rest(server)
        if parked := self.any_parked(server):
            server.store.drop(parked.id, "test")

    async def damage(self, server: Running) -> None:
        """One bit of something in memory changes."""
        await self.at_rest(server)
        parked = self.any_parked(server)
        if not self.may_be_damaged or parked is None:
            return
        table = server.store.table
        runs = table.blocks.runs([self.pick(parked.blocks)], CONTEXT, writeable=True)
        buffers = [run.buffer for stage in runs for run in stage]
        for checkpoint in parked.checkpoints:
            buffers += [part.buffer for part in table.checkpoints.parts(checkpoint.id, writeable=True)]
        if buffers := [buffer for buffer in buffers if len(buffer)]:
            buffer = self.pick(buffers)
            buffer[int(self.random.integers(len(buffer)))] ^= np.uint8(1 << int(self.random.integers(8)))
            self.damaged = True

    async def restart(self, _server: Running) -> bool:
        return True

    # -- how --

    async def _turn_of(self, server: Running, talk: Talk) -> None:
        self.last = self.talks.ask_of(talk)
        await self.ask(server, self.last, talk)

    async def _with_fault(self, server: Running, fault: Injected) -> bool:
        """A turn with that fault in it. Whether it fired."""
        server.engine.hook = fault
        talk = self.talks.any()
        await self.ask(server, self.talks.ask_of(talk), talk, fault)
        await server.settled()
        if not isinstance(fault.error, EngineLost):
            await self.at_rest(server)
        server.engine.hook = _nothing
        if fault.fired:
            self.counts[f"failed {fault.step}"] += 1
            self.forgive()
        return fault.fired

    @asynccontextmanager
    async def _held(self, server: Running, step: str, nth: int) -> AsyncIterator[Gate]:
        """The engine stops at the nth such step, until this is left at the latest."""
        gate = server.engine.hook = Gate(step, nth)
        try:
            yield gate
        finally:
            gate.opened.set()
        await server.settled()
        server.engine.hook = _nothing

    def dialects_of(self, _ask: Ask) -> list[str]:
        """Those in which a prompt is the same."""
        return list(DIALECTS)

    async def _sent_and_left(self, server: Running, ask: Ask, moment: Callable[[], bool]) -> None:
        """The client leaves at that moment, if it is not answered before."""
        self.expected(ask)
        async with anyio.create_task_group() as tasks:
            ended: list[bool] = []

            async def send() -> None:
                await self.send(server, ask)
                ended.append(True)

            tasks.start_soon(send)
            await until(lambda: bool(ended) or moment())
            tasks.cancel_scope.cancel()


def _nothing(_step: str, _number: int) -> None:
    pass


HAPPENINGS = (
    Step("turn", 14),
    Step("away_and_back", 4),
    Step("again_at_once", 2),
    Step("several", 2),
    Step("leave", 2),
    Step("fail", 2),
    Step("lose", 0.2),
    Step("forget", 0.5),
    Step("drop", 1),
    Step("damage", 0.5),
    Step("restart", 0.5),
)
