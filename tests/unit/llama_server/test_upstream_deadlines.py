"""No wait for a llama-server is without an end: each has a deadline with a name, and its passing is told.

Deadlines.connect_s    until it accepts              Deadlines.answer_s    an answer that is one document
Deadlines.file_s       saving, restoring a slot      Deadlines.silence_s   between two events of a completion
SETTLE_S               a slot whose answer was left  LOAD_WAIT_S           a server that loads its model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from parkd.config import Deadlines, UpstreamConfig
from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.llama_server.completion import SETTLE_S, settle
from parkd.engine_adapter.llama_server.slots import Slot
from parkd.engine_adapter.llama_server.start import LOAD_WAIT_S, connect
from parkd.engine_adapter.llama_server.stream import CompletionStream
from parkd.errors import ModelError, UpstreamFailed, UpstreamTimeout
from tests.unit.llama_server.upstream_kit import URL, Events, FakeLlama, ok, reading, refusal, routed, sse

DEADLINES = Deadlines(connect_s=1.0, answer_s=20.0, file_s=300.0, silence_s=4000.0)
"""No two alike, so that none stands for another."""
SSE = {"content-type": "text/event-stream"}


@pytest.fixture
def router() -> Iterator[respx.Router]:
    with routed(base_url=URL) as router:
        yield router


class Clock:
    """Goes on by `step_s` at each look, and by what is slept."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


CALLS: dict[str, tuple[Callable[[UpstreamClient], object], str]] = {
    "properties": (lambda server: server.properties(), "answer_s"),
    "slots": (lambda server: server.slots(), "answer_s"),
    "models": (lambda server: server.models(), "answer_s"),
    "adapters": (lambda server: server.adapters(), "answer_s"),
    "template": (lambda server: server.apply_template({"messages": []}), "answer_s"),
    "tokenize": (lambda server: server.tokenize("a"), "answer_s"),
    "detokenize": (lambda server: server.detokenize([1]), "answer_s"),
    "save": (lambda server: server.save(0, "x"), "file_s"),
    "restore": (lambda server: server.restore(0, "x"), "file_s"),
    "complete": (lambda server: server.complete({"prompt": [1]}), "silence_s"),
}


@pytest.mark.parametrize(("call", "deadline"), CALLS.values(), ids=list(CALLS))
def test_every_call_waits_by_its_own_deadline(
    router: respx.Router, call: Callable[[UpstreamClient], object], deadline: str
) -> None:
    route = router.route().mock(return_value=httpx.Response(500))
    with pytest.raises(UpstreamFailed):
        call(UpstreamClient(URL, deadlines=DEADLINES))
    told = route.calls[0].request.extensions["timeout"]
    expected = asdict(DEADLINES)[deadline]
    assert told == {"connect": 1.0, "read": expected}


def drips() -> Iterator[bytes]:
    while True:
        yield b" "


def first_of(answer: Any) -> object:
    """Of a completion its first event."""
    return answer.next() if isinstance(answer, CompletionStream) else answer


@pytest.mark.parametrize("name", ["tokenize", "save", "restore", "complete"])
@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_comes_byte_by_byte_is_given_up(router: respx.Router, name: str, status: int) -> None:
    """A deadline between two bytes is none: it bounds the whole answer, or the silence before an event."""
    router.route().mock(return_value=httpx.Response(status, headers=SSE, stream=Events(drips())))
    client = UpstreamClient(URL, deadlines=DEADLINES, monotonic=Clock(1.0))
    with pytest.raises(UpstreamTimeout, match="--upstream-timeout"):
        first_of(CALLS[name][0](client))


def test_a_save_may_take_longer_than_other_answers(router: respx.Router) -> None:
    """The clock goes on by 25 s for each part, which is more than `answer_s`, and not more than `file_s`."""
    body = b'{"id_slot": 0, "n_saved": 3, "n_written": 9}'
    router.route().mock(side_effect=lambda _: httpx.Response(200, stream=Events([body[:9], body[9:]])))
    client = UpstreamClient(URL, deadlines=DEADLINES, monotonic=Clock(25.0))
    assert client.save(0, "x").bytes == 9
    with pytest.raises(UpstreamTimeout):
        client.properties()


def test_the_silence_is_counted_anew_behind_each_event(router: respx.Router) -> None:
    parts = [sse(reading(100, 0, at)) for at in range(10)]
    router.post("/completion").mock(return_value=httpx.Response(200, headers=SSE, stream=Events(parts)))
    deadlines = Deadlines(silence_s=50.0)
    stream = UpstreamClient(URL, deadlines=deadlines, monotonic=Clock(20.0)).complete({"prompt": [1]})
    assert [stream.next() for _ in range(10)][-1] is not None


def test_a_slot_that_goes_on_for_nobody_is_waited_for_so_long(tmp_path: Path, router: respx.Router) -> None:
    server, clock = FakeLlama(tmp_path), Clock(0.9)
    server.mount(router)
    server.slots[1].processing = True
    client = UpstreamClient(URL)
    with pytest.raises(UpstreamTimeout, match="was abandoned"):
        settle(client, Slot(1), sleep=clock.sleep, monotonic=clock)
    assert SETTLE_S < clock.now_s < SETTLE_S + 2

    def ends(_seconds: float) -> None:
        server.slots[1].processing = False

    assert settle(client, Slot(1), sleep=ends, monotonic=clock) is None


def test_a_server_that_loads_its_model_is_waited_for_and_not_for_ever(tmp_path: Path, router: respx.Router) -> None:
    server, clock, shown = FakeLlama(tmp_path), Clock(4.0), list[float]()
    server.mount(router)
    loading = lambda _request: refusal(503, "Loading model", "unavailable_error")  # noqa: E731
    server.answers["/props"] = loading
    config = UpstreamConfig(URL, tmp_path, tmp_path / "cache")
    with pytest.raises(ModelError, match="is loading its model"):
        connect(config, lambda _what, share: shown.append(share), sleep=clock.sleep, monotonic=clock)
    assert LOAD_WAIT_S < clock.now_s < LOAD_WAIT_S + 20
    assert 0 < shown[0] < shown[-1] <= 1

    def loaded(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now_s > 30:
            server.answers.clear()

    clock.now_s = 0
    assert connect(config, sleep=loaded, monotonic=clock).info.model_name == "fake"


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), ok({"n": 1}), refusal(500, "broken")], ids=repr)
def test_a_server_that_does_not_load_is_not_waited_for(tmp_path: Path, router: respx.Router, fault: Any) -> None:
    clock = Clock()
    effect = {"side_effect": fault} if isinstance(fault, Exception) else {"return_value": fault}
    router.route().mock(**effect)
    with pytest.raises(ModelError):
        connect(UpstreamConfig(URL, tmp_path, tmp_path), sleep=clock.sleep, monotonic=clock)
    assert clock.now_s == 0
