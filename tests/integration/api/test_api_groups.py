"""What a `prompt_cache_key` and a `cache_control` change: who goes first, and what usage says. Never what is reused."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.lane.groups import GROUPS_LIMIT, MEMBERS_LIMIT, Groups
from parkd.proxy.config import ProxyConfig
from parkd.store.store import ConversationStore
from parkd.types import NamedKey, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Running, body_of, running

pytestmark = pytest.mark.anyio
LONG = "All work and no play makes a dull day. " * 60


def talk(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{name}: {LONG}"}]


async def said(server: Running, name: str, **fields: Any) -> None:
    await server.chat(talk(name), max_tokens=2, **fields)
    await server.settled()


async def is_parked(server: Running, name: str) -> bool:
    """Asked without leaving a trace."""
    headers = {"x-parkd-cache-mode": "read"}
    response = await server.client.post("/v1/chat/completions", json=body_of(talk(name), 1), headers=headers)
    usage = response.json()["usage"]
    await server.settled()
    return bool(usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2)


async def evicted_first(main: str | None, worker: str | None) -> str:
    """Room for three conversations: `main`, then `other`, then a worker; what a newcomer pushes out."""
    async with running(FakeEngine(), slots=3, eviction_policy="lru") as server:
        await said(server, "main", **({"prompt_cache_key": main} if main else {}))
        await said(server, "other")
        await said(server, "worker", **({"prompt_cache_key": worker} if worker else {}))
        await said(server, "newcomer")
        gone = [name for name in ("main", "other") if not await is_parked(server, name)]
        return " ".join(gone)


async def test_without_a_group_the_least_recently_used_goes() -> None:
    assert await evicted_first(None, None) == "main"


async def test_a_turn_of_the_group_keeps_the_others_of_it_in_use() -> None:
    assert await evicted_first("agent-7", "agent-7") == "other"


async def test_another_group_keeps_nothing() -> None:
    assert await evicted_first("agent-7", "agent-8") == "main"


async def test_a_group_of_another_namespace_reaches_nothing() -> None:
    keys = (NamedKey("a", "key-a", "team-a"), NamedKey("b", "key-b", "team-b"))
    async with running(FakeEngine(), slots=3, eviction_policy="lru", config=ProxyConfig(named_keys=keys)) as server:
        a, b = ({"authorization": f"Bearer key-{name}"} for name in "ab")
        server.client.headers.update(a)
        await said(server, "main", prompt_cache_key="agent-7")
        await said(server, "other")
        server.client.headers.update(b)
        await said(server, "worker", prompt_cache_key="agent-7")
        await said(server, "newcomer")
        server.client.headers.update(a)
        assert await is_parked(server, "other")
        assert not await is_parked(server, "main")


async def test_groups_and_their_members_are_bounded() -> None:
    async with running(FakeEngine()) as server:
        assert isinstance(server.store, ConversationStore)
        groups = Groups(server.store)
        for number in range(GROUPS_LIMIT + 9):
            groups.used(f"g{number}", server.identity.build(request(f"{number}")))
        assert len(groups) == GROUPS_LIMIT
        kept_bytes = []
        for number in range(MEMBERS_LIMIT + 9):
            groups.used("one", server.identity.build(request(f"{number:03}")))
            kept_bytes.append(groups.memory_bytes)
        assert kept_bytes[MEMBERS_LIMIT - 1] == kept_bytes[-1]


def request(name: str) -> TurnRequest:
    return TurnRequest(messages=talk(name))


async def test_usage_tells_what_is_newly_kept_and_it_is_what_the_next_turn_finds() -> None:
    async with running(FakeEngine(), budget_bytes=64 * MIB) as server:
        hint = {"cache_control": {"type": "ephemeral"}}
        user = {"role": "user", "content": [{"type": "text", "text": LONG, **hint}]}
        body: dict[str, Any] = {"model": "any", "max_tokens": 4, "messages": [user]}
        first = (await server.client.post("/v1/messages", json=body)).json()
        await server.settled()
        usage = first["usage"]
        prompt_tokens = len(server.prompt_tokens([{"role": "user", "content": LONG}]))
        assert usage["cache_read_input_tokens"] == 0
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == prompt_tokens
        assert 0 < usage["input_tokens"] < 32  # the generation prompt
        await said(server, "someone else")
        body["messages"] += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "And?"}]
        second = (await server.client.post("/v1/messages", json=body)).json()["usage"]
        assert second["cache_read_input_tokens"] >= usage["cache_creation_input_tokens"]
        assert second["cache_creation_input_tokens"] > 0


@pytest.mark.parametrize("mode", ["read", "off"])
async def test_what_is_not_kept_is_not_counted_as_written(mode: str) -> None:
    async with running(FakeEngine()) as server:
        user = {"role": "user", "content": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]}
        body = {"model": "any", "max_tokens": 4, "messages": [user]}
        answer = await server.client.post("/v1/messages", json=body, headers={"x-parkd-cache-mode": mode})
        assert answer.json()["usage"]["cache_creation_input_tokens"] == 0
