"""What clients are told when a llama-server fails, in every way in which it can: an error of their dialect or a cold
answer, and the next answer is right. How long each call may take is in `test_upstream_deadlines.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.api.api_harness import body_of
from tests.integration.llama.sidecar_kit import LIMIT, before, check, mounted, opening, parked_in, turn_after
from tests.unit.llama_server.upstream_kit import Events, FakeLlama, ok, refusal

pytestmark = pytest.mark.anyio

Cut = Callable[[Iterator[bytes]], Iterator[bytes]]


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[FakeLlama]:
    with mounted(tmp_path) as upstream:
        yield upstream


def cut_after(number: int, tail: list[bytes], error: Exception | None = None) -> Cut:
    def cut(events: Iterator[bytes]) -> Iterator[bytes]:
        for index, event in enumerate(events):
            if index == number:
                yield from tail
                if error is not None:
                    raise error
                return
            yield event

    return cut


MID_STREAM = {
    "error event": cut_after(14, [b'data: {"error": {"message": "compute error", "code": 500}}\n\n']),
    "garbage": cut_after(14, [b"data: %%%\n\n"]),
    "early close": cut_after(14, []),
    "reset": cut_after(14, [], httpx.ReadError("connection reset")),
    "silence": cut_after(14, [], httpx.ReadTimeout("too long")),
}


@pytest.mark.parametrize("cut", MID_STREAM.values(), ids=list(MID_STREAM))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_an_answer_that_breaks_ends_in_an_error_of_the_dialect(upstream: FakeLlama, cut: Any, path: str) -> None:
    async with before(upstream) as server:
        a = opening("a", 300)
        upstream.cut = cut
        body = body_of(a, 30) if path != "/v1/responses" else {"model": "m", "input": a[1]["content"], "temperature": 0}
        if path == "/v1/messages":
            body["messages"] = a[1:]
        whole = await server.client.post(path, json=body)
        assert whole.status_code in (502, 504), whole.text
        streamed = await server.client.post(path, json={**body, "stream": True})
        last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
        told = json.loads(last[6:])
        assert "error" in told or told["response"]["error"], last
        upstream.cut = lambda events: events
        await server.settled()
        await check(server, opening("a", 300))


BEFORE_STREAM: dict[str, tuple[Any, int]] = {
    "down": (httpx.ConnectError("refused"), 503),
    "slow": (httpx.ReadTimeout("too long"), 504),
    "500": (refusal(500, "out of memory", "server_error"), 502),
    "loading": (refusal(503, "Loading model", "unavailable_error"), 503),
    "html": (httpx.Response(200, text="<html></html>", headers={"content-type": "text/html"}), 502),
    "whole": (ok({"content": "x"}), 502),
    "empty stream": (httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Events([])), 502),
}


@pytest.mark.parametrize(("fault", "status"), BEFORE_STREAM.values(), ids=list(BEFORE_STREAM))
async def test_a_completion_that_does_not_begin_is_an_error_and_the_next_is_right(
    upstream: FakeLlama, fault: Any, status: int
) -> None:
    async with before(upstream) as server:
        a = opening("a", 300)
        await check(server, a)

        upstream.answers["/completion"] = raising(fault)
        failed = await server.client.post("/v1/chat/completions", json=body_of(opening("b", 300), LIMIT))
        assert failed.status_code == status
        assert failed.json()["error"]["message"].endswith(".")
        anthropic = await server.client.post("/v1/messages", json={**body_of(a[1:], LIMIT), "stream": False})
        assert anthropic.status_code in (status, 529)
        del upstream.answers["/completion"]
        await server.settled()
        back = await check(server, a)
        assert back.reused == len(server.prompt_tokens(a)) - 1


def raising(fault: Any) -> Any:
    """An answer that is the fault, or raises it."""

    def answer(_request: httpx.Request) -> httpx.Response:
        if isinstance(fault, Exception):
            raise fault
        return fault

    return answer


DOWN, SLOW = httpx.ConnectError("refused"), httpx.ReadTimeout("too long")
GARBAGE = httpx.Response(200, text="<html>another server</html>", headers={"content-type": "text/html"})
BROKEN = httpx.Response(500, json={"error": {"code": 500, "message": "out of memory", "type": "server_error"}})
EARLY = httpx.RemoteProtocolError("peer closed connection without sending complete message body")


@pytest.mark.parametrize(
    ("path", "fault", "status"),
    [
        ("/apply-template", DOWN, 503),
        ("/tokenize", DOWN, 503),
        ("/props", DOWN, 503),
        ("/apply-template", SLOW, 504),
        ("/props", SLOW, 504),
        ("/apply-template", GARBAGE, 502),
        ("/tokenize", GARBAGE, 502),
        ("/tokenize", BROKEN, 502),
        ("/props", EARLY, 502),
    ],
)
async def test_a_server_that_fails_is_told_wherever_it_is_met(
    upstream: FakeLlama, path: str, fault: Any, status: int
) -> None:
    async with before(upstream) as server:
        upstream.answers[path] = raising(fault)
        server.engine.watch.doubt()
        failed = await server.client.post("/v1/chat/completions", json=body_of(opening("q", 50), LIMIT))
        assert failed.status_code == status, failed.text
        assert failed.json()["error"]["code"] == {502: "upstream_failed", 503: "upstream_down"}.get(
            status, "upstream_timeout"
        )
        upstream.answers.clear()
        await check(server, opening("q", 50))


@pytest.mark.parametrize(
    "fault", [refusal(400, "Unable to restore slot"), GARBAGE, SLOW, EARLY], ids=["no", "garbage", "slow", "early"]
)
async def test_a_restore_that_fails_is_a_cold_answer(upstream: FakeLlama, fault: Any) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        upstream.answers["restore"] = raising(fault)
        again = turn_after(a, first.text, "And?")
        answer = await check(server, again)
        assert (answer.cache, answer.reused) == ("cold", 0)
        assert "restore failed" in answer.headers["x-parkd-why"]
        upstream.answers.clear()
        assert (await check(server, again)).cache == "live"


async def test_a_server_that_is_down_when_it_should_restore_costs_no_entry(upstream: FakeLlama) -> None:
    """It is told at once, and the conversation is restored once the server is back."""
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        upstream.answers["restore"] = raising(DOWN)
        again = turn_after(a, first.text, "And?")
        for _ in range(2):
            failed = await server.client.post("/v1/chat/completions", json=body_of(again, LIMIT))
            assert failed.status_code == 503
            assert failed.json()["error"]["code"] == "upstream_down"
        upstream.answers.clear()
        upstream.restart()
        answer = await check(server, again)
        assert answer.cache.startswith("restored")
        assert answer.reused >= len(server.prompt_tokens(a))


@pytest.mark.parametrize(
    "fault",
    [refusal(500, "Unable to save slot", "server_error"), GARBAGE, SLOW, EARLY, DOWN],
    ids=["full disk", "garbage", "slow", "early", "down"],
)
async def test_a_save_that_fails_costs_the_parking_and_nothing_else(upstream: FakeLlama, fault: Any) -> None:
    async with before(upstream) as server:
        a = opening("a")
        upstream.answers["save"] = raising(fault)
        first = await check(server, a)
        assert parked_in(server) == 0
        upstream.answers.clear()
        answer = await check(server, turn_after(a, first.text, "And?"))
        assert (answer.cache, parked_in(server)) == ("live", 1)
