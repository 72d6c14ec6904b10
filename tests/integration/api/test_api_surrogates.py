"""Half a character in a client's history does not make its conversation unusable. Found by use 11."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import running

pytestmark = pytest.mark.anyio

ALONE = r"ab\ud83d"
AS_SENT = (ALONE, r"ab\ude00", "ab\ud83d")
"""An escape of either half, and the half itself as three bytes."""


def bodies(text: str) -> dict[str, str]:
    """Path -> a body in which every field that may hold text holds this one, which is JSON without its quotes."""
    call = '{"id": "c%s", "type": "function", "function": {"name": "f%s", "arguments": "{\\"q%s\\": \\"%s\\"}"}}'
    tool = '{"name": "t%s", "description": "%s", "%s": {"type": "object", "properties": {"%s": {"enum": ["%s"]}}}}'
    names = {"chat": "parameters", "anthropic": "input_schema"}
    function = {kind: tool % (text, text, name, text, text) for kind, name in names.items()}
    chat = (
        '"messages": [{"role": "system", "content": "%s"}, {"role": "user", "content": [{"type": "text", "text": "%s"}]}, '
        '{"role": "assistant", "content": "%s", "reasoning_content": "%s", "tool_calls": [%s]}, '
        '{"role": "tool", "tool_call_id": "c%s", "content": "%s"}], "tools": [{"type": "function", "function": %s}], '
        '"stop": ["%s"], "user": "%s", "cache_salt": "%s", "model": "%s"'
    ) % (*[text] * 4, call % (*[text] * 3, text), *[text] * 2, function["chat"], *[text] * 4)
    anthropic = (
        '"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": [{"type": "thinking", '
        '"thinking": "%s", "signature": "%s"}, {"type": "tool_use", "id": "c", "name": "t", "input": {"%s": "%s"}}]}, '
        '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "%s"}]}], '
        '"system": "%s", "tools": [%s]'
    ) % (*[text] * 7, function["anthropic"])
    responses = (
        '"instructions": "%s", "input": [{"role": "user", "content": "%s"}, {"type": "function_call", "call_id": "c", '
        '"name": "f", "arguments": "{\\"q\\": \\"%s\\"}"}, {"type": "function_call_output", "call_id": "c", '
        '"output": "%s"}], "tools": []'
    ) % ((text,) * 4)
    return {
        "/v1/chat/completions": f'{{{chat}, "max_tokens": 4}}',
        "/v1/responses": f'{{{responses}, "max_output_tokens": 4}}',
        "/v1/completions": f'{{"prompt": "{text}", "max_tokens": 4}}',
        "/v1/messages": f'{{{anthropic}, "max_tokens": 4}}',
        "/v1/messages/count_tokens": f"{{{anthropic}}}",
        "/tokenize": f'{{"content": "{text}", "with_pieces": true}}',
        "/apply-template": f"{{{chat}}}",
    }


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
    assert (
        answers["/apply-template"][0]["prompt"].count("\ufffd")
        + answers["/apply-template"][0]["prompt"].count(r"\ufffd")
        == 12
    )


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


@pytest.mark.parametrize(
    "body", [b'{"content": "\xff"}', b'{"content": "\\ud83d', b'{"content": \\ud83d}', b"\xed\xa0"]
)
async def test_other_faults_of_json_are_refused_as_before(body: bytes) -> None:
    async with running(FakeEngine()) as server:
        answer = await server.client.post("/tokenize", content=body)
        assert answer.status_code == 400
        assert "not valid JSON" in answer.text
