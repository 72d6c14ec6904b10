"""What would make the first request of its kind wait is done before any is answered."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from dataclasses import replace

import pytest
from starlette.applications import Starlette

from parkd.answers.structured import StructuredOutput
from parkd.identity.builder import IdentityBuilder
from parkd.proxy.app import create_app
from parkd.proxy.config import ProxyConfig, Services
from parkd.proxy.server import CutRequests, serve
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio


def app_with(prepare: object) -> Starlette:
    engine = FakeEngine()
    identity = IdentityBuilder(engine.tokenizer, engine.template, engine.info.fingerprint, 256, 1 << 20)
    return create_app(replace(Services(engine, identity.build, None), prepare=prepare))


async def test_it_is_done_in_a_thread_of_its_own_when_requests_are_first_answered() -> None:
    threads: list[int] = []
    app = app_with(lambda: threads.append(threading.get_ident()))
    async with app.state.parkd.life(app):
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()


async def test_a_failure_is_told_and_the_server_starts(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such vocabulary")

    app = app_with(fail)
    async with app.state.parkd.life(app):
        assert "no such vocabulary" in caplog.text


def test_a_vocabulary_is_read_once_and_ahead() -> None:
    made: list[int] = []

    def build() -> object:
        made.append(1)
        return object()

    structured = StructuredOutput(build, 1, frozenset())  # type: ignore[arg-type]
    structured.prepare()
    structured.prepare()
    assert made == [1]


def test_what_was_loaded_is_left_out_of_collections_before_the_first_answer() -> None:
    """A full collection over the libraries' objects holds the interpreter for tenths of a second."""
    frozen: list[int] = []

    def started(_url: str) -> None:
        frozen.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGTERM)

    engine = FakeEngine()
    identity = IdentityBuilder(engine.tokenizer, engine.template, engine.info.fingerprint, 256, 1 << 20)
    before = gc.get_freeze_count()
    try:
        assert serve(Services(engine, identity.build, None, ProxyConfig(port=0)), on_started=started) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 10_000


def test_a_request_that_is_cut_at_the_stop_is_one_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("uvicorn.error")
    only_cut = CutRequests()
    logger.addFilter(only_cut)
    try:
        for error in (asyncio.CancelledError("cut"), ValueError("ours")):
            logger.error("Exception in ASGI application\n", exc_info=error)
        logger.error("Traceback (most recent call last):\n  ...\nasyncio.exceptions.CancelledError\n")
    finally:
        logger.removeFilter(only_cut)
    assert [record.getMessage() for record in caplog.records] == [
        "a running request was cut because the server stops",
        "Exception in ASGI application\n",
    ]
