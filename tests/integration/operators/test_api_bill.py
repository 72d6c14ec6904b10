"""`/parkd/turns` and `/parkd/bill` over a real server: what was read needlessly, by whom, and who is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parkd.identity.normalise import RULES_LIMIT
from parkd.ledger.ledger import Ledger
from parkd.proxy.config import ProxyConfig
from parkd.proxy.rules import unrolled
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import MIB, Messages, Running, running, running_in_thread

pytestmark = pytest.mark.anyio
SYSTEM = "You answer in short and friendly sentences, and never say more than what was asked of you. " * 4


def asked(text: str, system: str = SYSTEM) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


@asynccontextmanager
async def billed(path: Path, **options: Any) -> AsyncIterator[Running]:
    ledger = Ledger(path / "ledger.sqlite3")
    try:
        async with running(FakeEngine(), ledger=ledger, **options) as server:
            yield server
    finally:
        ledger.close()


async def say(server: Running, messages: Messages, key: str = "", **headers: str) -> str:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    sent = {**({"x-api-key": key} if key else {}), **headers}
    answer = await server.client.post("/v1/chat/completions", json=body, headers=sent)
    assert answer.status_code == 200, answer.text
    await server.settled()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def told(server: Running, path: str, key: str = "", **query: str) -> Any:
    answer = await server.client.get(path, params=query, headers={"x-api-key": key} if key else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_turn_is_told_with_its_cause_and_what_it_cost(tmp_path: Path) -> None:
    config = ProxyConfig(watts=360.0, kwh_price=0.5)
    async with billed(tmp_path, config=config) as server:
        await say(server, asked("Hello?", f"It is 10:04:31 now. {SYSTEM}"))
        text = await say(
            server, asked("Hello?", f"It is 10:05:02 now. {SYSTEM}"), **{"user-agent": "claude-cli/2.1 (x)"}
        )
        grown = [*asked("Hello?", f"It is 10:05:02 now. {SYSTEM}"), {"role": "assistant", "content": text}]
        await say(server, [*grown, {"role": "user", "content": "And?"}])
        third, second, first = (await told(server, "/parkd/turns"))["turns"]
        assert (first["cause"], first["needless_tokens"], first["client"]) == ("first_time", 0, "python-httpx")
        assert (second["cause"], second["client"], second["cache"]) == ("clock", "claude-cli", "live")
        assert len(SYSTEM) < second["needless_tokens"] <= second["read_tokens"]
        assert second["seconds"]["read"] >= second["needless_s"] > 0
        assert (second["differs"]["segment"], "text" in second["differs"]) == ("system", False)
        assert (third["cause"], third["needless_tokens"], third["end"]) == (None, 0, "length")
        assert third["conversation"] == second["conversation"] != first["conversation"]
        assert third["api"] == "/v1/chat/completions"
        conversations = (await told(server, "/parkd/conversations"))["conversations"]
        assert {each["id"] for each in conversations} == {first["conversation"], second["conversation"]}
        assert SYSTEM[:20] not in str((first, second, third))
        own = await told(server, "/parkd/turns", conversation=second["conversation"], limit="1")
        assert [each["request_id"] for each in own["turns"]] == [third["request_id"]]

        bill = await told(server, "/parkd/bill", since="1d")
        assert bill["total"]["needless_tokens"] == second["needless_tokens"]
        seconds = bill["total"]["needless_s"]
        assert bill["total"]["kwh"] == pytest.approx(360 * second["needless_s"] / 3.6e6)
        assert bill["total"]["money"] == pytest.approx(bill["total"]["kwh"] / 2)
        assert (bill["by_cause"][0]["cause"], bill["by_cause"][0]["turns"]) == ("clock", 1)
        assert bill["by_client"][0]["client"] == "claude-cli"
        assert (len(bill["by_day"]), bill["by_day"][0]["needless_s"]) == (1, seconds)
        (proposed,) = bill["rules"]
        assert (proposed["request_id"], proposed["turns"]) == (second["request_id"], 1)
        assert "It is" not in str(proposed), "no text without --page-text"
        assert proposed["line"].startswith("[[rule]]\nname = ")
        assert (await told(server, "/parkd/turns", since="9999999999"))["turns"] == []


async def test_what_was_evicted_is_billed_as_that(tmp_path: Path) -> None:
    async with billed(tmp_path, budget_bytes=MIB // 4, eviction_policy="lru") as server:
        await say(server, asked("a" * 1500))
        for letter in "bcdefgh":
            await say(server, asked(letter * 1500))
        await say(server, asked("a" * 1500))
        last = (await told(server, "/parkd/turns", limit="1"))["turns"][0]
        assert last["cause"] == "evicted"
        assert 1400 < last["needless_tokens"] <= last["read_tokens"]


KEYS = ProxyConfig(
    named_keys=(NamedKey("anna", "k-anna"), NamedKey("ben", "k-ben")), operator_keys=("op",), shows_text=True
)


async def test_a_key_is_told_of_its_own_turns_and_text_only_to_who_sent_it(tmp_path: Path) -> None:
    async with billed(tmp_path, config=KEYS) as server:
        for key in ("k-anna", "k-ben"):
            for clock in ("10:04:31", "10:05:02"):
                await say(server, asked("Hello?", f"Mine of {key} at {clock} is it. {SYSTEM}"), key)
        for key, name, other in (("k-anna", "anna", "k-ben"), ("k-ben", "ben", "k-anna")):
            found = await told(server, "/parkd/turns", key)
            bill = await told(server, "/parkd/bill", key)
            assert [each["key"] for each in found["turns"]] == [name, name]
            assert f"Mine of {key}" in found["turns"][0]["differs"]["text"]
            assert key in found["turns"][0]["rule"]["pattern"].replace("\\", "")
            assert bill["total"]["turns"] == 2
            assert other not in str((found, bill))
        everything, bill = await told(server, "/parkd/turns", "op"), await told(server, "/parkd/bill", "op")
        assert (len(everything["turns"]), bill["total"]["turns"]) == (4, 4)
        assert "Mine of" not in str((everything, bill))
        assert (await server.client.get("/parkd/turns")).status_code == 401
        assert (await server.client.get("/parkd/bill")).status_code == 401


async def test_a_forgotten_conversation_leaves_the_ledger_too(tmp_path: Path) -> None:
    async with billed(tmp_path) as server:
        await say(server, asked("Hello?"))
        (turn,) = (await told(server, "/parkd/turns"))["turns"]
        gone = await server.client.delete(
            f"/parkd/conversations/{turn['conversation']}", headers={"x-parkd-action": "1"}
        )
        assert gone.status_code == 200
        assert (await told(server, "/parkd/turns"))["turns"] == []


async def test_a_turn_that_failed_or_kept_nothing_is_there_too(tmp_path: Path) -> None:
    async with billed(tmp_path) as server:
        await say(server, asked("Hello?"), **{"x-parkd-cache-mode": "read"})
        await say(server, asked("Hello?"), **{"x-parkd-cache-mode": "off"})
        off, read = (await told(server, "/parkd/turns"))["turns"]
        assert (read["conversation"], off["conversation"], off["cause"]) == (None, None, "not_asked")


async def test_without_a_ledger_the_answer_says_so(tmp_path: Path) -> None:
    async with running(FakeEngine()) as server:
        for path in ("/parkd/turns", "/parkd/bill"):
            refused = await server.client.get(path)
            assert (refused.status_code, "--ledger off" in refused.text) == (404, True)
    (tmp_path / "ledger.sqlite3").write_bytes(b"x" * 5000)
    async with billed(tmp_path) as server:
        assert (await say(server, asked("Hello?"))) != ""
        assert (await server.client.get("/parkd/turns")).status_code == 404
        assert "parkd_ledger_is_lost 1.0" in (await server.client.get("/metrics")).text


def test_any_query_is_answered_or_refused_by_its_field(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    with (
        contextlib.closing(ledger),
        running_in_thread(FakeEngine(), ledger=ledger) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        names = ("since", "limit", "conversation", "request_id")
        paths = st.sampled_from(["/parkd/turns", "/parkd/bill", "/parkd/conversations", "/parkd/conversations/x"])

        @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(paths, st.dictionaries(st.sampled_from(names), st.text(max_size=30), max_size=4))
        def ask(path: str, query: dict[str, str]) -> None:
            answer = client.get(path, params={k: v.encode("utf-8", "replace").decode() for k, v in query.items()})
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["param"] in query

        @settings(max_examples=80, deadline=None)
        @given(
            st.sampled_from(["pin", "unpin", "keep", "disk"]),
            st.text(
                st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?#%"), min_size=1, max_size=20
            ),
            st.recursive(
                st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            ),
        )
        def act(what: str, name: str, body: Any) -> None:
            answer = client.post(
                f"/parkd/conversations/{name}/{what}",
                content=json.dumps(body),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code in (400, 404, 405), answer.text

        ask()
        act()


CLOCK = {"pattern": r"It is \d\d:\d\d:\d\d", "replacement": "It is late", "name": "clock"}


async def post(server: Running, path: str, key: str = "", **body: Any) -> httpx.Response:
    return await server.client.post(path, json=body, headers={"x-api-key": key} if key else {})


async def test_a_rule_is_tried_on_what_was_sent_and_switched_on_from_there(tmp_path: Path) -> None:
    async with billed(tmp_path, config=ProxyConfig(shows_text=True)) as server:
        for clock in ("10:04:31", "10:05:02"):
            await say(server, asked("Hello?", f"It is {clock} now. {SYSTEM}"))
        (second, first) = (await told(server, "/parkd/turns"))["turns"]
        tried = await post(server, "/parkd/rules/try", rule=CLOCK)
        assert tried.status_code == 200, tried.text
        saved = tried.json()["by_request"]
        assert [each["request_id"] for each in saved] == [second["request_id"], first["request_id"]]
        assert saved[1]["saved_tokens"] == 0, "nothing was before it"
        assert saved[0]["saved_tokens"] == pytest.approx(second["needless_tokens"], abs=40)
        useless = (await post(server, "/parkd/rules/try", rule={"pattern": "nowhere"})).json()
        assert (useless["requests"], useless["saved_tokens"]) == (2, 0)
        proposed = (await told(server, "/parkd/bill"))["rules"][0]["rule"]
        assert (await post(server, "/parkd/rules/try", rule=proposed)).json()["saved_tokens"] > len(SYSTEM)

        added = await post(server, "/parkd/rules", rule=proposed)
        assert (added.status_code, added.json()["rules"]) == (200, 1)
        assert added.json()["line"].startswith("[[rule]]")
        await say(server, asked("Hello?", f"It is 10:06:00 now. {SYSTEM}"))
        await say(server, asked("Hello?", f"It is 10:07:00 now. {SYSTEM}"))
        last = (await told(server, "/parkd/turns", limit="1"))["turns"][0]
        assert last["reused_tokens"] == last["prompt_tokens"] - 1
        assert last["needless_tokens"] == 0


async def test_a_key_tries_a_rule_on_its_own_requests_and_only_an_operator_switches_one_on(tmp_path: Path) -> None:
    async with billed(tmp_path, config=KEYS) as server:
        for clock in ("10:04:31", "10:05:02"):
            await say(server, asked("Hello?", f"It is {clock} now. {SYSTEM}"), "k-anna")
        assert (await post(server, "/parkd/rules/try", "k-anna", rule=CLOCK)).json()["saved_tokens"] > 0
        assert (await post(server, "/parkd/rules/try", "k-ben", rule=CLOCK)).json()["requests"] == 0
        await say(server, asked("Else?", f"It is 10:05:02 now. {SYSTEM}"), "k-anna")
        useless = (await post(server, "/parkd/rules/try", "k-anna", rule={"pattern": "nowhere"})).json()
        assert (useless["requests"], useless["saved_tokens"]) == (3, 0), "what is equal anyway is not saved"
        refused = await post(server, "/parkd/rules", "k-anna", rule=CLOCK)
        assert (refused.status_code, "--operator-key" in refused.text) == (403, True)
        assert (await post(server, "/parkd/rules", "op", rule=CLOCK)).status_code == 200
        plain = await server.client.post("/parkd/rules", content="{}", headers={"x-api-key": "op"})
        assert plain.status_code == 403


async def test_a_server_without_keys_that_others_reach_takes_no_rules() -> None:
    async with running(FakeEngine(), config=ProxyConfig(host="0.0.0.0")) as server:
        refused = await post(server, "/parkd/rules", rule=CLOCK)
        assert (refused.status_code, "--operator-key" in refused.text) == (403, True)


@pytest.mark.parametrize(
    "rule",
    [
        None,
        "x",
        {},
        {"pattern": ""},
        {"pattern": "("},
        {"pattern": "a", "replacement": "\\9"},
        {"pattern": "a", "roles": ["anyone"]},
        {"pattern": "a", "more": 1},
        {"pattern": "a" * 2001},
        {"pattern": 5},
        {"pattern": "(?:(?:[ab]|c){200}){,200}"},
        {"pattern": "(?:(?:(?:a?){1000}){1000}){1000,}"},
    ],
)
async def test_what_is_no_rule_is_refused_by_its_field(rule: Any) -> None:
    async with running(FakeEngine()) as server:
        for path in ("/parkd/rules/try", "/parkd/rules"):
            refused = await post(server, path, rule=rule)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rule")


@pytest.mark.parametrize(
    ("pattern", "pieces"),
    [("abc", 3), (r"a\d[x)]{3}", 5), ("(ab){3}c", 7), ("(?:(a{2}b){3}){4}", 36), ("a{0}b{,2}c{3,}", 6), ("){5}(", 0)],
)
def test_pieces_are_counted_as_they_are_unrolled(pattern: str, pieces: int) -> None:
    assert unrolled(pattern) == pieces


async def test_a_pattern_may_count_as_long_as_it_is_compiled_at_once() -> None:
    async with running(FakeEngine()) as server:
        await say(server, asked("aaaa"))
        tried = await post(
            server, "/parkd/rules/try", rule={"pattern": r"(?:a{2}){2,100}b{0}\d{1,40}(\w{3}){4}", "roles": ["user"]}
        )
        assert tried.status_code == 200, tried.text


async def test_a_pattern_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parkd.identity.normalise.RULES_S", 0.2)
    async with running(FakeEngine()) as server:
        await say(server, asked("a" * 60 + "!"))
        refused = await post(server, "/parkd/rules/try", rule={"pattern": "(a|aa)+$", "roles": ["user"]})
        assert refused.status_code == 400
        assert "takes too long" in refused.text


async def test_there_are_so_many_rules_and_no_more() -> None:
    async with running(FakeEngine()) as server:
        for number in range(RULES_LIMIT):
            assert (await post(server, "/parkd/rules", rule={"pattern": f"x{number}"})).json()["rules"] == number + 1
        refused = await post(server, "/parkd/rules", rule=CLOCK)
        assert (refused.status_code, "the most" in refused.text) == (400, True)
