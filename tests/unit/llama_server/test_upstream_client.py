"""What a llama-server answers, and what becomes of it: recorded answers, and every way in which one can fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import respx

from parkd.config import Deadlines
from parkd.engine_adapter.llama_server.client import SlotAnswer, UpstreamClient, UpstreamRefused
from parkd.engine_adapter.llama_server.stream import CompletionEvent, Ended, Reading, Token
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed, UpstreamTimeout
from tests.unit.llama_server.upstream_kit import RECORDED, URL, Events, ok, reading, routed, sse, token_event

SSE = {"content-type": "text/event-stream"}
IDS = [1, 4093, 198]


@pytest.fixture
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


@pytest.fixture
def router() -> Iterator[respx.Router]:
    with routed(base_url=URL) as router:
        yield router


class Clock:
    """Goes on by `step` at each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def client(clock: Clock | None = None, **deadlines: float) -> UpstreamClient:
    return UpstreamClient(URL, deadlines=Deadlines(**deadlines), monotonic=clock or Clock())


def as_recorded(entry: dict[str, Any]) -> httpx.Response:
    return httpx.Response(entry["status"], headers={"content-type": entry["type"]}, json=entry["body"])


def events_of(response: httpx.Response, router: respx.Router, **options: Any) -> list[CompletionEvent]:
    router.post("/completion").mock(return_value=response)
    stream = client(**options).complete({"prompt": IDS})
    events = []
    while (event := stream.next()) is not None:
        events.append(event)
    stream.close()
    assert stream.next() is None
    return events


def test_a_real_servers_answers_are_understood(router: respx.Router, recorded: dict[str, Any]) -> None:
    for path in ("props", "slots", "lora-adapters"):
        router.get(f"/{path}").mock(return_value=as_recorded(recorded[path]))
    router.get("/v1/models").mock(return_value=as_recorded(recorded["models"]))
    for path in ("apply-template", "tokenize", "detokenize"):
        router.post(f"/{path}").mock(return_value=as_recorded(recorded[path]))
    for action in ("save", "restore"):
        router.post("/slots/0", params={"action": action}).mock(return_value=as_recorded(recorded[action]))
    server = client()
    assert server.properties()["total_slots"] == 2
    assert [state.id for state in server.slots()] == [0, 1]
    assert server.models()["meta"]["n_vocab"] == 49152
    assert server.adapters() == []
    assert server.apply_template({"messages": []}).startswith("<|im_start|>system\nS<|im_end|>")
    assert server.tokenize("<|im_start|>user\nhi") == [1, 4093, 198, 6004]
    assert server.detokenize(IDS) == "<|im_start|>user\n"
    assert server.save(0, "rec.slot") == server.restore(0, "rec.slot")
    assert isinstance(server.save(0, "rec.slot"), SlotAnswer)


def test_a_real_servers_completion_is_understood(router: respx.Router, recorded: dict[str, Any]) -> None:
    entry = recorded["completion"]
    events = events_of(httpx.Response(200, headers={"content-type": entry["type"]}, text=entry["text"]), router)
    assert isinstance(events[0], Reading)
    tokens = [event for event in events if isinstance(event, Token)]
    assert [event.predicted for event in tokens] == [1, 2, 3, 4]
    assert all(len(event.token_ids) == 1 for event in tokens)
    [end] = [event for event in events if isinstance(event, Ended)]
    assert (end.stop_type, end.predicted) == ("limit", 4)
    assert end.cached == events[0].cached


def test_a_real_server_counts_tokens_that_it_does_not_send(router: respx.Router, recorded: dict[str, Any]) -> None:
    entry = recorded["completion ended by token"]
    events = events_of(httpx.Response(200, headers={"content-type": entry["type"]}, text=entry["text"]), router)
    tokens = [event for event in events if isinstance(event, Token)]
    assert "".join(event.text for event in tokens) == "a🙂é"
    assert tokens[-1].predicted > sum(len(event.token_ids) for event in tokens)
    assert isinstance(events[-1], Ended)
    assert events[-1].stop_type == "eos"


def test_events_are_read_wherever_the_bytes_are_cut(router: respx.Router, recorded: dict[str, Any]) -> None:
    data = recorded["completion ended by token"]["text"].encode()
    whole = events_of(httpx.Response(200, headers=SSE, content=data), router)
    for size in (1, 7, 64):
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert events_of(httpx.Response(200, headers=SSE, stream=Events(parts)), router) == whole


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("overflow", "available context size"),
        ("bad grammar", "grammar"),
        ("save to a full disk", "Unable to save slot"),
        ("save under a bad name", "Invalid filename"),
        ("restore missing", "Unable to restore slot"),
        ("apply-template refused", "Missing 'role'"),
        ("metrics", "--metrics"),
    ],
)
def test_a_real_servers_refusals_keep_its_words(
    router: respx.Router, recorded: dict[str, Any], name: str, words: str
) -> None:
    router.get("/props").mock(return_value=as_recorded(recorded[name]))
    with pytest.raises(UpstreamRefused, match=words) as caught:
        client().properties()
    assert caught.value.upstream_status == recorded[name]["status"]


def test_a_slot_that_is_not_there_is_noticed(router: respx.Router, recorded: dict[str, Any]) -> None:
    entry = recorded["save of a slot that is not there"]
    assert entry["status"] == 200, "the server takes any number"
    router.post("/slots/1", params={"action": "save"}).mock(return_value=as_recorded(entry))
    with pytest.raises(UpstreamFailed, match="slot 9"):
        client().save(1, "nine.slot")


CALLS: dict[str, Callable[[UpstreamClient], object]] = {
    "properties": lambda server: server.properties(),
    "slots": lambda server: server.slots(),
    "models": lambda server: server.models(),
    "adapters": lambda server: server.adapters(),
    "template": lambda server: server.apply_template({"messages": []}),
    "tokenize": lambda server: server.tokenize("a"),
    "detokenize": lambda server: server.detokenize([1]),
    "save": lambda server: server.save(0, "x"),
    "restore": lambda server: server.restore(0, "x"),
    "complete": lambda server: server.complete({"prompt": IDS}),
}


def slow_body() -> Iterator[bytes]:
    while True:
        yield b" "


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (httpx.ConnectError("refused"), UpstreamDown),
        (httpx.ConnectTimeout("too long"), UpstreamDown),
        (httpx.ReadTimeout("too long"), UpstreamTimeout),
        (httpx.RemoteProtocolError("Server disconnected without sending a response."), UpstreamFailed),
        (httpx.ReadError("reset"), UpstreamFailed),
        (httpx.Response(503, json={"error": {"message": "Loading model", "code": 503}}), UpstreamDown),
        (httpx.Response(500, text="<html>oops</html>"), UpstreamFailed),
        (httpx.Response(502), UpstreamFailed),
        (httpx.Response(200, text="<html>another server</html>"), UpstreamFailed),
        (httpx.Response(200, json=7), UpstreamFailed),
        (httpx.Response(200, content=b"\xff\xfe\x00"), UpstreamFailed),
        (httpx.Response(401, json={"error": {"message": "Invalid API Key", "code": 401}}), UpstreamRefused),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value)[:40],
)
def test_every_failure_of_every_call_is_typed(
    router: respx.Router,
    call: Callable[[UpstreamClient], object],
    fault: Any,
    error: type[UpstreamFailed],
) -> None:
    effect = {"side_effect": fault} if isinstance(fault, Exception) else {"return_value": fault}
    router.route().mock(**effect)
    with pytest.raises(error, match=r"\.$"):
        call(client())


def test_an_answer_that_drips_ends_at_its_deadline(router: respx.Router) -> None:
    router.get("/props").mock(return_value=httpx.Response(200, stream=Events(slow_body())))
    with pytest.raises(UpstreamTimeout, match="--upstream-timeout"):
        client(Clock(1.0), answer_s=20).properties()


def test_pings_do_not_stand_for_an_answer(router: respx.Router) -> None:
    def pings() -> Iterator[bytes]:
        yield sse(reading(10, 0, 0))
        while True:
            yield b": ping\n\n"

    router.post("/completion").mock(return_value=httpx.Response(200, headers=SSE, stream=Events(pings())))
    stream = client(Clock(1.0), silence_s=50).complete({"prompt": IDS})
    assert stream.next() == Reading(10, 0, 0)
    with pytest.raises(UpstreamTimeout, match="50 s"):
        stream.next()


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ([], "before the end"),
        ([b"data: {\n"], "cannot be read"),
        ([b"data: [1, 2]\n"], "cannot be read"),
        ([b'data: {"content": "x"}\n'], "cannot be read"),
        ([b'data: {"content": "x", "tokens": ["a"], "tokens_predicted": 2}\n'], "cannot be read"),
        ([b'data: {"error": {"message": "compute error", "code": 500}}\n'], "compute error"),
        ([b'error: {"message": "compute error", "code": 500}\n'], "compute error"),
        ([b"data: " + b"x" * 1024 * 1024] * 65, "without an end"),
    ],
)
def test_a_stream_that_breaks_says_so(router: respx.Router, tail: list[bytes], words: str) -> None:
    parts = [sse(reading(10, 0, 0)), sse(token_event("a", 97, 1)), *tail]
    with pytest.raises(UpstreamFailed, match=words):
        events_of(httpx.Response(200, headers=SSE, stream=Events(parts)), router)


def test_a_connection_lost_in_mid_stream_says_so(router: respx.Router) -> None:
    def broken() -> Iterator[bytes]:
        yield sse(token_event("a", 97, 1))
        raise httpx.ReadError("connection reset")

    with pytest.raises(UpstreamFailed, match="did not complete its answer"):
        events_of(httpx.Response(200, headers=SSE, stream=Events(broken())), router)


def test_an_answer_of_another_type_is_no_stream(router: respx.Router) -> None:
    router.post("/completion").mock(return_value=ok({"content": "a whole answer"}))
    with pytest.raises(UpstreamFailed, match="event stream"):
        client().complete({"prompt": IDS})


def test_the_key_goes_to_the_server_and_into_no_message(router: respx.Router) -> None:
    route = router.get("/props").mock(return_value=httpx.Response(401, json={"error": {"message": "Invalid API Key"}}))
    with pytest.raises(UpstreamRefused) as caught:
        UpstreamClient(URL, api_key="s3cret").properties()
    assert route.calls[0].request.headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in caught.value.message
    assert "Invalid API Key. Name the key" in caught.value.message
    assert "--upstream-api-key" in caught.value.message


@pytest.mark.parametrize("key", ["two\nlines", "tab\t", "schl\u00fcssel"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match="--upstream-api-key"):
        UpstreamClient(URL, api_key=key)
