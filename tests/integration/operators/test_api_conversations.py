"""`/parkd/conversations`: what is listed, to whom, and what may be done with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from parkd.proxy.access import namespace_of as owner_of
from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Gate, Messages, Running, running, until
from tests.integration.api.disk_harness import running_on, written

pytestmark = pytest.mark.anyio
SYSTEM = "You are the assistant of our team, and you answer in short and friendly sentences. " * 4
ACT = {"x-parkd-action": "1"}


def asked(text: str) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


async def listed(server: Running, key: str = "") -> list[dict[str, Any]]:
    answer = await server.client.get("/parkd/conversations", headers={"x-api-key": key} if key else {})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["conversations"]
    return found


async def act(server: Running, name: str, what: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"x-api-key": key} if key else {}
    url = f"/parkd/conversations/{name}"
    if what == "DELETE":
        return await server.client.delete(url, headers={**headers, **ACT})
    return await server.client.post(f"{url}/{what}", headers=headers, json=body)


async def say(server: Running, messages: Messages, key: str = "") -> str:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    headers = {"x-api-key": key} if key else {}
    answer = await server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    await server.settled()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_a_conversation_keeps_its_id_while_it_grows_and_its_forks_hang_from_it() -> None:
    async with running(FakeEngine()) as server:
        assert await listed(server) == []
        first = asked("How are you?")
        text = await say(server, first)
        (one,) = await listed(server)
        assert (one["live"], one["parent"], one["turns"], one["hits"], one["pinned"]) == (True, None, 1, 0, False)
        assert one["tokens"] > len(server.prompt_tokens(first))
        assert one["bytes"]["ram"] >= one["bytes"]["own"] > 0
        assert one["bytes"]["disk"] == 0
        assert "first_words" not in one
        grown = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
        await say(server, grown)
        (again,) = await listed(server)
        assert (again["id"], again["turns"], again["hits"]) == (one["id"], 2, 1)
        assert again["tokens"] > one["tokens"]
        await say(server, asked("Who are you?"))
        fork, root = await listed(server)
        assert (root["id"], root["live"], fork["live"]) == (one["id"], False, True)
        assert (fork["parent"], root["parent"]) == (root["id"], None)
        common = len(server.prompt_tokens(asked("")))
        assert SYSTEM_TOKENS_AT_LEAST <= fork["shared_tokens"] <= common
        detail = (await server.client.get(f"/parkd/conversations/{root['id']}")).json()
        assert detail["children"] == [fork["id"]]
        assert len(detail["requests"]) == 2
        why = await server.client.get(f"/parkd/explain/{detail['requests'][1]}")
        assert why.json()["cache"] == "live"


SYSTEM_TOKENS_AT_LEAST = len(SYSTEM)  # a token is a letter


async def test_pins_are_kept_listed_and_bounded_with_the_reason() -> None:
    async with running(FakeEngine(), budget_bytes=MIB // 4, eviction_policy="lru") as server:
        for letter in "ab":
            await say(server, asked(letter * 900))
        b, a = await listed(server)
        pinned = await act(server, a["id"], "pin")
        assert (pinned.status_code, pinned.json()["pinned"], pinned.json()["kept_until_s"]) == (200, True, None)
        kept = (await act(server, b["id"], "keep", for_s=60)).json()
        assert kept["pinned"] is True
        assert kept["kept_until_s"] == pytest.approx(server.server.proxy.services.wall() + 60, abs=5)
        for bad in (0, -1, True, "60", None, 1e12):
            refused = await act(server, b["id"], "keep", for_s=bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "for_s")
        assert (await act(server, a["id"], "unpin")).json()["pinned"] is False
        await say(server, asked("c" * 2000))
        largest = max(await listed(server), key=lambda each: each["tokens"])
        refused = await act(server, largest["id"], "pin")
        assert refused.status_code == 409
        assert "50%" in refused.json()["error"]["message"]


async def test_what_is_pinned_is_not_evicted_and_stays_pinned_as_it_grows() -> None:
    async with running(FakeEngine(), budget_bytes=MIB // 4, eviction_policy="lru") as server:
        first = asked("a" * 200)
        text = await say(server, first)
        (one,) = await listed(server)
        assert (await act(server, one["id"], "pin")).status_code == 200
        grown = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        await say(server, grown)
        for letter in "bcdefghij":
            await say(server, asked(letter * 900))
        found = {each["id"]: each["pinned"] for each in await listed(server)}
        assert found.pop(one["id"]) is True
        assert len(found) < 9, "others were evicted"
        assert not any(found.values())


async def test_a_forgotten_conversation_is_gone_from_memory_the_seat_and_the_answers() -> None:
    async with running(FakeEngine()) as server:
        first = asked("My secret is 1234.")
        text = await say(server, first)
        (one,) = await listed(server)
        gone = await act(server, one["id"], "DELETE")
        assert (gone.status_code, gone.json()["forgotten"]) == (200, True)
        assert await listed(server) == []
        assert (await act(server, one["id"], "DELETE")).status_code == 404
        assert server.server.proxy.requests.bytes == 0
        grown = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
        answer = await server.chat(grown)
        assert (answer.cache, answer.reused) == ("cold", 0)


async def test_a_conversation_that_is_forgotten_while_its_turn_runs_is_not_parked_behind_it() -> None:
    gate = Gate("token", nth=2)
    engine = FakeEngine()
    async with running(engine) as server:
        text = await say(server, asked("first"))
        (one,) = await listed(server)
        engine.hook = gate
        grown = [*asked("first"), {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        async with server.client.stream("POST", "/v1/chat/completions", json=_streamed(grown)) as answer:
            await gate.wait_reached()
            assert (await act(server, one["id"], "DELETE")).status_code == 200
            gate.opened.set()
            assert answer.status_code == 200
            await answer.aread()
        await server.settled()
        assert await listed(server) == []


def _streamed(messages: Messages) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}


async def test_a_conversation_moves_to_disk_and_keeps_its_id_over_a_restart(tmp_path: Path) -> None:
    async with running_on(tmp_path) as server:
        await say(server, asked("on disk"))
        await written(server)
        (one,) = await listed(server)
        moved = await act(server, one["id"], "disk")
        assert moved.status_code == 200
        assert (moved.json()["bytes"]["ram"], moved.json()["value"]) == (0, None)
        assert moved.json()["bytes"]["disk"] > 0
    async with running_on(tmp_path) as server:
        (again,) = await listed(server)
        assert (again["id"], again["tokens"], again["live"]) == (one["id"], one["tokens"], False)
        answer = await server.chat(asked("on disk"))
        assert answer.cache == "restored-disk"


async def test_without_a_disk_the_move_is_refused_with_the_reason() -> None:
    async with running(FakeEngine()) as server:
        await say(server, asked("in memory"))
        (one,) = await listed(server)
        refused = await act(server, one["id"], "disk")
        assert refused.status_code == 409
        assert "no disk" in refused.json()["error"]["message"]


TEAM = ProxyConfig(
    named_keys=(
        NamedKey("anna", "k-anna"),
        NamedKey("carol", "k-carol", "team"),
        NamedKey("dave", "k-dave", "team"),
    ),
    operator_keys=("op",),
    shows_text=True,
)


async def test_a_key_sees_and_steers_only_what_it_sent() -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        secrets = {key: f"I am {key} and this is mine." for key in ("k-anna", "k-carol", "k-dave")}
        for key, text in secrets.items():
            await say(server, asked(text), key)
        by_key = {key: await listed(server, key) for key in secrets}
        assert [len(found) for found in by_key.values()] == [1, 1, 1]
        names = {key: found[0]["id"] for key, found in by_key.items()}
        assert len(set(names.values())) == 3
        for key, (found,) in by_key.items():
            assert found["first_words"] == {"system": SYSTEM[:79] + "\N{HORIZONTAL ELLIPSIS}", "user": secrets[key]}
            assert found["parent"] is None, "the parent is another key's"
            for other, name in names.items():
                status = (await act(server, name, "pin", key)).status_code
                assert status == (200 if other == key else 404)
        assert (await act(server, names["k-carol"], "DELETE", "k-dave")).status_code == 404
        everything = await listed(server, "op")
        assert {each["id"] for each in everything} == set(names.values())
        assert not any("first_words" in each for each in everything)
        assert not any(text in str(everything) for text in secrets.values()), "text is for the key that sent it"
        assert (await act(server, names["k-dave"], "DELETE", "op")).status_code == 200
        assert await listed(server, "k-dave") == []
        assert (await server.client.get("/parkd/conversations")).status_code == 401


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_found_by_use_a_clock_that_is_set_makes_nothing_older_or_younger(jump_s: float) -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        services = server.server.proxy.services
        for key in ("k-carol", "k-anna"):
            await say(server, asked("Hello."), key)
            await act(server, (await listed(server, key))[0]["id"], "keep", key, for_s=60)
        await asyncio.sleep(0.2)
        wall = services.wall
        object.__setattr__(services, "wall", lambda: wall() + jump_s)
        for key in ("k-carol", "k-anna"):
            (one,) = await listed(server, key)
            assert 0.1 < one["age_s"] < 60
            assert 0.1 < one["idle_s"] < 60
            assert one["pinned"]
            assert 0 < one["kept_until_s"] - wall() - jump_s < 60
            (slot,) = (await server.client.get("/slots", headers={"x-api-key": key})).json()
            assert [0.1 < each["idle_s"] < 60 for each in slot["parked"]] == [True]
        await say(server, asked("And more."), "k-carol")
        assert [each["live"] for each in await listed(server, "k-carol")] == [True, False]


async def test_found_by_use_a_key_does_not_see_in_live_that_another_runs() -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        for text in ("Hello.", "And something else."):
            await say(server, asked(text), "k-carol")
        before = [(each["id"], each["live"]) for each in await listed(server, "k-carol")]
        assert [live for _, live in before] == [True, False]
        for other in ("k-dave", "k-anna"):
            await say(server, asked("Mine."), other)
            assert [(each["id"], each["live"]) for each in await listed(server, "k-carol")] == before
        assert [each["live"] for each in await listed(server, "op")].count(True) == 1, "an operator is told what is"
        assert (await listed(server, "op"))[0]["live"]


async def test_found_by_use_forgetting_a_beginning_leaves_the_reports_of_what_goes_on_from_it() -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        carol = {"x-api-key": "k-carol"}
        text = await say(server, asked("Tell me."), "k-carol")
        template = await server.client.post("/apply-template", json={"messages": asked("Tell me.")}, headers=carol)
        body = {"prompt": template.json()["prompt"][:300], "max_tokens": 0}
        more = [*asked("Tell me."), {"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        await say(server, more, "k-carol")
        await server.client.post("/v1/completions", json=body, headers=carol)
        await server.settled()
        asked_for = server.server.proxy.requests.latest_of(owner_of("k-carol"))
        beginning, second, first = [one.request_id for one in asked_for]
        long, short = sorted(await listed(server, "k-carol"), key=lambda each: -each["tokens"])

        async def known() -> list[int]:
            paths = [f"/parkd/explain/{request_id}" for request_id in (first, beginning, second)]
            return [(await server.client.get(path, headers=carol)).status_code for path in paths]

        assert (await act(server, short["id"], "DELETE", "k-carol")).status_code == 200
        assert await known() == [200, 404, 200]
        assert [each["id"] for each in await listed(server, "k-carol")] == [long["id"]]
        assert (await act(server, long["id"], "DELETE", "k-carol")).status_code == 200
        assert await known() == [404, 404, 404]


async def test_what_another_key_of_the_namespace_continued_is_not_shown() -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        text = await say(server, asked("Hello."), "k-dave")
        (mine,) = await listed(server, "k-dave")
        grown = [*asked("Hello."), {"role": "assistant", "content": text}, {"role": "user", "content": "Secret!"}]
        await say(server, grown, "k-carol")
        assert await listed(server, "k-dave") == []
        assert (await act(server, mine["id"], "pin", "k-dave")).status_code == 404
        (theirs,) = await listed(server, "k-carol")
        assert (theirs["turns"], theirs["hits"]) == (1, 1), "of its own turns"


async def test_actions_need_a_header_that_no_foreign_page_can_send() -> None:
    async with running(FakeEngine()) as server:
        await say(server, asked("hello"))
        (one,) = await listed(server)
        url = f"/parkd/conversations/{one['id']}"
        for method, path in (("POST", f"{url}/pin"), ("DELETE", url), ("POST", f"{url}/disk")):
            plain = await server.client.request(method, path, content="{}", headers={"content-type": "text/plain"})
            assert plain.status_code == 403
            foreign = await server.client.request(method, path, headers={**ACT, "origin": "http://evil.example"})
            assert foreign.status_code == 403
        assert [each["pinned"] for each in await listed(server)] == [False]
        assert (await server.client.post(f"{url}/pin", headers=ACT)).json()["pinned"] is True


async def test_what_is_live_and_not_parked_is_listed_and_can_only_be_forgotten() -> None:
    async with running(FakeEngine(), budget_bytes=0) as server:
        await say(server, asked("hello"))
        (one,) = await listed(server)
        assert (one["id"], one["live"], one["parked"]) == ("live-0", True, False)
        assert (await act(server, "live-0", "pin")).status_code == 409
        assert (await act(server, "live-0", "DELETE")).status_code == 200
        assert await listed(server) == []
        assert (await server.chat(asked("hello"))).reused == 0


async def test_the_list_waits_for_nothing_while_a_turn_runs() -> None:
    gate = Gate("chunk")
    engine = FakeEngine()
    async with running(engine) as server:
        engine.hook = gate
        async with server.client.stream("POST", "/v1/chat/completions", json=_streamed(asked("x"))) as answer:
            await until(gate.reached.is_set)
            assert await listed(server) == []
            gate.opened.set()
            await answer.aread()


async def test_forgetting_a_beginning_takes_nothing_from_another_key_of_the_namespace() -> None:
    """All prompts begin alike. A key that forgot just that lost the others their reports, and their conversations."""
    async with running(FakeEngine(), config=TEAM) as server:
        await say(server, asked("Mine, of carol."), "k-carol")
        carol = {"x-api-key": "k-carol"}
        (turn,) = [one.request_id for one in server.server.proxy.requests.latest_of(owner_of("k-carol"))]
        before = await listed(server, "k-carol")
        template = await server.client.post("/apply-template", json={"messages": asked("Hi.")}, headers=carol)
        body = {"prompt": template.json()["prompt"][:60], "max_tokens": 0}
        read = await server.client.post("/v1/completions", json=body, headers={"x-api-key": "k-dave"})
        assert read.status_code == 200, read.text
        await server.settled()
        for one in await listed(server, "k-dave"):
            gone = await act(server, one["id"], "DELETE", "k-dave")
            assert gone.json() == {"id": one["id"], "forgotten": True, "answers": None}, "others' answers are counted"
        assert await listed(server, "k-dave") == []
        assert (await server.client.get(f"/parkd/explain/{turn}", headers=carol)).status_code == 200
        assert [one["id"] for one in await listed(server, "k-carol")] == [one["id"] for one in before]


async def test_a_key_does_not_learn_when_another_key_said_the_same_before() -> None:
    async with running(FakeEngine(), config=TEAM) as server:
        await say(server, asked("The same."), "k-carol")
        await asyncio.sleep(0.3)
        await say(server, asked("The same."), "k-dave")
        (mine,) = await listed(server, "k-dave")
        (theirs,) = await listed(server, "k-carol")
        assert mine["id"] == theirs["id"]
        assert mine["age_s"] <= theirs["age_s"] - 0.2


async def test_a_key_does_not_learn_from_its_own_conversation_what_another_key_sends() -> None:
    """What an eviction would free falls when another key of the namespace sends the same beginning: a key that only
    looked at its list saw when that was, and how many blocks of its text the other had used."""
    async with running(FakeEngine(), config=TEAM) as server:
        await say(server, asked("Mine, of dave."), "k-dave")
        (before,) = await listed(server, "k-dave")
        (of_all,) = await listed(server, "op")
        await say(server, asked("Mine, of carol."), "k-carol")
        (after,) = await listed(server, "k-dave")
        by_name = {each["id"]: each for each in await listed(server, "op")}
        assert by_name[after["id"]]["bytes"]["own"] < of_all["bytes"]["own"], "an operator is told"
        changes = {field for field in before if before[field] != after[field]}
        assert changes <= {"live", "age_s", "idle_s"}
        assert (after["bytes"]["own"], after["value"], after["saves_s"]) == (None, None, None)
        await say(server, asked("Mine alone."), "k-anna")
        (alone,) = await listed(server, "k-anna")
        assert alone["bytes"]["own"] > 0, "nobody shares this namespace"


async def test_a_key_does_not_see_where_the_prompt_of_another_key_leaves_its_own() -> None:
    """A request that keeps nothing leaves the seat at the last token that it shares with what was known, and one for a
    beginning parks as much: both were listed to the key whose prompt goes on from there, and told when the other sent
    them and how much of its text they have."""
    async with running(FakeEngine(), config=TEAM) as server:
        await say(server, asked("Mine, of carol."), "k-carol")
        (mine,) = await listed(server, "k-carol")
        dave, nothing = {"x-api-key": "k-dave"}, {"x-parkd-cache-mode": "read"}
        body = {"messages": asked("Mine, of dave."), "max_tokens": 0}
        await server.client.post("/v1/chat/completions", json=body, headers={**dave, **nothing})
        await server.settled()
        assert len(await listed(server, "op")) == 2, "a seat holds what is shared"
        assert [each["id"] for each in await listed(server, "k-carol")] == [mine["id"]]
        template = await server.client.post("/apply-template", json={"messages": asked("Mine, of")}, headers=dave)
        body = {"prompt": template.json()["prompt"][:300], "max_tokens": 0}
        await server.client.post("/v1/completions", json=body, headers=dave)
        await server.settled()
        (theirs,) = await listed(server, "k-dave")
        assert theirs["tokens"] < mine["tokens"]
        assert [each["id"] for each in await listed(server, "k-carol")] == [mine["id"]]
        assert (await act(server, theirs["id"], "pin", "k-carol")).status_code == 404
