"""parkd before a server of another kind, composed as the command does it."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import httpx

from parkd.cli.compose import compose, store_config_of
from parkd.cli.model import MemoryShare, load_remote
from parkd.config import load
from parkd.engine_adapter.remote.engine import RemoteEngine
from parkd.identity.background import BackgroundWork
from parkd.identity.normalise import RewriteRule
from parkd.ledger.ledger import Ledger
from parkd.proxy.server import Server
from parkd.types import NamedKey
from tests.fakes.openai_server import FakeUpstream
from tests.integration.api.api_harness import Answer, Messages, body_of, plain_client, read_stream, serve, until


def open_engine(upstream: FakeUpstream, **flags: str) -> RemoteEngine:
    names = {name.replace("_", "-"): value for name, value in flags.items()}
    return load_remote(load({"upstream": upstream.url, "ledger": "off", **names}, {}), lambda _what, _share: None)


@dataclass
class Before:
    """parkd before an upstream, and a client of it."""

    server: Server
    engine: RemoteEngine
    client: httpx.AsyncClient
    ledger: Ledger | None

    async def chat(self, messages: Messages, *, max_tokens: int = 64, key: str | None = None, **fields: Any) -> Answer:
        response = await self.post(messages, max_tokens=max_tokens, key=key, **fields)
        assert response.status_code == 200, response.text
        document = response.json()
        choice = document["choices"][0]
        return Answer(
            choice["message"]["content"],
            choice["finish_reason"],
            response.headers,
            document["usage"],
            document["timings"],
            [choice["message"]],
        )

    async def post(
        self, messages: Messages, *, max_tokens: int = 64, key: str | None = None, **fields: Any
    ) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.post(
            "/v1/chat/completions", json=body_of(messages, max_tokens, **fields), headers=headers
        )

    async def stream(self, messages: Messages, *, max_tokens: int = 64, **fields: Any) -> Answer:
        body = body_of(messages, max_tokens, stream=True, stream_options={"include_usage": True}, **fields)
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await read_stream(response)

    async def explain(self, request_id: str) -> Mapping[str, Any]:
        response = await self.client.get(f"/parkd/explain/{request_id}")
        assert response.status_code == 200, response.text
        document: Mapping[str, Any] = response.json()
        return document

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    async def settled(self) -> None:
        lane = self.server.proxy.lane
        await until(lambda: not lane.busy and not lane.waiting)


@asynccontextmanager
async def before(
    upstream: FakeUpstream,
    *,
    named_keys: tuple[NamedKey, ...] = (),
    rules: tuple[RewriteRule, ...] = (),
    ledger: Path | None = None,
    **flags: str,
) -> AsyncIterator[Before]:
    """`flags` are those of the command, with `_` for `-`."""
    names = {name.replace("_", "-"): value for name, value in flags.items()}
    config = load({"upstream": upstream.url, "ledger": "off", "port": "0", **names}, {})
    engine, background = load_remote(config, lambda _what, _share: None), BackgroundWork()
    memory = MemoryShare(config.cache.budget_bytes)
    services = compose(config, engine, store_config_of(config, memory), named_keys, None, rules, background=background)
    book = None if ledger is None else Ledger(ledger)
    server = Server(replace(services, ledger=book))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, server, listener)
                await until(lambda: server.started)
                try:
                    async with plain_client(server.url) as client:
                        yield Before(server, engine, client, book)
                finally:
                    server.should_exit = True
    finally:
        engine.close()
        background.close()
        if book is not None:
            book.close()


def events_of(text: str) -> list[dict[str, Any]]:
    """The documents of a stream of events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
