"""A server over the fake engine with a disk tier: every start is a new process as far as the store can tell."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from parkd.answers.base import OutputFormat
from parkd.identity.builder import IdentityBuilder
from parkd.proxy.config import ProxyConfig, Services
from parkd.proxy.server import Server
from parkd.store.files.fs import FileSystem
from parkd.store.files.park_directory import open_directory
from parkd.store.opening import DiskOptions, open_tiered
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from tests.fakes.engine import FakeEngine
from tests.integration.api import api_harness
from tests.integration.api.api_harness import MIB, Running, plain_client, until

DAY_BYTES = 200 << 30


def disk_services(
    engine: FakeEngine,
    files: FileSystem,
    *,
    ram_bytes: int = 8 * MIB,
    disk_bytes: int = 64 * MIB,
    slots: int | None = None,
    config: ProxyConfig | None = None,
    directory: Path | None = None,
) -> tuple[Services, IdentityBuilder]:
    identity = IdentityBuilder(
        engine.tokenizer,
        engine.template,
        engine.info.fingerprint,
        engine.info.layout.block_tokens,
        1 << 20,
        images=engine.images,
    )
    numbers = iter(range(1, 1 << 30))
    store = open_tiered(
        files,
        StoreConfig(ram_bytes, engine.info.layout.block_tokens, slots, slab_bytes=64 * 1024),
        DiskOptions(disk_bytes, DAY_BYTES),
        engine.info.layout,
        engine.info.fingerprint,
        clock=time.monotonic,
        wall=time.time,
        new_id=lambda: f"{time.time_ns()}-{next(numbers)}",
        directory=directory,
    )
    config = replace(config or ProxyConfig(), port=0)
    return Services(engine, identity.build, store, config, files=files), identity


@asynccontextmanager
async def running_on(
    path: Path,
    engine: FakeEngine | None = None,
    *,
    files: FileSystem | None = None,
    ram_bytes: int = 8 * MIB,
    disk_bytes: int = 64 * MIB,
    slots: int | None = None,
    config: ProxyConfig | None = None,
    output: OutputFormat | None = None,
) -> AsyncIterator[Running]:
    """Starts a server over the directory, gives it, stops it as SIGTERM would."""
    engine = engine or FakeEngine()
    files = files or open_directory(path)
    services, identity = disk_services(
        engine, files, ram_bytes=ram_bytes, disk_bytes=disk_bytes, slots=slots, config=config, directory=path
    )
    server = Server(replace(services, output=output or services.output))
    # The fake engine reads faster than any disk; a model does not. So reading costs what is assumed at first.
    server.proxy.costs.note_read = lambda *_: None
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(api_harness.serve, server, listener)
                await until(lambda: server.started)
                try:
                    async with plain_client(server.url) as client:
                        yield Running(server, engine, services.store, identity, client, server.url)
                finally:
                    server.should_exit = True
    finally:
        files.close()


async def written(server: Running) -> ConversationStore:
    """Returns when nothing waits for the disk."""
    store = server.store
    assert isinstance(store, ConversationStore)
    await server.settled()
    await until(lambda: not store.has_writes)
    return store
