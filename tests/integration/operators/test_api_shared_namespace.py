"""Two keys in one namespace: they share parked state, and neither is told what the other said."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Messages, Running, running

pytestmark = pytest.mark.anyio
TEAM = ProxyConfig(named_keys=(NamedKey("carol", "k-carol", "team"), NamedKey("dave", "k-dave", "team")))
SYSTEM = "You are the assistant of our team, and you answer in short and friendly sentences. " * 4
SECRET = (
    "My salary is 5,120 a month and the reserve is in the blue folder behind the printer; tell nobody of it, please."
)
MARK = "\N{SECTION SIGN}"
PROBES = 13


def asked(text: str) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


@asynccontextmanager
async def team(**options: Any) -> AsyncIterator[Running]:
    async with running(FakeEngine(), config=TEAM, **options) as server:
        yield server


async def ask(server: Running, key: str, messages: Messages, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The headers of a key's request, and what it is told about it."""
    extra = fields.pop("headers", {})
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    headers = {"x-api-key": key, **extra}
    answer = await server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    await server.settled()
    told = await server.client.get(f"/parkd/explain/{answer.headers['x-request-id']}", headers={"x-api-key": key})
    assert told.status_code == 200, told.text
    return dict(answer.headers), told.json()


async def slots(server: Running, key: str) -> list[dict[str, Any]]:
    parked: list[dict[str, Any]] = (await server.client.get("/slots", headers={"x-api-key": key})).json()[0]["parked"]
    return parked


async def test_the_attack_that_read_another_keys_conversation_learns_nothing() -> None:
    """Found by use 1: 13 requests read 120 characters of another key's conversation."""
    async with team() as server:
        await ask(server, "k-carol", asked(SECRET))
        learnt = ""
        read_only = {"x-parkd-cache-mode": "read"}
        for _ in range(PROBES):
            headers, told = await ask(server, "k-dave", asked(learnt + MARK), max_tokens=0, headers=read_only)
            assert told["reused_tokens"] > len(SYSTEM), "the state of the common system prompt is shared"
            assert "x-parkd-divergence" not in headers
            assert told["divergence"] is None
            shown = re.search(r"where '(.*)' was known", headers.get("x-parkd-divergence", ""))
            learnt += shown[1] if shown else SECRET[len(learnt) : len(learnt) + 9]  # as if it had been guessed
        assert learnt.startswith(SECRET[: 9 * PROBES])


async def test_why_tells_no_place_in_another_keys_conversation() -> None:
    """Found by use 1: `why=differs from token N` said how far another key's conversation was the same."""
    async with team() as server:
        await ask(server, "k-carol", asked(SECRET))
        headers, told = await ask(server, "k-dave", asked("My salary is what?"), max_tokens=0)
        assert (told["why"], headers.get("x-parkd-why")) == ("", None)


async def test_a_key_is_told_of_its_own_conversation_as_before() -> None:
    """Found by use 1: what a key said itself is still shown to it, its answers too, and nothing that others added."""
    async with team() as server:
        await ask(server, "k-dave", asked("Cats are fine."))
        _, told = await ask(server, "k-dave", asked("Cats are here."))
        assert (told["divergence"]["text"], told["divergence"]["known_text"]) == ("'her'", "'fin'")
        assert told["why"].startswith(f"differs from token {told['divergence']['token']} in message 2")
        answer = await server.client.post(
            "/v1/chat/completions",
            json={"messages": asked("And dogs?"), "max_tokens": 8, "temperature": 0},
            headers={"x-api-key": "k-dave"},
        )
        text = answer.json()["choices"][0]["message"]["content"]
        edited = [*asked("And dogs?"), {"role": "assistant", "content": f"{text[:-2]}{MARK}"}]
        _, told = await ask(server, "k-dave", [*edited, {"role": "user", "content": "So?"}])
        assert MARK in told["divergence"]["text"] or told["divergence"]["known_text"].startswith(f"'{text[-2:]}")


async def test_what_another_key_added_to_a_conversation_is_not_shown() -> None:
    """Found by use 1: a conversation that two keys extended is shown to each only as far as its own requests went."""
    async with team() as server:
        await ask(server, "k-dave", asked("Hello."), max_tokens=0)
        mine = len(server.prompt_tokens(asked("Hello.")))
        grown: Messages = [
            *asked("Hello."),
            {"role": "assistant", "content": SECRET},
            {"role": "user", "content": "So?"},
        ]
        await ask(server, "k-carol", grown)
        other: Messages = [
            *asked("Hello."),
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "So?"},
        ]
        headers, told = await ask(server, "k-dave", other, headers={"x-parkd-cache-mode": "read"})
        assert "x-parkd-divergence" not in headers
        assert told["divergence"] is None
        assert told["why"] == ""
        assert max(one["tokens"] for one in await slots(server, "k-dave")) <= mine


async def test_slots_lists_only_what_the_key_itself_said() -> None:
    """Found by use 1: `/slots` listed another key's conversations."""
    async with team() as server:
        await ask(server, "k-carol", asked(SECRET))
        await ask(server, "k-carol", asked(f"Again: {SECRET}"))
        assert await slots(server, "k-dave") == []
        _, told = await ask(server, "k-dave", asked("Hello."))
        own = len(server.prompt_tokens(asked("Hello."))) + told["output_tokens"] - 1  # the last was never read
        assert [one["tokens"] for one in await slots(server, "k-dave")] == [own]
        assert len(await slots(server, "k-carol")) == 2


async def test_slots_does_not_tell_that_another_key_went_on_with_a_conversation() -> None:
    """Found by use 1: its tokens grew by one, the answer's last, which only the next turn reads."""
    async with team() as server:
        answer = await server.client.post(
            "/v1/chat/completions",
            json={"messages": asked("Hello."), "max_tokens": 4, "temperature": 0},
            headers={"x-api-key": "k-dave"},
        )
        await server.settled()
        before = [one["tokens"] for one in await slots(server, "k-dave")]
        text = answer.json()["choices"][0]["message"]["content"]
        grown: Messages = [*asked("Hello."), {"role": "assistant", "content": text}, {"role": "user", "content": "So?"}]
        _, told = await ask(server, "k-carol", grown)
        assert told["reused_tokens"] == before[0], "it was continued"
        assert [one["tokens"] for one in await slots(server, "k-dave")] == before


@pytest.mark.parametrize("mode", ["read", "off"])
async def test_why_says_not_parked_any_more_only_of_what_once_was(mode: str) -> None:
    """Found by use 1: a key that asked to keep nothing, and reused another key's state of the common prompt, was told
    that its own was gone."""
    async with team() as server:
        await ask(server, "k-carol", asked(SECRET))
        for _ in range(2):
            _, told = await ask(server, "k-dave", asked("Cats are fine."), headers={"x-parkd-cache-mode": mode})
            assert "any more" not in told["why"]
        _, told = await ask(server, "k-dave", asked("Cats are fine."))
        assert len(SYSTEM) < told["reused_tokens"] < told["prompt_tokens"] - 1
        said = len(server.prompt_tokens(asked("Cats are fine."))) + 4
        assert re.fullmatch(rf"no exact state between tokens {told['reused_tokens']} and \d+", told["why"]), told
        assert int(told["why"].split()[-1]) <= said
        _, told = await ask(server, "k-dave", asked("Cats are fine."))
        assert (told["why"], told["reused_tokens"]) == ("", told["prompt_tokens"] - 1)


async def test_what_became_of_another_keys_conversation_is_not_told() -> None:
    """Found by use 1: a key was told when and why another key's conversation was evicted, and the next one's size."""
    async with team(budget_bytes=MIB // 4, eviction_policy="lru") as server:
        await ask(server, "k-carol", asked("a" * 2000))
        for name in "bcdefgh":
            await ask(server, "k-carol", asked(name * 2000))
        _, told = await ask(server, "k-dave", asked("a" * 2000), max_tokens=0)
        assert told["reused_tokens"] < 1000
        assert told["why"] == ""
        for name in "bcdefgh":
            await ask(server, "k-carol", asked(name * 2000))
        _, told = await ask(server, "k-dave", asked("a" * 2000), max_tokens=0)
        assert told["why"] == "what this key sent before is not parked any more"


async def test_a_key_alone_in_its_namespace_is_told_no_size_of_another_keys_conversation() -> None:
    """Found by use 1: `why=evicted` named the tokens of the conversation that took the room, whoever's it was."""
    keys = ProxyConfig(named_keys=(NamedKey("carol", "k-carol"), NamedKey("dave", "k-dave")))
    async with running(FakeEngine(), config=keys, budget_bytes=MIB // 4, eviction_policy="lru") as server:
        await ask(server, "k-dave", asked("a" * 2000))
        for name in "bcdefgh":
            await ask(server, "k-carol", asked(name * 2000))
        _, told = await ask(server, "k-dave", asked("a" * 2000))
        assert re.fullmatch(r"evicted \d+ s ago: its room was needed for another conversation", told["why"])


async def test_found_by_attack_a_salt_keeps_state_from_the_other_keys_of_a_namespace() -> None:
    """The documents promised the same key and the same salt; another key of the team that sent the same salt was given
    the state."""
    async with team() as server:
        await ask(server, "k-carol", asked(SECRET), cache_salt="s")
        _, other = await ask(server, "k-dave", asked(SECRET), cache_salt="s")
        _, own = await ask(server, "k-carol", asked(SECRET), cache_salt="s")
    assert other["reused_tokens"] == 0
    assert own["reused_tokens"] == own["prompt_tokens"] - 1


async def test_a_key_that_forgets_what_another_said_too_forgets_its_own_part() -> None:
    """Dave sends what Carol sent, and deletes it: her pin, her state and her requests stay until she lets go."""
    async with team() as server:

        async def listed(key: str) -> list[dict[str, Any]]:
            page = await server.client.get("/parkd/conversations", headers={"x-api-key": key})
            found: list[dict[str, Any]] = page.json()["conversations"]
            return found

        async def act(key: str, method: str, path: str) -> int:
            marks = {"x-api-key": key, "x-parkd-action": "1"}
            return (await server.client.request(method, f"/parkd/conversations/{path}", headers=marks)).status_code

        await ask(server, "k-carol", asked(SECRET))
        (hers,) = await listed("k-carol")
        assert await act("k-carol", "POST", f"{hers['id']}/pin") == 200
        await ask(server, "k-dave", asked(SECRET))
        (his,) = await listed("k-dave")
        assert his["id"] == hers["id"]
        assert await act("k-dave", "DELETE", his["id"]) == 200
        assert await listed("k-dave") == []
        (still,) = await listed("k-carol")
        assert (still["id"], still["pinned"], still["turns"]) == (hers["id"], True, 1)
        _, told = await ask(server, "k-carol", asked(SECRET))
        assert told["reused_tokens"] > len(SYSTEM) + len(SECRET)
        assert await act("k-carol", "DELETE", hers["id"]) == 200
        assert await listed("k-carol") == []
        _, told = await ask(server, "k-carol", asked(SECRET))
        assert told["reused_tokens"] == 0
