"""parkd before a llama-server without a model: conversations come and go, the server restarts, fails and lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest

from parkd.engine_adapter.llama_server.sampling import check_enforceable
from parkd.identity.units import common_prefix
from parkd.proxy.prompts import Prompts
from parkd.store.records import Parked
from parkd.types import TurnRequest
from tests.integration.api.api_harness import Messages, Running, body_of, until
from tests.integration.api.disk_harness import running_on
from tests.integration.llama.sidecar_kit import LIMIT, alone, before, check, mounted, opening, parked_in, turn_after
from tests.unit.llama_server.upstream_kit import (
    CHECKPOINT_TAIL,
    RECORDED,
    FakeLlama,
    FakeSlot,
    ok,
    reading,
    refusal,
    sse,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[FakeLlama]:
    with mounted(tmp_path) as upstream:
        yield upstream


def parked_of(server: Running, messages: Messages) -> Parked:
    """What is parked of a conversation."""
    assert server.store is not None
    prompt = server.identity.build(TurnRequest(messages=messages))
    found = [parked for parked, _ in server.store.candidates(prompt.key.digest, prompt.prefix_hashes)]
    return max(found, key=lambda parked: common_prefix(parked.units, prompt.units))


async def test_a_conversation_that_left_is_restored(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        again = turn_after(a, first.text, "And more?")
        second = await check(server, again)
    known = len(server.prompt_tokens(a)) + len(first.text) - 1
    assert second.cache == "restored-disk"  # a file, though its conversation is known in memory
    assert second.reused == known
    assert upstream.bodies[-1]["cache_prompt"] is True


async def test_that_the_budget_took_a_conversation_is_told_so(upstream: FakeLlama) -> None:
    upstream.row_bytes = 1024
    async with running_on(upstream.slot_dir / "parkd", upstream.engine(silence_s=5.0), disk_bytes=3 << 20) as server:
        a = opening("a", 1500)
        first = await check(server, a)
        await check(server, opening("b", 1500))
        answer = await check(server, turn_after(a, first.text, "And more?"))
    assert answer.reused < 100
    assert answer.headers["x-parkd-why"].startswith("evicted"), answer.headers["x-parkd-why"]
    assert "its room on disk was needed for another conversation" in answer.headers["x-parkd-why"]


async def test_that_the_budget_has_no_room_for_a_file_and_its_manifest_is_told_so(upstream: FakeLlama) -> None:
    async with running_on(upstream.slot_dir / "parkd", upstream.engine(silence_s=5.0), disk_bytes=28 * 1024) as server:
        a = opening("a", 1500)
        first = await check(server, a)
        await check(server, opening("b", 300))
        answer = await check(server, turn_after(a, first.text, "And more?"))
    assert answer.headers["x-parkd-why"].startswith("evicted"), answer.headers["x-parkd-why"]
    assert "the budget on disk has no room for it" in answer.headers["x-parkd-why"]


async def test_conversations_outlive_a_restart_of_both(upstream: FakeLlama) -> None:
    a = opening("a")
    async with before(upstream) as server:
        first = await check(server, a)
        await check(server, opening("b"))
        upstream.restart()
        server.engine.watch.doubt()
        second = await check(server, turn_after(a, first.text, "And more?"))
        assert second.reused >= len(server.prompt_tokens(a))
    upstream.restart()
    async with before(upstream) as server:
        third = await check(server, turn_after(a, first.text, "And less?"))
        assert third.cache == "restored-disk"
        assert third.reused >= len(server.prompt_tokens(a))


async def test_with_two_slots_a_switch_moves_no_file(upstream: FakeLlama) -> None:
    upstream.slots = [FakeSlot() for _ in range(2)]
    async with before(upstream) as server:
        a, b = opening("a", system="First."), opening("b", system="Second one.")
        said = {name: (await check(server, messages)).text for name, messages in (("a", a), ("b", b))}
        upstream.calls.clear()
        for messages, name in ((a, "a"), (b, "b"), (a, "a")):
            answer = await check(server, turn_after(messages, said[name], f"Question {len(upstream.calls)}?"))
            assert answer.reused >= len(server.prompt_tokens(messages)) - 1
    assert "restore" not in upstream.calls
    assert "save" in upstream.calls


async def test_a_model_with_recurrent_state_resumes_at_the_end_of_what_was_saved(upstream: FakeLlama) -> None:
    upstream.rewinds = False
    async with before(upstream) as server:
        assert server.engine.info.layout.fixed_bytes == 1
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        answer = await check(server, turn_after(a, first.text, "And more?"))
        assert answer.reused == len(server.prompt_tokens(a)) + len(first.text) - 1
        await check(server, opening("b"))
        edited = [a[0], {"role": "user", "content": str(a[1]["content"]) + " edited"}]
        read = await check(server, edited)
        assert read.reused == 0
        assert "slot files hold no checkpoints" in read.headers["x-parkd-why"]


def files_in(folder: Path) -> list[Path]:
    """Slot files, those that are under way and those that are parked; the largest last."""
    found = [*folder.glob("parkd-*.slot"), *(folder / "parkd").glob("*.extent")]
    return sorted(found, key=lambda path: path.stat().st_size)


async def grown(server: Running, messages: Messages, turns: int) -> tuple[Messages, list[int]]:
    """A conversation after some turns, each after another one was in the slot; and what was reused in each."""
    reused = []
    for number in range(turns):
        answer = await check(server, messages)
        reused.append(answer.reused)
        messages = turn_after(messages, answer.text, f"Question {number}? " + "Read this too. " * 20)
        await check(server, opening("b"))
    return messages, reused


@pytest.mark.parametrize("lags", [False, True], ids=["recurrent", "windows"])
async def test_a_grown_conversation_is_parked_with_the_checkpoints_that_its_server_appends(
    upstream: FakeLlama, *, lags: bool
) -> None:
    """Reserved was what tiny files had measured: 64 KiB beside the rows, of which each checkpoint takes 8,000 here."""
    upstream.rewinds, upstream.takes_checkpoints, upstream.lags = False, True, lags
    async with before(upstream) as server:
        messages, reused = await grown(server, opening("a"), 8)
        length = len(server.prompt_tokens(messages[:-2]))
        assert reused[-1] >= len(server.prompt_tokens(messages[:-4])) - CHECKPOINT_TAIL
        assert sorted(reused) == reused
        files = files_in(upstream.slot_dir)
        assert files[-1].stat().st_size > 64 * 1024 + 16 * length
        assert server.store is not None
        taken = server.store.disk_stats().bytes_in_use
        assert taken >= sum(path.stat().st_size for path in files)
    assert not list(upstream.slot_dir.glob("parkd-*.slot"))


@pytest.mark.parametrize("lags", [False, True], ids=["recurrent", "windows"])
async def test_a_parked_conversation_is_resumed_inside_at_what_the_server_says(
    upstream: FakeLlama, *, lags: bool
) -> None:
    upstream.rewinds, upstream.takes_checkpoints, upstream.lags = False, True, lags
    async with before(upstream) as server:
        assert server.engine.info.layout.fixed_bytes == 0
        messages, _ = await grown(server, opening("a"), 3)
        whole = parked_of(server, messages)
        edited = [*messages[:-3], {"role": "user", "content": "Something else."}]
        answer = await check(server, edited)
        second = len(server.prompt_tokens(messages[:-4]))
        assert second - CHECKPOINT_TAIL <= answer.reused <= second + LIMIT
        assert answer.headers["x-parkd-why"].startswith("no exact state between tokens")
        assert server.store is not None
        assert server.store.get(whole.id) is not None  # its end is of use to the one that was not edited
        await check(server, opening("b"))
        back = await check(server, messages)
        assert back.reused > answer.reused


async def test_a_rewind_that_a_live_slot_cannot_do_is_no_damage(upstream: FakeLlama) -> None:
    upstream.rewinds, upstream.takes_checkpoints = False, True
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        again = turn_after(a, first.text, "And more?")
        await check(server, again)
        answer = await check(server, [*again[:-1], {"role": "user", "content": "And less?"}])
        assert 0 < answer.reused < len(server.prompt_tokens(again)) - 4
        assert "still held" not in answer.headers["x-parkd-why"]


async def test_a_file_of_no_use_at_its_own_end_goes(upstream: FakeLlama) -> None:
    upstream.rewinds, upstream.takes_checkpoints = False, True
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        parked = parked_of(server, a)
        restore = upstream.act_on_slot

        def forgetful(request: httpx.Request) -> httpx.Response:
            answer = restore(0, "restore", json.loads(request.content))
            upstream.slots[0] = FakeSlot()
            return answer

        upstream.answers["restore"] = forgetful
        answer = await check(server, turn_after(a, first.text, "And more?"))
        assert (answer.cache, answer.reused) == ("cold", 0)
        assert f"still held 0 of the {len(parked.units)}" in answer.headers["x-parkd-why"]
        assert server.store is not None
        assert server.store.get(parked.id) is None


async def test_sizes_are_learned_again_when_the_server_comes_back_with_another_kv_type(
    upstream: FakeLlama, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.knows_its_model()
    async with before(upstream) as server:
        a = opening("a", 3000)
        first = await check(server, a)
        upstream.restart()
        upstream.row_bytes *= 4
        server.engine.watch.doubt()
        again = turn_after(a, first.text, "And more?")
        refused = await check(server, again)
        assert (refused.cache, refused.reused) == ("cold", 0)
        assert "another KV type" in refused.headers["x-parkd-why"]
        await check(server, opening("b"))
        back = await check(server, again)
        assert back.reused == len(server.prompt_tokens(again)) - 1
    assert "were expected" not in caplog.text


async def test_that_a_server_has_another_number_of_slots_is_told_as_the_reason(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        upstream.slots = [FakeSlot() for _ in range(3)]
        upstream.restart()
        server.engine.watch.doubt()
        refused = await check(server, turn_after(a, first.text, "And more?"))
        assert (refused.cache, refused.reused) == ("cold", 0)
        assert "-np 1" in refused.headers["x-parkd-why"]
        assert "it now has -np 3" in refused.headers["x-parkd-why"]


async def test_a_file_for_which_there_is_no_room_is_removed(tmp_path: Path, upstream: FakeLlama) -> None:
    upstream.rewinds, upstream.takes_checkpoints = False, True
    async with running_on(tmp_path / "parkd", upstream.engine(silence_s=5.0), disk_bytes=40 * 1024) as server:
        await check(server, opening("a", 3000))
        assert parked_in(server) == 0
        assert not files_in(tmp_path)


async def test_what_a_live_recurrent_state_cannot_give_is_told_as_it_is(upstream: FakeLlama) -> None:
    upstream.rewinds = False
    async with before(upstream) as server:
        a = opening("a")
        await check(server, a)
        answer = await check(server, [a[0], {"role": "user", "content": str(a[1]["content"]) + " edited"}])
        assert (answer.cache, answer.reused) == ("cold", 0)


async def test_a_schema_is_the_servers_to_enforce_and_a_forced_call_is_refused(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        services = server.server.proxy.services
        with_masks = replace(services, build_mask=lambda request, *_: check_enforceable(request, thinks=False))
        server.server.proxy.prompts = Prompts(with_masks)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await server.chat(opening("a", 50), response_format=asked)
        assert upstream.bodies[-1]["json_schema"] == schema
        await server.chat(opening("a", 50), response_format={"type": "json_object"})
        assert "json_schema" not in upstream.bodies[-1]
        assert 'pair   ::= string ": " value' in upstream.bodies[-1]["grammar"]
        upstream.answers["/completion"] = lambda _: refusal(400, "failed to parse grammar")
        refused = await server.client.post(
            "/v1/chat/completions", json=body_of(opening("a", 60), response_format=asked)
        )
        assert refused.status_code == 400
        assert "parse grammar" in refused.json()["error"]["message"]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        forced = await server.client.post(
            "/v1/chat/completions", json=body_of(opening("a", 60), tools=tools, tool_choice="required")
        )
        assert forced.status_code == 400
        assert forced.json()["error"]["param"] == "tool_choice"
        upstream.answers.pop("/completion")
        for fields, grammar in (
            ({"grammar": 'root ::= "a" | "b"'}, 'root ::= "a" | "b"'),
            ({"guided_choice": ["yes", 'a "no"\n\\']}, r'root ::= "yes" | "a \"no\"\x0A\\"'),
        ):
            await server.chat(opening("a", 50), **fields)
            assert upstream.bodies[-1]["grammar"] == grammar
        for fields, named in (({"regex": "a+"}, "regex"), ({"min_tokens": 3}, "min_tokens")):
            unfit = await server.client.post("/v1/chat/completions", json=body_of(opening("a", 60), **fields))
            assert (unfit.status_code, unfit.json()["error"]["param"]) == (400, named)
        await server.chat(opening("a", 50), ignore_eos=True, logit_bias=[[7, False], [8, 2]])
        assert upstream.bodies[-1]["ignore_eos"] is True
        assert upstream.bodies[-1]["logit_bias"] == [[7, False], [8, 2.0]]
        upstream.answers["/completion"] = lambda _: refusal(400, "failed to parse grammar")
        bad = await server.client.post("/v1/chat/completions", json=body_of(opening("a", 60), grammar="?"))
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "grammar")
        scored = await server.client.post("/v1/chat/completions", json=body_of(opening("a", 60), logprobs=True))
        assert (scored.status_code, scored.json()["error"]["param"]) == (400, "logprobs")


async def test_report_1_a_branch_does_not_consume_its_parent(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        branch = [a[0], {"role": "user", "content": str(a[1]["content"])[:-40] + " another end"}]
        assert (await check(server, branch)).reused > 500
        await check(server, opening("b"))
        back = await check(server, turn_after(a, first.text, "Still there?"))
        assert back.reused >= len(server.prompt_tokens(a))


async def test_report_2_a_short_prompt_is_reused_to_its_last_token(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        shared = "s" * 150
        a, b = ([{"role": "user", "content": shared + tail * 48}] for tail in ("x", "y"))
        for _ in range(2):
            for messages in (a, b):
                answer = await check(server, messages)
        for messages in (a, b):
            answer = await check(server, messages)
            assert answer.reused == len(server.prompt_tokens(messages)) - 1


async def test_report_3_an_empty_slot_does_not_hide_what_is_parked(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        upstream.restart()
        server.engine.watch.doubt()
        assert not upstream.slots[0].ids
        answer = await check(server, turn_after(a, first.text, "And?"))
        assert answer.reused >= len(server.prompt_tokens(a))


async def test_report_4_there_may_be_more_agents_than_slots(upstream: FakeLlama) -> None:
    upstream.slots = [FakeSlot() for _ in range(2)]
    async with before(upstream) as server:
        agents = [opening(name, 300) for name in "abcde"]
        said = [(await check(server, messages)).text for messages in agents]
        for messages, text in zip(agents, said, strict=True):
            answer = await check(server, turn_after(messages, text, "Next."))
            assert answer.reused >= len(server.prompt_tokens(messages)) - 1


async def test_report_11_a_damaged_file_is_read_again_and_answers_stay_right(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))
        for path in (upstream.slot_dir / "parkd").glob("*.extent"):
            data = bytearray(path.read_bytes())
            data[-9] ^= 0x20
            path.write_bytes(data)
        again = turn_after(a, first.text, "And?")
        answer = await check(server, again)
        assert answer.reused < 60
        assert "checksum" in answer.headers["x-parkd-why"]
        assert (await check(server, again)).reused == len(server.prompt_tokens(again)) - 1


@pytest.mark.parametrize("told", [0, 20])
async def test_report_15_a_restore_that_says_fewer_is_a_miss(upstream: FakeLlama, told: int) -> None:
    async with before(upstream) as server:
        a = opening("a")
        first = await check(server, a)
        await check(server, opening("b"))

        def lie(request: httpx.Request) -> httpx.Response:
            size = (upstream.slot_dir / json.loads(request.content)["filename"]).stat().st_size
            return ok({"id_slot": 0, "n_restored": told, "n_read": size})

        upstream.answers["restore"] = lie
        answer = await check(server, turn_after(a, first.text, "And?"))
        assert (answer.cache, answer.reused) == ("cold", 0)
        assert f"restored {told} tokens" in answer.headers["x-parkd-why"]


async def test_report_16_the_truth_is_told_and_a_bad_entry_goes(upstream: FakeLlama) -> None:
    upstream.knows_its_model()
    async with before(upstream) as server:
        a = opening("a")
        await check(server, a)
        await check(server, opening("b"))
        restore = upstream.act_on_slot

        def forgetful(request: httpx.Request) -> httpx.Response:
            answer = restore(0, "restore", json.loads(request.content))
            upstream.slots[0].ids = upstream.slots[0].ids[:17]
            return answer

        upstream.answers["restore"] = forgetful
        # A branch, which does not supersede what it came from: nothing but its being bad takes the entry away.
        branch = [a[0], {"role": "user", "content": str(a[1]["content"])[:-40] + " another end"}]
        parked = parked_of(server, a)
        answer = await check(server, branch)
        assert answer.reused == 17
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 17
        assert "still held 17" in answer.headers["x-parkd-why"]
        assert server.store.get(parked.id) is None


async def test_report_27_what_was_read_before_a_disconnect_is_kept(upstream: FakeLlama) -> None:
    upstream.batch = 32
    gate, marks = threading.Event(), list[int]()
    async with before(upstream) as server:
        a = opening("a", 1500)

        def slow(events: Iterator[bytes]) -> Iterator[bytes]:
            for number, event in enumerate(events):
                if number == 20:
                    marks.append(number)
                    gate.wait(10)
                yield event

        upstream.cut = slow
        async with anyio.create_task_group() as tasks:

            async def leaving() -> None:
                await server.client.post("/v1/chat/completions", json=body_of(a, LIMIT))

            tasks.start_soon(leaving)
            await until(lambda: bool(marks))
            tasks.cancel_scope.cancel()
        upstream.cut = lambda events: events
        lane = server.server.proxy.lane
        await until(lambda: lane.running is None or lane.running.channel.cancel.is_set())
        gate.set()
        await server.settled()
        answer = await check(server, a)
        assert answer.reused >= 19 * 32


async def test_a_server_that_now_has_another_model_ends_parkd(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        await check(server, opening("a", 100))
        upstream.restart()
        upstream.model_path = "/models/other.gguf"
        server.engine.watch.doubt()
        failed = await server.client.post("/v1/chat/completions", json=body_of(opening("b", 100), LIMIT))
        assert failed.status_code == 500
        assert "another model" in failed.json()["error"]["message"]
        await until(lambda: server.server.should_exit)


async def test_a_prompt_longer_than_the_context_is_refused_in_the_dialects_way(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        failed = await server.client.post("/v1/chat/completions", json=body_of(opening("a", 6000), LIMIT))
        assert failed.status_code == 400
        assert failed.json()["error"]["code"] == "context_length_exceeded"


async def test_keep_alives_come_while_the_server_reads(upstream: FakeLlama) -> None:
    """Reading is told as progress, which keeps a waiting client alive."""
    async with before(upstream) as server:
        upstream.batch = 64
        answer = await server.stream(opening("a", 900), max_tokens=LIMIT)
        assert answer.text == alone(server, opening("a", 900))
        assert answer.usage["prompt_tokens"] > 900


def test_the_kit_speaks_as_the_recorded_server_does() -> None:
    recorded = json.loads(RECORDED.read_text())
    lines = [line for line in recorded["completion"]["text"].splitlines() if line.startswith("data: ")]
    first = json.loads(lines[0][6:])
    assert set(json.loads(sse(reading(1, 0, 0))[6:])) <= set(first)
