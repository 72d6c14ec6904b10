"""The chat endpoint's surface: shapes, refusals, access, models, metrics, and the official SDK against it."""

from __future__ import annotations

import gzip
import json
import random
import time
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest

from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Running, body_of, running, running_in_thread

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello."}]


async def post(server: Running, body: Any, **headers: str) -> httpx.Response:
    return await server.client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_stream_has_its_role_first_and_its_usage_last() -> None:
    async with running(FakeEngine()) as server:
        answer = await server.stream(HELLO)
        whole = await server.chat(HELLO)
    first, last = answer.chunks[0], answer.chunks[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == len(server.prompt_tokens(HELLO)) == whole.usage["prompt_tokens"]
    assert [c["choices"][0]["finish_reason"] for c in answer.chunks[:-1]][-1] == whole.finish_reason
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    assert answer.text == whole.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]


async def test_a_stream_without_include_usage_ends_with_done_and_has_no_usage() -> None:
    async with running(FakeEngine()) as server:
        response = await post(server, body_of(HELLO, stream=True))
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["predicted_n"] == 8


async def test_timings_add_up() -> None:
    async with running(FakeEngine()) as server:
        answer = await server.chat(HELLO)
    timings = answer.timings
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage["prompt_tokens"]
    assert timings["predicted_n"] == answer.usage["completion_tokens"] == 8
    assert timings["ttft_ms"] >= timings["prompt_ms"] > 0


async def test_found_by_use_33_every_piece_says_what_it_took_so_far_if_it_is_asked_to() -> None:
    """As in llama-server; it was accepted and had no effect."""
    # Slow enough for the pieces to be sent one by one.
    engine = FakeEngine(end_odds=10**9, hook=lambda what, _: time.sleep(0.02) if what == "token" else None)
    raw = {"prompt": "Hello.", "max_tokens": 6, "n_predict": 6, "temperature": 0, "stream": True}
    asked = {"/v1/chat/completions": body_of(HELLO, 6, stream=True), "/v1/completions": raw, "/completion": raw}
    async with running(engine) as server:
        for path, body in asked.items():
            pieces = []
            for told in (True, False):
                response = await server.client.post(path, json={**body, "timings_per_token": told})
                frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
                pieces.append([chunk for frame in frames if text_of(chunk := json.loads(frame))])
            timings = [piece["timings"] for piece in pieces[0]]
            assert [each["predicted_n"] for each in timings][-1] == 6, path
            counts = [(each["predicted_n"], each["predicted_ms"]) for each in timings]
            assert counts == sorted(counts), path
            assert len(counts) > 1, path
            assert {each["cache_n"] + each["prompt_n"] for each in timings} == {
                timings[0]["cache_n"] + timings[0]["prompt_n"]
            }
            assert all("timings" not in piece for piece in pieces[1]), path


def text_of(chunk: dict[str, Any]) -> str:
    """What a piece of a stream adds to the answer, in any of llama-server's forms."""
    choice = chunk["choices"][0] if chunk.get("choices") else chunk
    return str(choice.get("delta", choice).get("content") or choice.get("text") or "")


async def test_a_stop_string_ends_the_answer_before_it_and_state_stays_exact() -> None:
    async with running(FakeEngine(end_odds=10**9)) as server:
        free = await server.chat(HELLO, max_tokens=40)
        stop = free.text[10:13]
        cut = await server.chat(HELLO, max_tokens=40, stop=[stop])
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.finish_reason == "stop"
        follow = [*HELLO, {"role": "assistant", "content": cut.text}, {"role": "user", "content": "More."}]
        warm = await server.chat(follow)
        await server.settled()
        assert warm.reused == len(server.prompt_tokens(HELLO)) + len(cut.text)
        async with running(FakeEngine(end_odds=10**9)) as fresh:
            assert (await fresh.chat(follow)).text == warm.text


async def test_a_prompt_fits_up_to_the_context_and_not_beyond() -> None:
    engine = FakeEngine(context_tokens=300, end_odds=10**9)
    async with running(engine) as server:
        room = 300 - len(server.prompt_tokens([{"role": "user", "content": ""}]))
        fits = await server.chat([{"role": "user", "content": "x" * (room - 1)}], max_tokens=50)
        assert (fits.finish_reason, fits.usage["completion_tokens"]) == ("length", 2)
        over = await post(server, body_of([{"role": "user", "content": "x" * room}], stream=True))
        assert over.status_code == 400
        error = over.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "300" in error["message"]


async def test_no_output_asked_for_reads_the_prompt_only() -> None:
    async with running(FakeEngine()) as server:
        warm = await server.chat(HELLO, max_tokens=0)
        assert (warm.text, warm.finish_reason, warm.usage["completion_tokens"]) == ("", "length", 0)
        answer = await server.chat(HELLO)
        assert answer.reused == len(server.prompt_tokens(HELLO)) - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"n": 9}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repeat_penalty": 10.5}, "repeat_penalty"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"x": 101}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"functions": [{"name": "look", "parameters": {}}]}, "functions"),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"messages": [{"role": "function", "name": "look", "content": "found"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "look"}}]},
            "messages[0].function_call",
        ),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str, refusing: Running
) -> None:
    response = await post(refusing, {**body_of(HELLO), **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].endswith(".")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def refusing(anyio_backend: str) -> Any:
    async with running(FakeEngine()) as server:
        yield server


async def test_unknown_fields_and_parts_of_text_are_welcome() -> None:
    async with running(FakeEngine()) as server:
        plain = await server.chat(HELLO)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": {"type": "x"}}]}]
        answer = await server.chat(
            parts,
            user="me",
            metadata={"a": 1},
            logprobs=True,
            store=True,
            tools=[{"type": "web"}],
            functions=[],
            function_call="auto",
        )
        assert (answer.text, answer.cache) == (plain.text, "live")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 5000]
)
async def test_a_body_that_is_no_object_is_a_400(body: bytes, refusing: Running) -> None:
    response = await refusing.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_random_bodies_never_make_a_500(refusing: Running) -> None:
    random_state = random.Random(2)
    values = [None, True, 0, -1, 2**63, 1e308, "", "x", [], [[]], {}, {"a": 1}, ["x", None], "\u0000\uffff"]
    names = [
        "messages", "stop", "stream", "temperature", "tools", "tool_choice", "n", "max_tokens", "stream_options",
        "logit_bias", "seed", "top_k", "model", "chat_template_kwargs", "reasoning_effort", "response_format",
    ]  # fmt: skip
    parts = ["role", "content", "tool_calls", "tool_call_id", "name"]
    for _ in range(120):
        message = {"role": "user", "content": "x", random_state.choice(parts): random_state.choice(values)}
        body = {"messages": [message], "max_tokens": 1, random_state.choice(names): random_state.choice(values)}
        response = await post(refusing, body)
        assert response.status_code < 500, (body, response.text)


async def test_a_compressed_body_is_a_400_that_says_so() -> None:
    async with running(FakeEngine()) as server:
        response = await server.client.post(
            "/v1/chat/completions", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}
        )
        assert response.status_code == 400
        assert "compressed" in response.json()["error"]["message"]


async def test_a_body_over_the_limit_is_a_413_with_and_without_its_length() -> None:
    async with running(FakeEngine(), config=ProxyConfig(body_limit_bytes=1000)) as server:

        async def pieces() -> Any:
            for _ in range(20):
                yield b"x" * 100

        for content in (b"x" * 1001, pieces()):
            response = await server.client.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"


async def test_unknown_paths_and_methods_have_the_shape_of_errors(refusing: Running) -> None:
    missing = await refusing.client.get("/v1/nothing")
    wrong = await refusing.client.get("/v1/chat/completions")
    asked = await refusing.client.options("/v1/chat/completions")
    assert (missing.status_code, wrong.status_code, asked.status_code) == (404, 405, 204)
    assert missing.json()["error"]["code"] == "not_found"
    assert "POST" in wrong.headers["allow"]
    assert "access-control-allow-origin" not in asked.headers


async def test_models_name_the_alias_and_only_it() -> None:
    async with running(FakeEngine(), config=ProxyConfig(alias="house")) as server:
        listed = (await server.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(model["id"], model["object"]) for model in listed["data"]] == [("house", "model")]
        assert listed["data"][0]["created"] > 0
        assert (await server.client.get("/v1/models/house")).json()["id"] == "house"
        assert (await server.client.get("/v1/models/other")).status_code == 404


async def test_metrics_count_tokens_moves_and_what_the_store_holds() -> None:
    async with running(FakeEngine()) as server:
        one, two = ([{"role": "user", "content": letter * 600}] for letter in "ab")
        await server.chat(one)
        await server.chat(two)
        await server.chat(one)
        await server.settled()
        page = (await server.client.get("/metrics")).text
        numbers = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line and not line.startswith("#")
        }
    assert numbers['parkd_requests_total{outcome="ok"}'] == 3
    assert numbers['parkd_starts_total{cache="restored-ram"}'] == 1
    assert numbers["parkd_prompt_tokens_reused_total"] >= len(server.prompt_tokens(one)) - 1
    assert numbers['parkd_moved_bytes_total{direction="restore"}'] > 0
    assert numbers["parkd_store_conversations"] == 2
    assert numbers["parkd_queue_length"] == 0


async def test_a_key_is_asked_for_where_there_are_keys() -> None:
    async with running(FakeEngine(), config=ProxyConfig(api_keys=("right",))) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "righ"}, {"authorization": "Basic right"}):
            response = await post(server, body_of(HELLO), **headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await post(server, body_of(HELLO), authorization="Bearer right")).status_code == 200
        assert (await server.client.get("/v1/models")).status_code == 401
        assert (await server.client.get("/health")).status_code == 200


async def test_web_pages_may_not_drive_a_local_server(refusing: Running) -> None:
    rebound = await post(refusing, body_of(HELLO), host="evil.example:80")
    foreign = await post(refusing, body_of(HELLO), origin="https://evil.example")
    opaque = await post(refusing, body_of(HELLO), origin="null")
    local = await post(refusing, body_of(HELLO), origin="http://localhost:3000")
    assert [answer.status_code for answer in (rebound, foreign, opaque, local)] == [403, 403, 403, 200]


async def test_the_official_sdk_streams_asks_and_reads_errors() -> None:
    def drive(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
            whole = client.chat.completions.create(model="m", messages=HELLO, max_tokens=8, temperature=0)
            assert whole.choices[0].message.content
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 0
            pieces, usage = [], None
            options = {"include_usage": True}
            for chunk in client.chat.completions.create(
                model="m", messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options=options
            ):
                pieces += [choice.delta.content or "" for choice in chunk.choices]
                usage = chunk.usage or usage
            assert "".join(pieces) == whole.choices[0].message.content
            assert usage is not None
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
            assert [model.id for model in client.models.list()] == ["fake"]
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="m", messages=HELLO, n=9)
            assert refused.value.param == "n"
            with pytest.raises(openai.BadRequestError) as long:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 9000}])
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")

    engine = FakeEngine()
    with running_in_thread(engine) as server:
        await anyio.to_thread.run_sync(drive, server.url)


async def test_an_answer_that_the_client_began_is_continued() -> None:
    begun = {"role": "assistant", "content": "The colour is"}
    async with running(FakeEngine(end_odds=10**9)) as server:
        opened = server.prompt_tokens(HELLO)
        text = len(server.engine.tokenizer.encode("The colour is"))
        answer = await server.chat([*HELLO, begun])
        assert answer.usage["prompt_tokens"] == len(opened) + text
        document = {"messages": [*HELLO, begun], "max_tokens": 8, "temperature": 0}
        theirs = (await server.client.post("/v1/messages", json=document)).json()
        assert theirs["content"][0]["text"] == answer.text
        count = (await server.client.post("/v1/messages/count_tokens", json=document)).json()
        assert count["input_tokens"] == len(opened) + text
        whole = {"role": "assistant", "content": f"The colour is{answer.text}"}
        follow = await server.chat([*HELLO, whole, {"role": "user", "content": "Why?"}])
        generated = server.engine.tokenizer.encode(answer.text)
        assert follow.reused == len(opened) + text + len(generated) - 1, "the last one of an answer that was cut"
        new = await server.chat([*HELLO, begun], continue_final_message=False)
        assert new.usage["prompt_tokens"] > answer.usage["prompt_tokens"]


async def test_the_text_that_the_client_began_is_not_put_where_it_was_left_out() -> None:
    async with running(FakeEngine(end_odds=10**9)) as server:
        answer = await server.chat([*HELLO, {"role": "assistant", "content": "The colour is"}])
        talk = [*HELLO, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Why?"}]
        assert (await server.chat(talk)).usage["prompt_tokens"] == len(server.prompt_tokens(talk))
