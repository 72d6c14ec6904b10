"""Prompts that take long to prepare: they hold up neither the end of the server nor another key's prompts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import anyio
import httpx
import pytest

from parkd.errors import Cancelled
from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey, StillWanted, TokenMask, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Messages, body_of, running, until

SLOW, QUICK = "This takes for ever.", "This does not."
KEYS = (NamedKey("anna", "k-anna"), NamedKey("ben", "k-ben"))

SERVER = """
import threading, time, urllib.request
from parkd import cli
from parkd.proxy.config import ProxyConfig
from parkd.proxy.server import Server
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import make_services

def prepare(request, tail, still_wanted):
    print("begun", flush=True)
    time.sleep(600)

def ask(url):
    body = b'{"messages": [{"role": "user", "content": "Hello"}]}'
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body, headers))

def main():
    services, _ = make_services(FakeEngine(), config=ProxyConfig(shutdown_deadline_s=0.2), build_mask=prepare)
    server = Server(services, on_started=lambda url: threading.Thread(target=ask, args=(url,), daemon=True).start())
    server.run()
    return 0

cli.main = main
cli.entry()
"""


class Preparation:
    """Masks whose compilation does not end before `ended` is set, as that of some schemas would not."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = threading.Event()

    def __call__(self, request: TurnRequest, _tail: str, still_wanted: StillWanted) -> TokenMask | None:
        if request.messages[-1]["content"] == SLOW:
            self.count += 1
            assert self.ended.wait(60)
        return None


def asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def post(url: str, text: str, key: str = "none") -> httpx.Response | None:
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            headers = {"x-api-key": key}
            return await client.post("/v1/chat/completions", json=body_of(asked(text), 4), headers=headers)
    return None


def test_the_process_ends_while_a_prompt_is_prepared() -> None:
    """Found by use 4: SIGTERM did not end the process while a schema was compiled."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.anyio
async def test_one_keys_slow_prompts_leave_a_thread_for_the_others() -> None:
    """Found by use 4: two requests of one key held both threads, and nobody else's prompt was prepared."""
    preparation = Preparation()
    config = ProxyConfig(named_keys=KEYS)
    try:
        async with (
            running(FakeEngine(), config=config, build_mask=preparation) as server,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(3):
                tasks.start_soon(post, server.url, SLOW, "k-anna")
            await until(lambda: preparation.count >= 1)
            with anyio.fail_after(15):
                answer = await post(server.url, QUICK, "k-ben")
            assert answer is not None
            assert answer.status_code == 200
            assert preparation.count == 1, "the others of this key wait for it"
            preparation.ended.set()
    finally:
        preparation.ended.set()


@pytest.mark.anyio
async def test_found_by_use_4_a_prompt_is_prepared_no_longer_than_its_client_waits() -> None:
    """What ran went on to its end, and what waited for a thread ran after it, though their clients had left."""
    begun, gone = [], threading.Event()

    def prepare(request: TurnRequest, _tail: str, still_wanted: StillWanted) -> TokenMask | None:
        if request.messages[-1]["content"] != SLOW:
            return None
        begun.append(request)
        while True:
            try:
                still_wanted()
            except Cancelled:
                gone.set()
                raise
            time.sleep(0.01)

    config = ProxyConfig(named_keys=KEYS)
    async with running(FakeEngine(), config=config, build_mask=prepare) as server:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(post, server.url, SLOW, "k-anna")
            await until(lambda: len(begun) == 1)
            tasks.cancel_scope.cancel()
        await until(gone.is_set)
        with anyio.fail_after(15):
            answer = await post(server.url, QUICK, "k-anna")
        assert answer is not None
        assert answer.status_code == 200
        assert len(begun) == 1, "those that waited left the queue"
