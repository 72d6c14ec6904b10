"""Half a character in a client's history does not make its conversation unusable. Found by use 11."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import running

pytestmark = pytest.mark.anyio

ALONE = r"ab\ud83d"
MARK = "@@"
AS_SENT = (ALONE, r"ab\ude00", "ab\ud83d")
"""An escape of either half, and the half itself as three bytes."""


def bodies(text: str) -> dict[str, str]:
    """Path -> a body in which every field that may hold text holds this one, which is JSON without its quotes."""
    schema = {"type": "object", "properties": {MARK: {"enum": [MARK]}}}
    function = {"name": f"t{MARK}", "description": MARK}
    called = {"name": f"f{MARK}", "arguments": f'{{"{MARK}": "{MARK}"}}'}
    call = {"id": f"c{MARK}", "type": "function", "function": called}
    chat = {
        "messages": [
            {"role": "system", "content": MARK},
            {"role": "user", "content": [{"type": "text", "text": MARK}]},
            {"role": "assistant", "content": MARK, "reasoning_content": MARK, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{MARK}", "content": MARK},
        ],
        "tools": [{"type": "function", "function": {**function, "parameters": schema}}],
        **dict.fromkeys(("user", "stop", "cache_salt", "model"), MARK),
    }
    used = {"type": "tool_use", "id": "c", "name": "t", "input": {MARK: MARK}}
    anthropic = {
        "system": MARK,
        "messages": [
            {"role": "user", "content": MARK},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": MARK, "signature": MARK}, used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": MARK}]},
        ],
        "tools": [{**function, "input_schema": schema}],
    }
    items = [
        {"role": "user", "content": MARK},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": f'{{"q": "{MARK}"}}'},
        {"type": "function_call_output", "call_id": "c", "output": MARK},
    ]
    documents = {
        "/v1/chat/completions": {**chat, "max_tokens": 4},
        "/v1/responses": {"instructions": MARK, "input": items, "max_output_tokens": 4},
        "/v1/completions": {"prompt": MARK, "max_tokens": 4},
        "/v1/messages": {**anthropic, "max_tokens": 4},
        "/v1/messages/count_tokens": anthropic,
        "/tokenize": {"content": MARK, "with_pieces": True},
        "/apply-template": chat,
    }
    return {path: json.dumps(document).replace(MARK, text) for path, document in documents.items()}


@pytest.mark.parametrize("text", AS_SENT)
async def test_half_a_character_is_the_replacement_character_everywhere(text: str) -> None:
    """Found by use 11: each was a 400 for ever, since clients cannot repair their history."""
    answers: dict[str, list[Any]] = {}
    async with running(FakeEngine()) as server:
        for sent in (text, r"ab\ufffd"):
            for path, body in bodies(sent).items():
                content = body.encode("utf-8", "surrogatepass")
                answer = await server.client.post(path, content=content, headers={"x-parkd-cache-mode": "off"})
                assert answer.status_code == 200, (path, answer.text)
                answers.setdefault(path, []).append(told(answer.json()))
    for path, (one, other) in answers.items():
        assert one == other, path
    prompt = answers["/apply-template"][0]["prompt"]
    assert prompt.count("\ufffd") + prompt.count(r"\ufffd") == 12


def told(document: dict[str, Any]) -> dict[str, Any]:
    """What does not change from one request to the next."""
    fields = ("prompt", "tokens", "input_tokens", "usage", "choices", "content")
    return {name: document[name] for name in fields if name in document}


async def test_pairs_and_written_backslashes_stay() -> None:
    kept = r"pair \ud83d\ude00, a backslash before it \\ud83d, both \\\ud83d\ude00 and alone \\\ud83d"
    async with running(FakeEngine()) as server:
        answer = await server.client.post("/apply-template", content=bodies(kept)["/apply-template"])
        assert answer.status_code == 200, answer.text
        shown = json.loads(f'"{kept[:-6]}"') + "\ufffd"
        assert f"<|im_start|>system\n{shown}<|im_end|>" in answer.json()["prompt"]


@pytest.mark.parametrize("body", [b'{"a": "\xff"}', b'{"a": "\\ud83d', b'{"a": \\ud83d}', b"\xed\xa0"])
async def test_other_faults_of_json_are_refused_as_before(body: bytes) -> None:
    async with running(FakeEngine()) as server:
        answer = await server.client.post("/tokenize", content=body)
        assert answer.status_code == 400
        assert "not valid JSON" in answer.text
