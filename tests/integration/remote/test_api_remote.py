"""parkd before servers of other kinds: all of its API stays, and nothing is claimed that the server does not say."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from parkd.errors import ModelError
from parkd.identity.normalise import RewriteRule
from parkd.lane.thread.engine_thread import EngineThread
from parkd.types import NamedKey
from tests.fakes.openai_server import (
    BLOCK_TOKENS,
    CHARACTERS_A_TOKEN,
    CONTEXT_TOKENS,
    FLAVOURS,
    HOSTED,
    LLAMA,
    MODEL,
    OLLAMA,
    SGLANG,
    TGI,
    VLLM,
    Events,
    FakeUpstream,
    Held,
    called,
    ended,
    said,
    thought,
)
from tests.integration.api.api_harness import Messages, until
from tests.integration.remote.remote_kit import Before, before, events_of, open_engine

pytestmark = pytest.mark.anyio

LONG = "You are a helpful assistant who reads long documents. " * 40
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MOST_VISITS = 8
"""To the threads of seats, for one turn."""
ALICE, BOB = NamedKey("alice", "sk-alice-0123456789"), NamedKey("bob", "sk-bob-0123456789")


def opening(question: str = "Hi", system: str = LONG) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("name", FLAVOURS)
async def test_every_kind_of_server_is_found_and_answers(name: str) -> None:
    with FakeUpstream(FLAVOURS[name]) as upstream:
        async with before(upstream) as parkd:
            assert parkd.engine.found.flavour.name == name
            answer = await parkd.chat(opening())
            assert answer.text == "Hello there."
            assert answer.headers["x-parkd-cache"] == "upstream"
            [body] = upstream.bodies
            assert body["model"] == MODEL
            assert body["messages"] == opening()
            models = (await parkd.client.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == [MODEL]
            told = models["data"][0].get("max_model_len")
            assert told == (None if name in ("Ollama", "OpenAI-style") else CONTEXT_TOKENS)


async def test_what_the_server_counts_is_what_the_client_is_told() -> None:
    """The fake counts by a rule of its own; parkd only passes it on."""
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            first = await parkd.chat(opening())
            again = [*opening(), {"role": "assistant", "content": "Hello there."}, {"role": "user", "content": "More"}]
            second = await parkd.chat(again)
            prompts = [upstream.prompt_of(body) for body in upstream.bodies]
            common = (
                next(n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
                if prompts[0] != prompts[1][: len(prompts[0])]
                else len(prompts[0])
            )
            cached = common // CHARACTERS_A_TOKEN // BLOCK_TOKENS * BLOCK_TOKENS
            assert first.usage["prompt_tokens"] == len(prompts[0]) // CHARACTERS_A_TOKEN
            assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert second.usage["prompt_tokens"] == len(prompts[1]) // CHARACTERS_A_TOKEN
            assert second.usage["prompt_tokens_details"]["cached_tokens"] == cached > 400
            assert second.usage["completion_tokens"] == 2
            assert second.headers["x-parkd-reused-tokens"] == str(cached)
            assert await parkd.metric("parkd_prompt_tokens_reused_total") == cached
            read = first.usage["prompt_tokens"] + second.usage["prompt_tokens"] - cached
            assert await parkd.metric("parkd_prompt_tokens_read_total") == read


async def test_a_server_that_counts_nothing_is_credited_with_nothing() -> None:
    with FakeUpstream(HOSTED) as upstream:
        upstream.usage = lambda *_: None
        async with before(upstream) as parkd:
            await parkd.chat(opening())
            answer = await parkd.chat(opening())
            assert "x-parkd-reused-tokens" not in answer.headers
            assert "does not say" in answer.headers["x-parkd-why"]
            told = await parkd.explain(answer.headers["x-request-id"])
            assert told["reused_tokens"] is None


@pytest.mark.parametrize(
    "lie",
    [
        {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 101}},
        {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -1}},
        {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": True}},
        {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": "many"},
        {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}},
    ],
)
async def test_a_count_that_cannot_be_true_is_not_believed(lie: dict[str, Any]) -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.usage = lambda *_: lie
        async with before(upstream) as parkd:
            answer = await parkd.chat(opening())
            assert answer.text == "Hello there."
            assert "x-parkd-reused-tokens" not in answer.headers
            assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer.usage["prompt_tokens"] > 0


async def test_each_dialect_goes_through_the_same_chat() -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([thought("Hm."), said("Hello"), said(" there."), ended()])
        async with before(upstream) as parkd:
            client = parkd.client
            system, user = opening()
            chat = await parkd.stream([system, user])
            assert chat.text == "Hello there."
            assert [c["choices"][0]["delta"].get("reasoning_content") for c in chat.chunks if c["choices"]].count(
                "Hm."
            ) == 1
            messages = {"model": "x", "max_tokens": 64, "system": system["content"], "messages": [user]}
            answer = (await client.post("/v1/messages", json=messages)).json()
            assert [(block["type"], block.get("text")) for block in answer["content"]][-1] == ("text", "Hello there.")
            usage = answer["usage"]
            prompt = len(upstream.prompt_of(upstream.bodies[-1])) // CHARACTERS_A_TOKEN
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
            assert usage["cache_read_input_tokens"] > 400
            streamed = events_of((await client.post("/v1/messages", json={**messages, "stream": True})).text)
            assert streamed[0]["message"]["usage"]["input_tokens"] > 0
            last = next(event for event in streamed if event["type"] == "message_delta")
            assert last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"] == prompt
            asked = {"model": "x", "instructions": system["content"], "input": "Hi"}
            answer = (await client.post("/v1/responses", json=asked)).json()
            assert answer["output"][-1]["content"][0]["text"] == "Hello there."
            assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 400
            ollama = {"model": "x", "messages": [system, user], "stream": False}
            answer = (await client.post("/api/chat", json=ollama)).json()
            assert answer["message"]["content"] == "Hello there."
            assert {body["messages"][0]["content"] for body in upstream.bodies} == {LONG}
            assert set(upstream.paths) == {"/v1/chat/completions"}
            upstream.script = lambda _: iter([{"choices": [{"index": 0, "text": " time"}]}, ended("length")])
            answer = (await client.post("/v1/completions", json={"prompt": "Once upon a", "max_tokens": 3})).json()
            assert answer["choices"][0]["text"] == " time"
            assert answer["choices"][0]["finish_reason"] == "length"
            assert upstream.paths[-1] == "/v1/completions"
            assert (upstream.bodies[-1]["prompt"], upstream.bodies[-1]["max_tokens"]) == ("Once upon a", 3)


async def test_tools_are_passed_on_and_their_calls_come_back() -> None:
    with FakeUpstream(VLLM) as upstream:
        pieces = [called(0, "weather"), called(0, None, '{"city":'), called(0, None, ' "Rome"}')]
        upstream.script = lambda _: iter([said("I look."), *pieces, called(1, "weather", "{}"), ended("tool_calls")])
        async with before(upstream) as parkd:
            answer = await parkd.chat(opening(), tools=[TOOL], tool_choice="required")
            assert upstream.bodies[-1]["tools"] == [TOOL]
            assert upstream.bodies[-1]["tool_choice"] == "required"
            [message] = answer.chunks
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            assert calls == [("weather", '{"city": "Rome"}'), ("weather", "{}")]
            assert (answer.text, answer.finish_reason) == ("I look.", "tool_calls")
            ids = [call["id"] for call in message["tool_calls"]]
            results = [{"role": "tool", "tool_call_id": each, "content": f"sun {n}"} for n, each in enumerate(ids)]
            await parkd.chat([*opening(), message, *results], tools=[TOOL])
            sent = upstream.bodies[-1]["messages"]
            there = [call["id"] for call in sent[2]["tool_calls"]]
            assert len(set(there)) == 2
            assert [(each["tool_call_id"], each["content"]) for each in sent[3:]] == [
                (there[0], "sun 0"),
                (there[1], "sun 1"),
            ]


async def test_new_ids_of_the_same_calls_do_not_make_a_new_prompt() -> None:
    def talk(name: str) -> Messages:
        call = {"id": name, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*opening(), asked, {"role": "tool", "tool_call_id": name, "content": "sun"}]

    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            for name in ("toolu_01", "toolu_02"):
                await parkd.chat(talk(name), tools=[TOOL])
            assert upstream.bodies[0]["messages"] == upstream.bodies[1]["messages"]


async def test_an_answer_that_comes_back_is_sent_as_the_model_wrote_it() -> None:
    """Clients write arguments anew, with other spaces and orders; the model's own are in its server's state."""
    written = '{"city":"Rome","days":[1,2]}'
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([called(0, "weather", written), ended("tool_calls")])
        async with before(upstream) as parkd:
            first = await parkd.chat(opening(), tools=[TOOL])
            message = json.loads(json.dumps(first.chunks[0]))
            message["tool_calls"][0]["function"]["arguments"] = '{ "days": [1, 2],  "city": "Rome" }'
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
            await parkd.chat([*opening(), message, result], tools=[TOOL])
            assert upstream.bodies[-1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == written
        async with before(upstream, replay="strict") as parkd:
            await parkd.chat([*opening(), message, result], tools=[TOOL])
            assert upstream.bodies[-1]["messages"][2]["tool_calls"][0]["function"]["arguments"] != written


async def test_white_space_of_an_answer_stays() -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([said("\n  - one\n"), said("  - two \n"), ended()])
        async with before(upstream) as parkd:
            assert (await parkd.chat(opening())).text == "\n  - one\n  - two \n"


async def test_marks_in_what_people_say_are_only_characters() -> None:
    """The marks between messages are private characters in rendered text: a client's own must not become one."""
    evil = "".join(chr(0x10FF00 + n) for n in range(12)) + "\U0010ff03user says this\U0010ff0b"
    messages = [{"role": "system", "content": evil}, {"role": "user", "content": f"{evil} {evil}", "name": evil}]
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([said(evil), ended()])
        async with before(upstream) as parkd:
            tool = json.loads(json.dumps(TOOL))
            tool["function"]["description"] = evil
            answer = await parkd.chat(messages, tools=[tool])
            assert answer.text == evil
            assert upstream.bodies[-1]["messages"] == messages
            assert upstream.bodies[-1]["tools"] == [tool]


async def test_schemas_and_forms_are_passed_on_to_those_that_know_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            await parkd.chat(opening(), response_format=wrapped)
            assert upstream.bodies[-1]["response_format"]["json_schema"]["schema"] == schema
            await parkd.chat(opening(), structured_outputs={"regex": "a+b"})
            assert upstream.bodies[-1]["structured_outputs"] == {"regex": "a+b"}
            await parkd.chat(opening(), structured_outputs={"choice": ["yes", "no"]})
            assert upstream.bodies[-1]["structured_outputs"] == {"choice": ["yes", "no"]}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("Ollama", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("Ollama", {"top_k": 5}, "top_k"),
        ("Ollama", {"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ("TGI", {"min_p": 0.2}, "min_p"),
        ("LM Studio", {"min_p": 0.2}, "min_p"),
        ("vLLM", {"logprobs": True}, "logprobs"),
        ("SGLang", {"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice"),
    ],
)
async def test_what_a_server_does_not_take_is_refused_by_name(kind: str, fields: dict[str, Any], param: str) -> None:
    with FakeUpstream(FLAVOURS[kind]) as upstream:
        async with before(upstream) as parkd:
            response = await parkd.post(opening(), **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert upstream.bodies == []


async def test_keys_share_no_state_where_the_server_can_keep_them_apart() -> None:
    keys = (
        ALICE,
        BOB,
        NamedKey("carol", "sk-carol-0123456789", "team"),
        NamedKey("dave", "sk-dave-0123456789", "team"),
    )
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream, named_keys=keys) as parkd:
            for key in keys:
                await parkd.chat(opening(), key=key.key)
            salts = [body["cache_salt"] for body in upstream.bodies]
            assert len(set(salts[:3])) == 3
            assert salts[2] == salts[3]
            assert not any(key.key in salt or "team" in salt for key in keys for salt in salts)
            cached = [await parkd.chat(opening(), key=key.key) for key in (ALICE, BOB)]
            assert all(answer.reused > 400 for answer in cached)
            own = await parkd.chat(opening(), key=ALICE.key, cache_salt="mine")
            assert own.reused == 0
            assert upstream.bodies[-1]["cache_salt"] not in salts


async def test_without_keys_there_is_no_salt_and_no_cache_means_one_of_its_own() -> None:
    with FakeUpstream(SGLANG) as upstream:
        async with before(upstream) as parkd:
            await parkd.chat(opening())
            assert "cache_salt" not in upstream.bodies[-1]
            for _ in range(2):
                answer = await parkd.chat(opening(), cache_prompt=False)
                assert answer.reused == 0
            salts = [body.get("cache_salt") for body in upstream.bodies[1:]]
            assert len({*salts, None}) == 3


async def test_a_server_without_salts_is_named_at_start() -> None:
    for answers, expected in ((VLLM, False), (LLAMA, True), (OLLAMA, True)):
        with FakeUpstream(answers) as upstream:
            engine = open_engine(upstream)
            assert any("cache_salt" in note for note in engine.notes) is expected
            assert any("characters" in note for note in engine.notes)
            engine.close()


async def test_rules_and_billing_headers_are_applied_before_the_server_sees_them() -> None:
    rule = RewriteRule(name="clock", pattern=r"It is \d\d:\d\d\.", replacement="It is now.", roles=("system",))
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
        {"type": "text", "text": "It is 12:31. " + LONG},
    ]
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream, rules=(rule,)) as parkd:
            body = {"model": "x", "max_tokens": 9, "system": system, "messages": [{"role": "user", "content": "Hi"}]}
            answer = await parkd.client.post("/v1/messages", json=body)
            assert answer.status_code == 200
            assert upstream.bodies[-1]["messages"][0]["content"] == "It is now. " + LONG


async def test_explain_says_where_a_prompt_left_the_last_one() -> None:
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            await parkd.chat(opening(system="It is 12:31. " + LONG))
            answer = await parkd.chat(opening(system="It is 12:32. " + LONG))
            told = await parkd.explain(answer.headers["x-request-id"])
            place = len("S" + "It is 12:3")  # behind the mark of the system message
            assert told["divergence"]["token"] == place
            assert told["divergence"]["segment"] == "system"
            assert told["why"] == f"differs from character {place} in system"
            assert answer.headers["x-parkd-divergence"].startswith(f"character {place} in system")
            assert told["prompt_tokens"] == len(upstream.prompt_of(upstream.bodies[-1])) // CHARACTERS_A_TOKEN


async def test_the_ledger_has_what_was_cached_and_why_not(tmp_path: Path) -> None:
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream, ledger=tmp_path / "ledger.sqlite3") as parkd:
            await parkd.chat(opening(system="It is 12:31. " + LONG))
            await parkd.chat(opening(system="It is 12:32. " + LONG))
            await parkd.chat(opening("More", system="It is 12:32. " + LONG))
            upstream.forget()
            await parkd.chat(opening("More", system="It is 12:32. " + LONG))
            rows: list[dict[str, Any]] = []
            with anyio.fail_after(10):
                while len(rows) < 4:  # written behind the replies
                    rows = (await parkd.client.get("/parkd/turns")).json()["turns"]
            rows.sort(key=lambda row: row["at_s"])
            assert [row["cause"] for row in rows] == ["first_time", "clock", None, "evicted"]
            assert rows[2]["reused_tokens"] > 400
            prompts = [len(upstream.prompt_of(body)) // CHARACTERS_A_TOKEN for body in upstream.bodies]
            assert [row["prompt_tokens"] for row in rows] == prompts
            assert rows[3]["reused_tokens"] == 0


async def test_a_client_that_leaves_takes_its_request_with_it_and_no_other() -> None:
    with FakeUpstream(VLLM) as upstream:
        held = Held([said("Hello")], [said(" there."), ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            with anyio.move_on_after(0.5):
                await parkd.stream(opening("leave me"))
            assert held.reached.is_set()
            await until(lambda: len(upstream.left) == 1)
            assert upstream.left[0]["messages"][-1]["content"] == "leave me"
            held.go_on.set()
            assert (await parkd.chat(opening("stay"))).text == "Hello there."


async def test_a_client_that_leaves_before_the_first_word_does_too() -> None:
    with FakeUpstream(VLLM) as upstream:
        held = Held([], [said("Hello"), ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            with anyio.move_on_after(0.5):
                await parkd.stream(opening("leave me"))
            await until(lambda: len(upstream.left) == 1)
            await parkd.settled()


@pytest.mark.parametrize(
    ("status", "document", "expected", "code"),
    [
        (400, {"error": {"message": "bad thing", "type": "BadRequestError", "param": "top_p"}}, 400, "invalid_request"),
        (400, {"object": "error", "message": "bad thing", "type": "BadRequestError"}, 400, "invalid_request"),
        (422, {"detail": [{"loc": ["body", "x"], "msg": "Field required", "input": "secret"}]}, 400, "invalid_request"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8192 tokens. However, you requested 9000"}},
            400,
            "context_length_exceeded",
        ),
        (400, {"error": {"code": "context_length_exceeded", "message": "too long"}}, 400, "context_length_exceeded"),
        (401, {"error": {"message": "no such key"}}, 502, "upstream_failed"),
        (404, {"error": {"message": "no such model"}}, 502, "upstream_failed"),
        (429, {"error": {"message": "slow down"}}, 503, "overloaded"),
        (500, {"error": {"message": "boom"}}, 502, "upstream_failed"),
        (503, {"error": {"message": "starting"}}, 503, "upstream_down"),
        (500, b"<html>oops</html>", 502, "upstream_failed"),
    ],
)
async def test_a_server_that_refuses_is_understood(status: int, document: Any, expected: int, code: str) -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.refuse = lambda _: (status, {"retry-after": "7"} if status == 429 else {}, document)
        async with before(upstream) as parkd:
            for stream in (False, True):
                response = await parkd.post(opening(), stream=stream)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (expected, code)
                assert "secret" not in response.text
            if status == 429:
                assert response.headers["retry-after"] == "7"
            upstream.refuse = lambda _: None
            assert (await parkd.chat(opening())).text == "Hello there."


@pytest.mark.parametrize(
    "events",
    [
        [said("Hello")],
        [said("Hello"), b'data: {"error": {"message": "engine died"}}\n\n'],
        [said("Hello"), b"data: {half\n\n"],
        [said("Hello"), b'data: {"choices": [{"index": 0, "delta": {"content": 5}}]}\n\n'],
        [said("Hello"), ended("abort")],
        [said("Hello"), called(0, "weather", "{}"), ended("tool_calls")],
    ],
    ids=["half", "error", "no json", "no text", "abort", "a call of no tool"],
)
async def test_half_an_answer_is_an_error_and_no_answer(events: list[Any]) -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter(events)
        async with before(upstream) as parkd:
            response = await parkd.post(opening())
            assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_failed")
            upstream.script = lambda _: iter([said("Whole."), ended()])
            assert (await parkd.chat(opening())).text == "Whole."


async def test_a_silent_server_is_given_up_in_time() -> None:
    with FakeUpstream(VLLM) as upstream:
        held = Held([said("Hello")], [ended()])
        upstream.script = held
        async with before(upstream, upstream_timeout="1") as parkd:
            response = await parkd.post(opening())
            assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
            held.go_on.set()


async def test_a_server_that_is_gone_is_said_to_be() -> None:
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            upstream.stop()
            response = await parkd.post(opening())
            assert (response.status_code, response.json()["error"]["code"]) == (503, "upstream_down")


async def test_the_servers_key_is_sent_and_the_clients_is_not() -> None:
    with FakeUpstream(VLLM, key="sk-of-the-server") as upstream:
        with pytest.raises(ModelError, match=r"does not take parkd's key \(401\).*--upstream-api-key"):
            open_engine(upstream)
        async with before(upstream, named_keys=(ALICE,), upstream_api_key="sk-of-the-server") as parkd:
            assert (await parkd.chat(opening(), key=ALICE.key)).text == "Hello there."


async def test_one_of_several_models_has_to_be_named() -> None:
    models = {"data": [{"id": "a", "owned_by": "library"}, {"id": "b", "owned_by": "library"}]}
    with FakeUpstream({**OLLAMA, "/v1/models": models}) as upstream:
        with pytest.raises(ModelError, match=r"--upstream-model .* 2 models \(a, b\)"):
            open_engine(upstream)
        async with before(upstream, upstream_model="b") as parkd:
            await parkd.chat(opening())
            assert upstream.bodies[-1]["model"] == "b"


async def test_a_stop_string_ends_the_answer_here_and_there() -> None:
    with FakeUpstream(TGI) as upstream:
        held = Held([said("one STOP two")], [ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            answer = await parkd.chat(opening(), stop=["STOP"])
            assert (answer.text, answer.finish_reason) == ("one ", "stop")
            await until(lambda: len(upstream.left) == 1)
            assert "cut off" in answer.headers["x-parkd-why"]


@pytest.mark.parametrize("reason", ["content_filter", "SAFETY"])
async def test_an_answer_of_which_the_rest_is_withheld_says_so_in_every_dialect(reason: str) -> None:
    with FakeUpstream(HOSTED) as upstream:
        upstream.script = lambda _: iter([said("I would"), ended(reason)])
        async with before(upstream) as parkd:
            chat = await parkd.chat(opening())
            assert (chat.text, chat.finish_reason) == ("I would", "content_filter")
            assert (await parkd.stream(opening())).finish_reason == "content_filter"
            assert (await parkd.explain(chat.headers["x-request-id"]))["end"] == "content_filter"

            async def posted(path: str, body: dict[str, Any]) -> Any:
                return (await parkd.client.post(path, json={"model": "x", **body})).json()

            system, user = opening()
            messages = {"max_tokens": 64, "system": system["content"], "messages": [user]}
            assert (await posted("/v1/messages", messages))["stop_reason"] == "refusal"
            answer = await posted("/v1/responses", {"input": "Hi"})
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
            assert answer["output"][-1]["status"] == "incomplete"
            answer = await posted("/api/chat", {"messages": [user], "stream": False})
            assert answer["done_reason"] == "content_filter"
            answer = await posted("/v1/completions", {"prompt": "Once"})
            assert answer["choices"][0]["finish_reason"] == "content_filter"
            assert (await posted("/completion", {"prompt": "Once"}))["stop_type"] == "none"


@pytest.mark.parametrize("kind", ["vLLM", "Ollama"])
async def test_a_server_that_ignores_the_limit_is_stopped_there(kind: str) -> None:
    with FakeUpstream(FLAVOURS[kind]) as upstream:
        held = Held([said(f"{number} ") for number in range(9)], [ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            answer = await parkd.chat(opening(), max_tokens=4)
            assert (answer.text, answer.finish_reason) == ("0 1 2 3 ", "length")
            assert answer.usage["completion_tokens"] == 4
            await until(lambda: len(upstream.left) == 1)
            answer = await parkd.chat(opening("only read"), max_tokens=0)
            assert answer.text in ("", None)
            await until(lambda: len(upstream.left) == 2)
            upstream.script = lambda _: iter([*(said(f"{number} ") for number in range(4)), ended("length")])
            answer = await parkd.chat(opening(), max_tokens=4)
            assert (answer.text, answer.finish_reason) == ("0 1 2 3 ", "length")


async def test_what_runs_is_told_in_tokens_and_not_in_characters() -> None:
    with FakeUpstream(HOSTED) as upstream:
        held = Held([said("characters " * 20)], [ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parkd.stream, opening())
                [turn] = await running(parkd)
                held.go_on.set()
            characters = len("characters ") * 20
            assert 0 < turn["answer"]["tokens"] < 0.5 * characters
            assert 0 < turn["prompt_tokens"] < 0.5 * len(LONG)


async def running(parkd: Before) -> list[dict[str, Any]]:
    """What `/parkd/now` tells of the turns that answer, once one does."""
    with anyio.fail_after(20):
        while True:
            turns: list[dict[str, Any]] = (await parkd.client.get("/parkd/now")).json()["running"]
            if turns and turns[0]["phase"] == "answering":
                return turns
            await anyio.sleep(0.02)


async def test_what_came_before_a_stop_string_is_counted() -> None:
    """By the server's own count where it says that beside each event, else by its events."""
    stop = {"max_tokens": 200, "stop": ["STOP"]}
    for answers, piece, expected in (
        (OLLAMA, lambda number: said(f"{number} "), 31),
        (LLAMA, lambda number: {**said(f"{number} "), "timings": {"predicted_n": 3 * number + 3}}, 90),
        (VLLM, lambda number: {**said(f"{number} "), "usage": {"completion_tokens": 3 * number + 3}}, 90),
    ):
        with FakeUpstream(answers) as upstream:
            last = {**piece(29), **said("STOP")} if answers is not OLLAMA else said("STOP")
            held = Held([*(piece(number) for number in range(30)), last], [ended()])
            upstream.script = held
            async with before(upstream) as parkd:
                answer = await parkd.chat(opening(), **stop)
                assert answer.finish_reason == "stop"
                assert answer.usage["completion_tokens"] == expected
                assert upstream.bodies[-1].get("timings_per_token", False) is (answers is LLAMA)


async def test_a_prompt_that_is_only_read_costs_the_server_one_token() -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([said("H"), ended("length")])
        async with before(upstream) as parkd:
            answer = await parkd.chat(opening(), max_tokens=0)
            assert answer.text in ("", None)
            assert upstream.bodies[-1]["max_tokens"] == 1
            assert answer.usage["prompt_tokens"] == len(upstream.prompt_of(upstream.bodies[-1])) // CHARACTERS_A_TOKEN


async def test_an_answer_that_was_begun_goes_on_where_the_server_can() -> None:
    messages = [*opening(), {"role": "assistant", "content": "The answer is"}]
    with FakeUpstream(VLLM) as upstream:
        upstream.script = lambda _: iter([said(" 42."), ended()])
        async with before(upstream) as parkd:
            body = {"model": "x", "max_tokens": 9, "system": LONG, "messages": messages[1:]}
            answer = (await parkd.client.post("/v1/messages", json=body)).json()
            assert answer["content"][-1]["text"] == " 42."
            sent = upstream.bodies[-1]
            assert sent["messages"][-1] == {"role": "assistant", "content": "The answer is"}
            assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    with FakeUpstream(OLLAMA) as upstream:
        async with before(upstream) as parkd:
            response = await parkd.client.post("/v1/messages", json=body)
            assert response.status_code == 400


async def test_a_system_message_that_comes_late_is_the_users_where_the_template_wants_it() -> None:
    late = [*opening(), {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Be brief."}]
    messages = [*late, {"role": "user", "content": "Go on"}]
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            await parkd.chat(messages)
            assert upstream.bodies[-1]["messages"] == messages

        def strict(body: dict[str, Any]) -> tuple[int, dict[str, str], Any] | None:
            late = any(message["role"] == "system" for message in body["messages"][1:])
            return (400, {}, {"message": "System message must be at the beginning."}) if late else None

        upstream.refuse = strict
        async with before(upstream) as parkd:
            upstream.bodies.clear()
            for _ in range(2):
                assert (await parkd.chat(messages)).text == "Hello there."
            assert [body["messages"][3]["role"] for body in upstream.bodies] == ["system", "user", "user"]
            assert upstream.bodies[-1]["messages"][3]["content"] == "Be brief."
            upstream.refuse = lambda _: (400, {}, {"message": "No."})
            assert (await parkd.post(messages)).status_code == 400


async def test_tokens_are_counted_by_what_the_server_counted_before() -> None:
    with FakeUpstream(VLLM) as upstream:
        async with before(upstream) as parkd:
            for _ in range(12):
                await parkd.chat(opening())
            body = {"model": "x", "system": LONG, "messages": [{"role": "user", "content": "Hi"}]}
            counted = (await parkd.client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
            exact = len(upstream.prompt_of(upstream.bodies[-1])) // CHARACTERS_A_TOKEN
            assert abs(counted - exact) < 0.05 * exact


class Echo:
    """Says the last message, once everyone is there."""

    def __init__(self, upstream: FakeUpstream, together: int) -> None:
        self._upstream, self._together = upstream, together
        self.go_on = threading.Event()

    def __call__(self, body: dict[str, Any]) -> Events:
        yield said("I heard ")
        while not self.go_on.wait(0.01):
            if self._upstream.running >= self._together:
                self.go_on.set()
            yield b": waiting\n\n"
        yield said(body["messages"][-1]["content"])
        yield ended()


async def test_turns_run_side_by_side_as_many_as_the_server_is_given() -> None:
    count = 24
    with FakeUpstream(VLLM) as upstream:
        upstream.script = Echo(upstream, count)
        async with before(upstream) as parkd:
            answers: dict[int, str] = {}

            async def ask(number: int) -> None:
                answers[number] = (await parkd.stream(opening(f"number {number}"))).text

            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(ask, number)
            assert answers == {number: f"I heard number {number}" for number in range(count)}
            assert upstream.most_running == count


async def test_no_more_turns_are_given_than_was_said() -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.script = Echo(upstream, 2)
        async with before(upstream, upstream_turns="2") as parkd:
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(parkd.chat, opening(f"number {number}"))
            assert upstream.most_running == 2
            assert len(upstream.bodies) == 6


async def test_one_that_leaves_touches_none_beside_it() -> None:
    with FakeUpstream(VLLM) as upstream:
        held = Held([said("Hello")], [said(" there."), ended()])
        upstream.script = held
        async with before(upstream) as parkd:
            texts: list[str] = []

            async def stay(number: int) -> None:
                texts.append((await parkd.stream(opening(f"stay {number}"))).text)

            async with anyio.create_task_group() as tasks:
                for number in range(5):
                    tasks.start_soon(stay, number)
                with anyio.move_on_after(0.5):
                    await parkd.stream(opening("leave me"))
                await until(lambda: len(upstream.left) == 1)
                assert upstream.running == 5
                held.go_on.set()
            assert texts == ["Hello there."] * 5
            assert [body["messages"][-1]["content"] for body in upstream.left] == ["leave me"]


async def test_one_refusal_or_failure_touches_none_beside_it() -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.refuse = lambda body: (
            (500, {}, {"error": {"message": "boom"}}) if "fail" in body["messages"][-1]["content"] else None
        )
        async with before(upstream) as parkd:
            statuses: dict[str, int] = {}

            async def ask(question: str) -> None:
                statuses[question] = (await parkd.post(opening(question))).status_code

            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(ask, f"{'fail' if number % 2 else 'go'} {number}")
            assert statuses == {f"{'fail' if n % 2 else 'go'} {n}": 502 if n % 2 else 200 for n in range(10)}


async def test_a_turn_costs_as_many_visits_to_threads_with_hundreds_of_seats_as_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visits: Counter[str] = Counter()

    def counted(name: str, visit: Any) -> Any:
        def call(thread: EngineThread, *args: Any, **kwargs: Any) -> Any:
            visits[name] += 1
            return visit(thread, *args, **kwargs)

        return call

    monkeypatch.setattr(EngineThread, "run", counted("turn", EngineThread.run))
    monkeypatch.setattr(EngineThread, "work", counted("turn", EngineThread.work))
    seen = []
    with FakeUpstream(VLLM) as upstream:
        for seats in ("1", "200"):
            async with before(upstream, upstream_turns=seats) as parkd:
                visits.clear()
                await parkd.chat(opening())
                await parkd.settled()
                seen.append(visits["turn"])
    assert seen[0] == seen[1] <= MOST_VISITS


async def test_what_came_before_a_server_broke_off_is_the_clients() -> None:
    """Events that arrive together are read together, but none is lost for the one behind it."""

    def script(_body: dict[str, Any]) -> Events:
        text = b"".join(b"data: " + json.dumps(said(word)).encode() + b"\n\n" for word in ("one ", "two ", "three"))
        yield text + b"data: " + json.dumps(ended("abort")).encode() + b"\n\n"

    with FakeUpstream(VLLM) as upstream:
        upstream.script = script
        async with (
            before(upstream) as parkd,
            parkd.client.stream(
                "POST", "/v1/chat/completions", json={"messages": opening(), "stream": True}
            ) as response,
        ):
            events = events_of((await response.aread()).decode())
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if "choices" in event) == (
        "one two three"
    )
    assert "broke off" in json.dumps(events[-1])
