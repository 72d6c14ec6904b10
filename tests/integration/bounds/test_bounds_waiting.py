"""What streaming clients of each dialect see while their prompt is read: reports 35, 36, 38, 39."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import anyio
import pytest

from parkd.lane.reports import turn_log
from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, running, until

pytestmark = pytest.mark.anyio
TEXT = "Tell me a story. " * 60
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
    },
    "/v1/responses": {"input": [{"role": "user", "content": TEXT}], "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}
ALIVE = {"/v1/chat/completions": ": keep-alive", "/v1/responses": "response.in_progress", "/v1/messages": '"ping"'}


async def stream(server: Any, path: str, gate: Gate | None = None) -> tuple[str, list[str]]:
    """The cache header and the lines. The gate opens once two signs of life have come."""
    signs, lines = 0, []
    async with server.client.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
        header = response.headers["x-parkd-cache"]
        async for line in response.aiter_lines():
            lines.append(line)
            signs += line.startswith((":", "data:")) and ALIVE[path] in line
            if gate is not None and signs >= 3:
                gate.opened.set()
    return header, lines


def cached(path: str, lines: list[str]) -> tuple[int, int]:
    """Prompt tokens and cached ones by the last usage."""
    usages = []
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or event.get("response", {}).get("usage")
            usages += [usage] if usage else []
    usage = usages[-1]
    if path == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_waiting_client_is_kept_alive_in_its_dialect_and_told_the_truth_at_the_end(path: str) -> None:
    gate = Gate("chunk")
    config = ProxyConfig(keep_alive_s=0.02, first_byte_deadline_s=0.05)
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        # Another request holds the lane first, so that this one's start is not settled when its headers are due.
        other = {"messages": [{"role": "user", "content": "First. " * 40}], "max_tokens": 1}
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=other))
        await gate.wait_reached()
        header, lines = await stream(server, path, gate)
        assert header == "pending"
        assert not [line for line in lines if line.startswith("id:")]
        prompt_tokens, _ = cached(path, lines)
        assert prompt_tokens > len(TEXT)
        again, lines = await stream(server, path)
        assert again == "live"
        assert cached(path, lines) == (prompt_tokens, prompt_tokens - 1)


async def test_the_numbers_of_message_start_are_those_of_the_end() -> None:
    async with running(FakeEngine()) as server:
        for expected in (None, 1):
            _, lines = await stream(server, "/v1/messages")
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            first, last = (
                events[0]["message"]["usage"],
                next(e["usage"] for e in events if e["type"] == "message_delta"),
            )
            names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            assert [first[name] for name in names] == [last[name] for name in names]
            assert first["input_tokens"] > 0
            assert expected in (None, first["input_tokens"])


async def test_how_far_a_prompt_is_read_is_told_in_the_stream_in_slots_and_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use 19: minutes of reading, and nothing anywhere told of it."""
    monkeypatch.setattr(turn_log, "READING_LINE_S", 0.0)
    caplog.set_level(logging.INFO, logger="parkd.requests")
    gate, shown, slots = Gate("chunk", nth=3), [], []
    body = {**BODIES["/v1/chat/completions"], "stream": True, "return_progress": True}
    async with running(FakeEngine(hook=gate, batch_tokens=256)) as server:

        async def look() -> None:
            await gate.wait_reached()
            await until(lambda: len(shown) >= 2)
            slots.append((await server.client.get("/slots")).json()[0]["request"]["prompt_progress"])
            gate.opened.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        shown += [part for part in [json.loads(line[6:]).get("prompt_progress")] if part]
        quiet = await server.client.post("/v1/chat/completions", json={**body, "return_progress": False})
        raw = await server.client.post(
            "/v1/completions", json={"prompt": TEXT, "stream": True, "return_progress": True, "max_tokens": 2}
        )
    total = shown[0]["total"]
    assert [part["total"] for part in shown] == [total] * len(shown)
    assert [part["cache"] for part in shown] == [0] * len(shown)
    processed = [part["processed"] for part in shown]
    assert processed == sorted(set(processed))
    assert set(processed) <= {*range(0, total, 256), total}  # what is not read in time is replaced by what is newer
    assert processed[-1] == total
    assert slots[0]["processed"] in (256, 512)
    assert slots[0]["total"] == total
    assert "prompt_progress" not in quiet.text
    assert "prompt_progress" in raw.text
    lines = [record.getMessage() for record in caplog.records if " reading=" in record.getMessage()]
    head = f"key=- prompt={total + 1} reused=0"
    assert lines[0] == f"{head} reading=0/{total}"
    assert re.fullmatch(rf"{head} reading=256/{total} speed=\d+tok/s left=\d+s", lines[1])


async def test_a_long_reading_has_a_line_when_it_begins_and_a_short_one_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="parkd.requests")
    async with running(FakeEngine(context_tokens=8192)) as server:
        await server.chat([{"role": "user", "content": "Short."}])
        await server.chat([{"role": "user", "content": "x" * 3000}])
    said = [record.getMessage() for record in caplog.records]
    assert [" reading=" in line for line in said] == [False, True, False]
    assert re.fullmatch(r"key=- prompt=\d+ reused=\d+ reading=0/\d+", said[1])
