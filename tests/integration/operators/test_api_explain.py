"""Why a prompt was read and not reused: headers, `/parkd/explain`, and two APIs' diagnoses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from parkd.identity.normalise import NormaliserConfig, RewriteRule
from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Running, body_of, running

pytestmark = pytest.mark.anyio
LONG = "The quick brown fox. " * 60


def asked(text: str, system: str = "Be short.") -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


async def explained(server: Running, request_id: str, **headers: str) -> dict[str, Any]:
    response = await server.client.get(f"/parkd/explain/{request_id}", headers=headers)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


async def test_the_first_differing_token_is_shown_with_its_text_and_its_message() -> None:
    async with running(FakeEngine()) as server:
        await server.chat(asked(LONG + "cats"))
        await server.settled()
        answer = await server.chat(asked(LONG + "dogs"))
        told = await explained(server, answer.headers["x-request-id"])
        prompt = server.prompt_tokens(asked(LONG + "dogs"))
        differs = told["divergence"]
        assert bytes(prompt[differs["token"] : differs["token"] + 3]) == b"dog"
        assert differs == {
            "token": answer.reused,
            "segment": "message 2 (user)",
            "text": "'dog'",
            "known_text": "'cat'",
        }
        assert "'dog' where 'cat' was known" in answer.headers["x-parkd-divergence"]
        assert (told["cache"], told["reused_tokens"], told["state"]) == (answer.cache, answer.reused, "done")
        assert told["prompt_tokens"] == len(prompt)
        assert told["read_tokens"] == len(prompt) - answer.reused
        assert told["segments"][-1]["stop"] == len(prompt)
        assert told["end"] == answer.finish_reason


async def test_rewrite_rules_keep_a_clock_out_and_are_reported() -> None:
    rule = RewriteRule(r"It is \d+:\d+\.", "It is noon.", name="clock")
    async with running(FakeEngine(), normaliser=NormaliserConfig(rules=(rule,))) as server:
        await server.chat(asked(LONG, "It is 10:01. Be short."))
        await server.settled()
        again = await server.chat(asked(LONG, "It is 10:02. Be short."))
        told = await explained(server, again.headers["x-request-id"])
        assert told["rewrites"] == [{"rule": "clock", "places": 1}]
        assert again.reused == told["prompt_tokens"] - 1
        told = await explained(server, (await server.chat(asked(LONG, "No clock."))).headers["x-request-id"])
        assert told["rewrites"] == []


async def test_a_dropped_billing_header_is_reported() -> None:
    async with running(FakeEngine()) as server:
        header = "x-anthropic-billing-header: cc_version=1\nBe short."
        told = await explained(server, (await server.chat(asked(LONG, header))).headers["x-request-id"])
        assert told["rewrites"] == [{"rule": "billing header", "places": 1}]


async def test_a_grown_conversation_differs_nowhere() -> None:
    async with running(FakeEngine()) as server:
        first = await server.chat(asked(LONG))
        turns = [*asked(LONG), {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        second = await server.chat(turns)
        assert "x-parkd-divergence" not in second.headers
        assert (await explained(server, second.headers["x-request-id"]))["divergence"] is None


async def test_what_was_evicted_is_said() -> None:
    # What the value policy lets go depends on measured speeds; the least recently used is always the first.
    async with running(FakeEngine(), budget_bytes=MIB // 4, eviction_policy="lru") as server:
        for name in "abcdefgh":
            await server.chat(asked(name * 2000))
        await server.settled()
        answer = await server.chat(asked("a" * 2000))
        told = await explained(server, answer.headers["x-request-id"])
        assert told["reused_tokens"] < 100, "only the head that all have"
        assert "evicted" in told["why"]


async def test_nobody_sees_another_keys_requests() -> None:
    keys = (NamedKey("anna", "k1", "team"), NamedKey("ben", "k2", "team"))
    async with running(FakeEngine(), config=ProxyConfig(named_keys=keys)) as server:
        body = {"messages": asked(LONG), "max_tokens": 4}
        answer = await server.client.post("/v1/chat/completions", json=body, headers={"x-api-key": "k1"})
        request_id = answer.headers["x-request-id"]
        assert (await explained(server, request_id, **{"x-api-key": "k1"}))["state"] == "done"
        for headers, status in (({"x-api-key": "k2"}, 404), ({}, 401)):
            response = await server.client.get(f"/parkd/explain/{request_id}", headers=headers)
            assert response.status_code == status
        shared = await server.client.post("/v1/chat/completions", json=body, headers={"x-api-key": "k2"})
        assert int(shared.headers["x-parkd-reused-tokens"]) > 0, "a team shares its namespace"
        salted = {**body, "cache_salt": "mine"}
        alone = await server.client.post("/v1/chat/completions", json=salted, headers={"x-api-key": "k2"})
        assert alone.headers["x-parkd-reused-tokens"] == "0", "a salt narrows it"


async def message(server: Running, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}
    response = await server.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


async def test_anthropic_clients_are_told_which_part_changed() -> None:
    async with running(FakeEngine()) as server:
        first = await message(server, LONG, system="Be short.", diagnostics={"previous_message_id": None})
        assert "diagnostics" not in first
        compare = {"diagnostics": {"previous_message_id": first["id"]}}
        same = await message(server, LONG, system="Be short.", **compare)
        assert same["diagnostics"] is None
        other = await message(server, LONG, system="Be long.", **compare)
        reason = other["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == "system_changed"
        assert reason["cache_missed_input_tokens"] > len(LONG)
        edited = await message(server, "Well. " + LONG, system="Be short.", **compare)
        assert edited["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        armed = await message(server, LONG, system="Be short.", tools=tools, **compare)
        assert armed["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
        lost = await message(server, LONG, diagnostics={"previous_message_id": "msg_nobody"})
        assert lost["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


async def test_responses_clients_are_told_hit_or_miss() -> None:
    async def response(text: str, **options: Any) -> dict[str, Any]:
        body = {"input": text, "max_output_tokens": 4, "prompt_cache_options": options}
        answer = await server.client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async with running(FakeEngine()) as server:
        first = await response(LONG)
        assert "prompt_cache_diagnostics" not in first
        hit = await response(LONG, comparison_response_id=first["id"])
        assert hit["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        miss = (await response("Not " + LONG, comparison_response_id=first["id"]))["prompt_cache_diagnostics"]
        assert (miss["type"], miss["reason"]) == ("cache_miss", "input_changed")
        assert miss["cache_missed_tokens"] > 0
        lost = await response(LONG, comparison_response_id="resp_nobody")
        assert lost["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


async def test_what_every_conversation_shares_is_no_part_of_one() -> None:
    """Found by use 22: a first turn that shared the template's first tokens was `live`, and `differs` as by a fault."""
    async with running(FakeEngine()) as server:

        async def headers_of(text: str) -> Mapping[str, str]:
            body = body_of([{"role": "user", "content": text}])
            return (await server.client.post("/v1/chat/completions", json=body)).headers

        await headers_of("One thing.")
        other = await headers_of("Another.")
        assert other["x-parkd-cache"] == "cold"
        assert 0 < int(other["x-parkd-reused-tokens"]) < 20
        assert "x-parkd-why" not in other
        assert "x-parkd-divergence" not in other
        begun = await headers_of("Anon.")
        assert begun["x-parkd-cache"] == "live", "it begins with the same letters"
        assert "differs" in begun["x-parkd-why"]
