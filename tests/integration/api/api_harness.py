"""A real server on a real socket over the fake engine, with the real store and identity."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import anyio
import httpx

from parkd.answers.base import OutputFormat
from parkd.identity.builder import IdentityBuilder
from parkd.identity.normalise import NormaliserConfig
from parkd.identity.output_memory import OutputMemory
from parkd.ledger.ledger import Ledger
from parkd.proxy.access import namespaces_of
from parkd.proxy.config import BuildMask, ProxyConfig, Services
from parkd.proxy.server import Server
from parkd.store.policy import policy_named
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from tests.fakes.engine import FakeEngine

MIB = 1 << 20
WAIT_DEADLINE_S = 20.0

Messages = list[dict[str, Any]]


async def until(condition: Callable[[], bool], deadline_s: float = WAIT_DEADLINE_S) -> None:
    """Returns when the condition holds. It is polled: what is waited for happens on other threads and in the server."""
    with anyio.fail_after(deadline_s):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


class Gate:
    """Holds the engine at a named step until opened. `reached` is set when it got there."""

    def __init__(self, name: str, nth: int = 1) -> None:
        self._name = name
        self._left = nth
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, name: str, _number: int) -> None:
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.opened.wait(20), "nobody opened the gate"

    async def wait_reached(self) -> None:
        await until(self.reached.is_set)


def fail_at(name: str, nth: int, error: Callable[[], BaseException]) -> Callable[[str, int], None]:
    """A hook that raises at the nth step of that name."""
    left = [nth]

    def hook(step: str, _number: int) -> None:
        if step == name:
            left[0] -= 1
            if left[0] == 0:
                raise error()

    return hook


@dataclass
class Answer:
    """One chat answer, whichever way it came."""

    text: str
    finish_reason: str
    headers: httpx.Headers
    usage: dict[str, Any]
    timings: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reused(self) -> int:
        return int(self.timings["cache_n"])

    @property
    def cache(self) -> str:
        return str(self.timings["cache"])


@dataclass
class Running:
    """A server and a client to it."""

    server: Server
    engine: FakeEngine
    store: ConversationStore | None
    identity: IdentityBuilder
    client: httpx.AsyncClient
    url: str
    answers: OutputMemory | None = None

    async def chat(self, messages: Messages, *, max_tokens: int = 8, **fields: Any) -> Answer:
        response = await self.client.post("/v1/chat/completions", json=body_of(messages, max_tokens, **fields))
        assert response.status_code == 200, response.text
        document = response.json()
        choice = document["choices"][0]
        return Answer(
            choice["message"]["content"],
            choice["finish_reason"],
            response.headers,
            document["usage"],
            document["timings"],
        )

    async def stream(self, messages: Messages, *, max_tokens: int = 8, **fields: Any) -> Answer:
        body = body_of(messages, max_tokens, stream=True, stream_options={"include_usage": True}, **fields)
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await read_stream(response)

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """Ids of the prompt, by the engine's own template and tokenizer: independent of parkd's identity."""
        return self.engine.tokenizer.encode(self.engine.template.render(messages, (), {}).text)

    async def settled(self) -> None:
        """Returns when nothing runs or waits, so that what is parked behind a reply is in."""
        lane = self.server.proxy.lane
        await until(lambda: not lane.busy and not lane.waiting)


def body_of(messages: Messages, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}


async def read_stream(response: httpx.Response) -> Answer:
    lines = [line async for line in response.aiter_lines()]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    text = "".join(choice["delta"].get("content") or "" for choice in deltas)
    last = chunks[-1]
    return Answer(
        text,
        deltas[-1]["finish_reason"] if deltas else "",
        response.headers,
        last.get("usage") or {},
        last.get("timings") or {},
        chunks,
    )


def make_services(
    engine: FakeEngine,
    *,
    budget_bytes: int = 64 * MIB,
    slots: int | None = None,
    config: ProxyConfig | None = None,
    output: OutputFormat | None = None,
    build_mask: BuildMask | None = None,
    answers: OutputMemory | None = None,
    normaliser: NormaliserConfig | None = None,
    eviction_policy: str = "value",
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Services, IdentityBuilder]:
    config = config or ProxyConfig()
    identity = IdentityBuilder(
        engine.tokenizer,
        engine.template,
        engine.info.fingerprint,
        engine.info.layout.block_tokens,
        1 << 20,
        answers=answers,
        normaliser=normaliser,
        images=engine.images,
        context_tokens=engine.info.context_tokens,
        namespaces=len(namespaces_of(config.api_keys, config.named_keys, config.operator_keys)),
        template_within=engine.template_within,
    )
    serial = count(1)
    store = ConversationStore(
        StoreConfig(budget_bytes, engine.info.layout.block_tokens, slots, slab_bytes=64 * 1024),
        engine.info.layout,
        clock=clock,
        new_id=lambda: f"conversation-{next(serial)}",
        policy=policy_named(eviction_policy),
    )
    services = Services(
        engine,
        identity.build,
        store,
        replace(config, port=0),
        output=output or OutputFormat(),
        build_mask=build_mask,
        render=identity.render,
        add_rule=identity.renderer.add_rule,
        remember=None if answers is None else answers.remember,
    )
    return services, identity


def plain_client(url: str) -> httpx.AsyncClient:
    """A client of a test's server. It has no use for the system's certificates, which take longer to load than most
    tests take."""
    return httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False)


@asynccontextmanager
async def running(
    engine: FakeEngine,
    *,
    budget_bytes: int = 64 * MIB,
    slots: int | None = None,
    config: ProxyConfig | None = None,
    send_buffer_bytes: int | None = None,
    output: OutputFormat | None = None,
    build_mask: BuildMask | None = None,
    answer_bytes: int = MIB,
    normaliser: NormaliserConfig | None = None,
    eviction_policy: str = "value",
    clock: Callable[[], float] = time.monotonic,
    ledger: Ledger | None = None,
) -> AsyncIterator[Running]:
    """Starts a server, gives it, stops it as SIGTERM would. `clock` is the store's, in seconds."""
    end_texts = [engine.tokenizer.decode([token_id]) for token_id in engine.info.end_token_ids]
    answers = OutputMemory(answer_bytes, end_texts) if answer_bytes else None
    services, identity = make_services(
        engine,
        budget_bytes=budget_bytes,
        slots=slots,
        config=config,
        output=output,
        build_mask=build_mask,
        answers=answers,
        normaliser=normaliser,
        eviction_policy=eviction_policy,
        clock=clock,
    )
    server = Server(replace(services, ledger=ledger))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, server, listener)
            await until(lambda: server.started)
            try:
                async with plain_client(server.url) as client:
                    yield Running(server, engine, services.store, identity, client, server.url, answers)
            finally:
                server.should_exit = True


async def serve(server: Server, listener: socket.socket) -> None:
    """Without `serve`'s handlers of signals: one that ends the run would stop the server of the test that runs just
    then instead, whose answers would be that the server is stopping."""
    await server._serve(sockets=[listener])


@contextmanager
def running_in_thread(
    engine: FakeEngine,
    config: ProxyConfig | None = None,
    output: OutputFormat | None = None,
    build_mask: BuildMask | None = None,
    ledger: Ledger | None = None,
) -> Iterator[Server]:
    """For clients that block: the server has a thread and an event loop of its own."""
    end_texts = [engine.tokenizer.decode([token_id]) for token_id in engine.info.end_token_ids]
    answers = OutputMemory(MIB, end_texts)
    services, _ = make_services(engine, config=config, output=output, build_mask=build_mask, answers=answers)
    server = Server(replace(services, ledger=ledger))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    began_s = time.monotonic()
    while not server.started:
        assert time.monotonic() - began_s < WAIT_DEADLINE_S
        time.sleep(0.005)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(WAIT_DEADLINE_S)
        assert not thread.is_alive()
