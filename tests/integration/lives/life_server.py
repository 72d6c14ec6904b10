"""One life of a server: what it is made of, how it is asked, and what must hold after everything that happens to it."""

from __future__ import annotations

import ast
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from parkd.errors import EngineLost, RestoreFailed
from parkd.lane import checkpoints
from parkd.proxy.access import namespace_of
from parkd.proxy.config import ProxyConfig
from parkd.store.records import Parked
from parkd.types import ConversationKey, NamedKey
from tests.clients.said import Said
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Running, running
from tests.integration.api.disk_harness import running_on, written
from tests.integration.lives.life_dialects import DIALECTS, Expected
from tests.integration.lives.life_engines import KINDS, VECTORS, Reference
from tests.integration.lives.life_talks import NOBODY, Ask, Client, Talk, Talks
from tests.lives.life import Choices, History

CONTEXT = 4096
ROOM = CONTEXT - 600
KEYS = ProxyConfig(
    named_keys=(NamedKey("ann", "k-ann", "team"), NamedKey("bob", "k-bob", "team"), NamedKey("eve", "k-eve"))
)
CLIENTS = (Client("k-ann", "=team"), Client("k-bob", "=team"), Client("k-eve", namespace_of("k-eve")))
LOGS = ("parkd", "asyncio", "uvicorn.error")
ANSWERS_ANYWAY = frozenset({"capture", "copied"})
"""Steps whose failure costs time, never an answer."""
FAILED = re.compile(r'^(data: |event: )?(\{"error"|error$|response\.failed$)', re.MULTILINE)
"""In a stream of any dialect."""
DIFFERS = re.compile(r"differs from token (\d+)")
LEARNT = re.compile(r"(?:from token|restoring|and) (\d+)")
"""Places in known text, in what a client is told of why tokens were read."""


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
    said: Said | None = None
    error: str = ""
    """Empty: it is a whole answer."""
    cache: str = ""
    reused: int = 0
    prompt_tokens: int = 0


class LifeServer(Choices):
    """The server of one seed over the fake engine, whose state is compared with that of the tokens it should be of."""

    room = ROOM
    """Tokens that a prompt may have."""
    budgets_bytes: Sequence[int] = (60_000, 300_000, *[64 * MIB] * 3)
    steerings: Sequence[Sequence[Mapping[str, float] | None]] = ((None,), (None, None, {"calm": 2.0}))

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
        scales = self.pick(self.steerings)
        self.stages = self.pick([1, 2, 3])
        self.batch = self.pick([128, 192, 512])
        self._budget_bytes = self.pick(self.budgets_bytes)
        self._slots = self.pick([None, None, None, 2, 4])
        self._read_s = self.pick([1e-3, 1e-3, 1e-3, 6e-9])
        """What reading a token is taken to cost: mostly more than restoring it, sometimes about the same."""
        self.clients = self.pick([(NOBODY,), CLIENTS, CLIENTS])
        self.reference = self.engines_of(kind)
        self.talks = Talks(self.reference.engine, self.random, self.room, min(self.step, 512), scales, self.clients)
        self._heard = Heard()
        self._steerings = {self._key_digest(client, scale): scale for client in self.clients for scale in scales}
        self._told: list[tuple[Ask, np.ndarray]] = []
        """What was asked, with the ids of prompt and answer."""

    # -- what may be another in other lives --

    def engines_of(self, kind: str) -> Reference:
        """Prepares to make engines of that kind; returns what they are compared with."""
        options = {"stages": self.stages, "context_tokens": CONTEXT, "steering": VECTORS}
        self._make = lambda: KINDS[kind](**options, batch_tokens=self.batch, ctx_checkpoints=self.ctx_checkpoints)
        fixed_bytes = 8 * self._make().fixed.words
        return Reference(FakeEngine(**options, fixed_bytes=fixed_bytes, ctx_checkpoints=64, batch_tokens=384))

    def fresh_engine(self) -> Any:
        """That of a new process."""
        return self._make()

    def scratch_engine(self) -> Any:
        """Another one, empty."""
        return self._make()

    @property
    def answers(self) -> dict[str, Any]:
        """How the server reads and remembers answers."""
        return {}

    def expected(self, ask: Ask) -> Expected:
        """What is answered. Notes that its client knows it, and what it asks."""
        answer, ids = self.reference.answer(ask.messages, ask.max_tokens, ask.stop, ask.steering)
        self._told.append((ask, np.array(ids)))
        return answer

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
        engine, ticks = self.fresh_engine(), count()
        config = None if self.clients == (NOBODY,) else KEYS
        if self.folder is None:
            budgets = {"budget_bytes": self._budget_bytes, "slots": self._slots}
            answers = {"config": config, "answer_bytes": 0, **self.answers}
            process = running(engine, **budgets, **answers, clock=lambda: float(next(ticks)))
        else:
            ram_bytes = max(200_000, self._budget_bytes)
            process = running_on(self.folder, engine, ram_bytes=ram_bytes, slots=self._slots, config=config)
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
        expected = self.expected(ask)
        reply = await self.send(server, ask)
        if reply.error:
            assert fault is not None, reply
            assert fault.may_cost_the_answer, (fault.step, fault.error, reply)
            self.counts["no answer"] += 1
            return reply
        assert reply.said == DIALECTS[ask.dialect].said(expected), (ask, reply, expected)
        self.counts[reply.cache] += 1
        self.counts[f"in {ask.dialect}"] += 1
        if talk is not None:
            talk.answer = expected
        return reply

    async def send(self, server: Running, ask: Ask) -> Reply:
        dialect, key = DIALECTS[ask.dialect], {"x-api-key": ask.client.key} if ask.client.key else {}
        response = await server.client.post(
            dialect.path, json=dialect.body(ask), headers={"x-parkd-cache-mode": ask.mode, **key}
        )
        if response.status_code != 200:
            return Reply(error=f"{response.status_code} {response.text}")
        if ask.streams and FAILED.search(response.text):
            return Reply(error=response.text)
        said = dialect.from_stream(response.content) if ask.streams else dialect.from_document(response.json())
        try:
            told = await server.client.get(f"/parkd/explain/{response.headers['x-request-id']}", headers=key)
        except httpx.TransportError:
            # The engine was lost behind the answer, and the process ends: nobody is there to explain it.
            assert isinstance(getattr(server.engine.hook, "error", None), EngineLost)
            return Reply(said, cache="unexplained")
        assert told.status_code == 200, told.text
        report = told.json()
        reply = Reply(said, "", report["cache"], report["reused_tokens"], report["prompt_tokens"])
        if not ask.streams:
            assert dialect.reused(response.json()) in (None, reply.reused), response.text
        self.check_told(ask, reply, report, response.headers)
        return reply

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
                scratch = self.scratch_engine()
                with server.store.lease(parked.id, place) as lease:
                    scratch.restore(lease.transfer)
                steering = self._steerings[parked.key_digest]
                self.reference.compare(scratch, parked.units[:place], steering, scratch.checkpoints)
                self.counts["restorable"] += 1

    def any_parked(self, server: Running) -> Parked | None:
        """One that is in memory; None: there is none."""
        entries = list(server.store.table.in_ram.values())
        return self.pick(entries).parked if entries else None

    def check_told(self, ask: Ask, reply: Reply, report: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Its client has state from its namespace only, and learns only of what it said and was told itself."""
        assert reply.prompt_tokens == self.talks.tokens(ask.messages), "every dialect has the same prompt"
        ids = np.array(self.talks.ids(ask.messages))
        before = [told for told in self._told if told[0] is not ask and told[0].steering == ask.steering]
        namespace = [known for other, known in before if other.client.namespace == ask.client.namespace]
        assert reply.reused <= max((_common(known, ids) for known in namespace), default=0), (ask, report)
        told = [known for other, known in before if other.client == ask.client]
        own = [_common(known, ids) for known in told]
        numbers = [int(number) for number in LEARNT.findall(report["why"])]
        assert all(number <= max(own, default=0) for number in numbers), (ask, report)
        if (place := DIFFERS.search(report["why"])) is not None:
            assert int(place[1]) in own, (ask, report)
        divergence = report["divergence"]
        if divergence is not None:
            self.counts["divergence"] += 1
            # What is shown may end in half a character, of which its client has all.
            token, shown = divergence["token"], ast.literal_eval(divergence["known_text"]).rstrip("\ufffd")
            rests = [known[token:].tolist() for known, common in zip(told, own, strict=True) if common == token]
            texts = [self.reference.engine.tokenizer.decode(rest) for rest in rests]
            assert any(text.startswith(shown) for text in texts), (ask, report, texts)
            known_text = divergence["known_text"]  # A header has other characters in another form.
            assert not known_text.isascii() or known_text in headers.get("x-parkd-divergence", known_text)
        else:
            assert "x-parkd-divergence" not in headers
        if ask.client.key:
            self.counts["of a sibling" if max(own, default=0) < reply.reused else "of its own"] += 1

    async def check_slots(self, server: Running) -> None:
        """No client sees a conversation that is longer than what it said and was told itself."""
        for client in self.clients:
            response = await server.client.get("/slots", headers={"x-api-key": client.key} if client.key else {})
            lengths = [len(known) for ask, known in self._told if ask.client == client and ask.steering is None]
            shown = [parked["tokens"] for parked in response.json()[0]["parked"]]
            assert max(shown, default=0) <= max(lengths, default=0)

    def _key_digest(self, client: Client, scale: Any) -> bytes:
        engine = self.reference.engine
        return ConversationKey(client.namespace, engine.info.fingerprint, engine.steering_digest(scale)).digest


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many ids at the start are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
