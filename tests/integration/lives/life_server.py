"""One life of a server: what it is made of, how it is asked, and what must hold after everything that happens to it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from parkd.errors import EngineLost, RestoreFailed
from parkd.lane import checkpoints
from parkd.store.records import Parked
from parkd.types import ConversationKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Running, body_of, running
from tests.integration.api.disk_harness import running_on, written
from tests.integration.lives.life_engines import KINDS, VECTORS, Reference
from tests.integration.lives.life_talks import Ask, Talk, Talks
from tests.lives.life import Choices, History

CONTEXT = 4096
ROOM = CONTEXT - 600
LOGS = ("parkd", "asyncio", "uvicorn.error")
ANSWERS_ANYWAY = frozenset({"capture", "copied"})
"""Steps whose failure costs time, never an answer."""


class Injected:
    """A failure of the engine at its nth call of a step."""

    def __init__(self, step: str, nth: int, error: Exception) -> None:
        self.step, self.error = step, error
        self.fired = False
        self._left = nth

    def __call__(self, step: str, _number: int) -> None:
        if step == self.step:
            self._left -= 1
            if self._left == 0:
                self.fired = True
                raise self.error

    @property
    def may_cost_the_answer(self) -> bool:
        if isinstance(self.error, EngineLost):
            return self.fired
        return self.fired and self.step not in ANSWERS_ANYWAY and not isinstance(self.error, RestoreFailed)


class Heard(logging.Handler):
    """What the server complains about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())

    @contextmanager
    def listening(self) -> Iterator[None]:
        for name in LOGS:
            logging.getLogger(name).addHandler(self)
        try:
            yield
        finally:
            for name in LOGS:
                logging.getLogger(name).removeHandler(self)


@dataclass
class Reply:
    text: str = ""
    error: str = ""
    """Empty: it is a whole answer."""
    cache: str = ""
    reused: int = 0


class LifeServer(Choices):
    """The server of one seed over the fake engine, whose state is compared with that of the tokens it should be of."""

    def __init__(self, kind: str, seed: int, folder: Path | None = None) -> None:
        """`folder` is where it parks on disk; None: in RAM only."""
        super().__init__(np.random.default_rng([seed, *kind.encode()]))
        self.history = History(f"{seed} of kind {kind}")
        self.folder = folder
        self.counts: Counter[str] = Counter()
        """What happened, and where answers began."""
        self.ctx_checkpoints = self.pick([1, 4, 8, 8])
        self.step = self.pick([256, 512, checkpoints.CHECKPOINT_STEP_TOKENS])
        self.may_be_damaged = self.pick([False, False, True])
        self.damaged = False
        """Whether something parked is not what the engine copied, so that restores may fail."""
        scales = self.pick([(None,), (None, None, {"calm": 2.0})])
        self._options = {"stages": self.pick([1, 2, 3]), "context_tokens": CONTEXT, "steering": VECTORS}
        self._make = lambda: KINDS[kind](
            **self._options, batch_tokens=self._batch, ctx_checkpoints=self.ctx_checkpoints
        )
        self._batch = self.pick([128, 192, 512])
        self._budget_bytes = self.pick([60_000, 300_000, *[64 * MIB] * 3])
        self._slots = self.pick([None, None, None, 2, 4])
        self._read_s = self.pick([1e-3, 1e-3, 1e-3, 6e-9])
        """What reading a token is taken to cost: mostly more than restoring it, sometimes about the same."""
        fixed_bytes = 8 * self._make().fixed.words
        self.reference = Reference(
            FakeEngine(**self._options, fixed_bytes=fixed_bytes, ctx_checkpoints=64, batch_tokens=384)
        )
        self.talks = Talks(self.reference.engine, self.random, ROOM, min(self.step, 512), scales)
        self._heard = Heard()
        self._steerings = {self._key_digest(scale): scale for scale in scales}

    # -- its processes --

    @contextmanager
    def lived(self) -> Iterator[None]:
        """Within this, its logs are listened to, and checkpoints are as close as this life has them."""
        usual = checkpoints.CHECKPOINT_STEP_TOKENS
        checkpoints.CHECKPOINT_STEP_TOKENS = self.step
        try:
            with self._heard.listening(), self.history.told():
                yield
        finally:
            checkpoints.CHECKPOINT_STEP_TOKENS = usual

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Running]:
        """A process, from its start to an orderly end. Without a folder it knows nothing of the one before."""
        engine, ticks = self._make(), count()
        if self.folder is None:
            budgets = {"budget_bytes": self._budget_bytes, "slots": self._slots}
            process = running(engine, **budgets, clock=lambda: float(next(ticks)), answer_bytes=0)
        else:
            process = running_on(self.folder, engine, ram_bytes=max(200_000, self._budget_bytes), slots=self._slots)
        async with process as server:
            costs = server.server.proxy.costs
            costs.note_read(10_000, 10_000 * self._read_s)
            costs.note_read = lambda *_: None
            yield server
            await self.at_rest(server)
        stats = server.store.stats()
        assert (stats.leased, stats.captures_in_flight) == (0, 0)
        server.store.close()
        assert server.store.stats().bytes_in_use == 0

    async def at_rest(self, server: Running) -> None:
        """Returns when nothing runs, waits, is copied or written."""
        await server.settled()
        await server.server.proxy.lives[0].settle()
        if self.folder is not None:
            await written(server)

    # -- asking --

    async def ask(self, server: Running, ask: Ask, talk: Talk | None = None, fault: Injected | None = None) -> Reply:
        """Sends it and compares the answer; without one, there must have been a fault that excuses it."""
        expected = self.reference.answer(ask.messages, ask.max_tokens, ask.stop, ask.steering)
        reply = await self.send(server, ask)
        if reply.error:
            assert fault is not None, reply
            assert fault.may_cost_the_answer, (fault.step, fault.error, reply)
            self.counts["no answer"] += 1
            return reply
        assert reply.text == expected, (reply, expected)
        self.counts[reply.cache] += 1
        if talk is not None:
            talk.answer = reply.text
        return reply

    async def send(self, server: Running, ask: Ask) -> Reply:
        fields: dict[str, Any] = {"stop": ask.stop} if ask.stop else {}
        if ask.steering is not None:
            fields["steering"] = ask.steering
        response = await server.client.post(
            "/v1/chat/completions",
            json=body_of(ask.messages, ask.max_tokens, stream=ask.streams, **fields),
            headers={"x-parkd-cache-mode": ask.mode},
        )
        return _reply(response, streams=ask.streams)

    # -- what must hold --

    def forgive(self) -> None:
        """What was complained about so far had a reason."""
        self._heard.said.clear()

    def check(self, server: Running) -> None:
        """Nothing runs: what is live is what its units say, and the store is inside its budget."""
        if self.damaged:
            self._heard.said = [said for said in self._heard.said if "restore failed" not in said]
        assert not self._heard.said, self._heard.said
        live, engine = server.server.proxy.lives[0], server.engine
        assert engine.position == live.rows.position
        assert (engine.checkpoints, engine.rewind_floor) == (live.checkpoints, live.rewind_floor)
        if live.rows.key is not None:
            steering = self._steerings[live.rows.key.digest]
            self.reference.compare(engine, live.rows.units, steering, engine.checkpoints)
        stats = server.store.stats()
        assert stats.peak_bytes_allocated <= stats.budget_bytes

    def check_parked(self, server: Running) -> None:
        """Everything in memory is what its units say, wherever it can be restored. Only when at rest."""
        stats = server.store.stats()
        assert (stats.leased, stats.captures_in_flight) == (0, 0)
        for entry in [] if self.damaged else list(server.store.table.in_ram.values()):
            parked = entry.parked
            for place in {checkpoint.position for checkpoint in parked.checkpoints} or {parked.position}:
                scratch = self._make()
                with server.store.lease(parked.id, place) as lease:
                    scratch.restore(lease.transfer)
                steering = self._steerings[parked.key_digest]
                self.reference.compare(scratch, parked.units[:place], steering, scratch.checkpoints)
                self.counts["restorable"] += 1

    def any_parked(self, server: Running) -> Parked | None:
        """One that is in memory; None: there is none."""
        entries = list(server.store.table.in_ram.values())
        return self.pick(entries).parked if entries else None

    def _key_digest(self, scale: Any) -> bytes:
        engine = self.reference.engine
        return ConversationKey("", engine.info.fingerprint, engine.steering_digest(scale)).digest


def _reply(response: httpx.Response, *, streams: bool) -> Reply:
    if response.status_code != 200:
        return Reply(error=f"{response.status_code} {response.text}")
    if not streams:
        document = response.json()
        timings = document["timings"]
        text = document["choices"][0]["message"]["content"]
        return Reply(text or "", "", timings["cache"], timings["cache_n"])
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    if failed := [chunk for chunk in chunks if "error" in chunk]:
        return Reply(error=json.dumps(failed))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    timings = next(chunk["timings"] for chunk in reversed(chunks) if "timings" in chunk)
    return Reply("".join(delta.get("content") or "" for delta in deltas), "", timings["cache"], timings["cache_n"])
