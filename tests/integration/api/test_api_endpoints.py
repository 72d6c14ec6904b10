"""The endpoints that agents and clients ask besides turns."""

from __future__ import annotations

import signal
from dataclasses import replace

import anyio
import pytest

from parkd.cli.compose import remembered_bytes
from parkd.config import load
from parkd.identity.output_memory import OutputMemory
from parkd.proxy.config import ProxyConfig
from parkd.proxy.server import Server
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.fakes.text import END_TOKEN_ID
from tests.integration.api.api_harness import Gate, Running, make_services, running

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello there"}]
KEYS = ProxyConfig(named_keys=(NamedKey("anna", "k1"), NamedKey("ben", "k2")))


async def test_models_in_the_shape_of_who_asks() -> None:
    async with running(FakeEngine(), config=ProxyConfig(alias="mine")) as server:
        openai = (await server.client.get("/v1/models")).json()
        assert openai["data"][0]["max_model_len"] == server.engine.info.context_tokens
        assert openai["object"] == "list"
        assert openai["data"][0]["id"] == "mine"
        assert isinstance(openai["data"][0]["created"], int)
        anthropic = {"anthropic-version": "2023-06-01"}
        listed = (await server.client.get("/v1/models", headers=anthropic)).json()
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("mine", "mine", False)
        entry = (await server.client.get("/v1/models/mine", headers=anthropic)).json()
        assert entry == listed["data"][0]
        assert entry["type"] == "model"
        assert (await server.client.get("/v1/models/other", headers=anthropic)).status_code == 404


@pytest.mark.parametrize("path", ["/", "/api/hello", "/health", "/v1/health"])
async def test_a_probe_is_answered_without_a_key(path: str) -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        probe = await server.client.head(path)
        assert (probe.status_code, probe.content) == (200, b"")


@pytest.mark.parametrize("path", ["/props", "/slots", "/v1/models", "/parkd/explain/x", "/metrics"])
async def test_what_tells_of_the_server_asks_for_a_key(path: str) -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        assert (await server.client.get(path)).status_code == 401


async def test_what_all_keys_do_together_is_shown_to_an_operator_only() -> None:
    """Found by use 5: with any key one could read from `/metrics` what the others do."""
    config = ProxyConfig(named_keys=(NamedKey("anna", "k1"),), api_keys=("k2",), operator_keys=("op",))
    async with running(FakeEngine(), config=config) as server:

        async def seen_by(key: str) -> int:
            return (await server.client.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code

        assert [await seen_by(key) for key in ("k1", "k2", "op", "none")] == [403, 403, 200, 401]
        refused = await server.client.get("/metrics", headers={"x-api-key": "k1"})
        assert "--operator-key" in refused.json()["error"]["message"]
        assert (await server.client.get("/v1/models", headers={"x-api-key": "op"})).status_code == 200
    async with running(FakeEngine()) as server:
        assert (await server.client.get("/metrics")).status_code == 200, "without keys there is one user"


async def test_props_and_tokens_are_the_engines() -> None:
    async with running(FakeEngine(context_tokens=512)) as server:
        props = (await server.client.get("/props")).json()
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["total_slots"] == 1
        text = "<|im_start|>user\nhé"
        plain = await server.client.post("/tokenize", json={"content": text})
        assert plain.json()["tokens"] == server.engine.tokenizer.encode(text)
        pieces = await server.client.post("/tokenize", json={"content": "ab", "with_pieces": True})
        assert pieces.json()["tokens"] == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
        letters = await server.client.post("/tokenize", json={"content": text, "parse_special": False})
        assert letters.json()["tokens"] == list(text.encode())


async def test_tokens_go_back_to_their_text() -> None:
    """Found by use 25: llama-server's `/detokenize` was a 404."""
    async with running(FakeEngine()) as server:
        text = "<|im_start|>user\n\u5abd \U0001f917"
        ids = (await server.client.post("/tokenize", json={"content": text})).json()["tokens"]
        back = await server.client.post("/detokenize", json={"tokens": ids})
        assert (back.status_code, back.json()) == (200, {"content": text})
        assert (await server.client.post("/detokenize", json={"tokens": []})).json() == {"content": ""}
        cut = list("\u5abd".encode())[:2]
        assert (await server.client.post("/detokenize", json={"tokens": cut})).json() == {"content": "\ufffd"}
        for wrong in ([-1], [True], ["a"], [server.engine.info.vocab_size], [1.5], "abc"):
            refused = await server.client.post("/detokenize", json={"tokens": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_add_special_opens_the_text_as_the_vocabulary_does() -> None:
    """Found by use 33: the field was passed over."""

    class Opening(FakeEngine):
        opening_ids = (END_TOKEN_ID,)

    async with running(Opening()) as server:
        for asked, opened in ((True, [END_TOKEN_ID]), (False, [])):
            answer = await server.client.post("/tokenize", json={"content": "ab", "add_special": asked})
            assert answer.json()["tokens"] == [*opened, 97, 98]


async def test_the_pieces_of_a_character_cut_in_two_are_bytes() -> None:
    """Found by use 32: each of them was a replacement mark, so that nobody could put the text together again."""
    async with running(FakeEngine()) as server:
        asked = {"content": "a\u5abd<|im_end|>", "with_pieces": True}
        pieces = (await server.client.post("/tokenize", json=asked)).json()["tokens"]
        assert [each["piece"] for each in pieces] == ["a", [0xE5], [0xAA], [0xBD], "<|im_end|>"]


async def test_the_applied_template_is_the_prompt_of_a_turn() -> None:
    async with running(FakeEngine()) as server:
        answer = await server.client.post("/apply-template", json={"messages": HELLO})
        assert server.engine.tokenizer.encode(answer.json()["prompt"]) == server.prompt_tokens(HELLO)
        assert (await server.client.post("/apply-template", json={"messages": []})).status_code == 400


async def slot(server: Running, key: str) -> dict[str, object]:
    document: dict[str, object] = (await server.client.get("/slots", headers={"x-api-key": key})).json()[0]
    return document


async def test_a_slot_shows_its_request_to_its_own_key_only() -> None:
    gate = Gate("token")
    async with running(FakeEngine(hook=gate), config=KEYS) as server, anyio.create_task_group() as tasks:
        body = {"messages": HELLO, "max_tokens": 2}
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body, headers={"x-api-key": "k1"}))
        await gate.wait_reached()
        mine, other = await slot(server, "k1"), await slot(server, "k2")
        gate.opened.set()
        assert mine["is_processing"] is True
        assert other["is_processing"] is False
        assert isinstance(mine["request"], dict)
        assert mine["request"]["state"] == "running"
        assert other["request"] is None
        await server.settled()
        parked = (await slot(server, "k1"))["parked"]
        assert isinstance(parked, list)
        assert len(parked) == 1
        assert (await slot(server, "k2"))["parked"] == []


async def test_found_by_attack_a_slot_tells_the_load_of_the_server_to_its_operator_alone() -> None:
    """`/health` hid from a key whether another key's request runs and how many wait; `/slots` told both."""
    gate = Gate("token")
    config = ProxyConfig(api_keys=("k1", "k2"), operator_keys=("op",))
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        body = {"messages": HELLO, "max_tokens": 2}
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body, headers={"x-api-key": "k1"}))
        await gate.wait_reached()
        told = {key: await slot(server, key) for key in ("k1", "k2", "op")}
        gate.opened.set()
        assert {key: each["is_processing"] for key, each in told.items()} == {"k1": True, "k2": False, "op": True}
        assert {key for key, each in told.items() if "waiting" in each} == {"op"}
        assert told["op"]["request"] is None, "what it is stays with its key"


async def test_found_by_use_memory_over_a_day_is_shown_with_its_ceilings() -> None:
    """Issue 22: nothing told what a server remembers outside the budgets, and how much that may become."""
    async with running(FakeEngine()) as server:
        for number in range(3):
            await server.chat([{"role": "user", "content": f"{number} " * 400}], prompt_cache_key=f"group {number}")
        await server.settled()
        page = (await server.client.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("parkd_"))
        for kind in ("requests", "histories", "groups"):
            held = float(lines[f'parkd_remembered_bytes{{kind="{kind}"}}'])
            assert 0 < held < float(lines[f'parkd_remembered_limit_bytes{{kind="{kind}"}}']), kind
        config = load({"prompt-memory-mib": "1", "answer-memory-mib": "2"}, {})
        answers = OutputMemory(config.cache.answer_bytes, [])
        told = remembered_bytes(config, server.identity, answers, None)
        assert told == {"prompts": (server.identity.memo_bytes, 1 << 20), "answers": (0, 2 << 20)}
        assert server.identity.memo_bytes > 0
        for field in ("read_s", "bytes_per_s", "disk_bytes_per_s", "doubt_s"):
            assert float(lines[f"parkd_cost_{field}"]) >= 0


async def test_health_tells_what_a_balancer_needs_and_nothing_of_other_keys() -> None:
    """Without a key, it told how many requests of all keys waited."""
    config = ProxyConfig(named_keys=(NamedKey("anna", "k-anna"),), operator_keys=("k-operator",))
    async with running(FakeEngine(), config=config) as server:
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "k-anna"}):
            health = await server.client.get("/health", headers=headers)
            assert (health.status_code, health.json()) == (200, {"status": "ok"}), headers
        health = await server.client.get("/health", headers={"x-api-key": "k-operator"})
        assert health.json() == {"status": "ok", "waiting": 0, "busy": False}


async def test_found_by_use_14_the_speed_of_memory_measured_at_start_is_shown() -> None:
    services, _ = make_services(FakeEngine())
    for measured, shown in ((3.0e9, 3.0e9), (None, 8.0e9)):
        page = Server(replace(services, ram_bytes_per_s=measured)).proxy.metrics.page().decode()
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("parkd_cost_bytes"))
        assert float(lines["parkd_cost_bytes_per_s"]) == shown


async def test_the_server_of_a_test_takes_no_signals_of_the_run() -> None:
    """A time limit of the run failed whichever test was running: its server was stopping."""
    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
    before = [signal.getsignal(kind) for kind in kinds]
    async with running(FakeEngine()):
        assert [signal.getsignal(kind) for kind in kinds] == before
