"""parkd before a llama-server whose template it renders itself, proved beside the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parkd.errors import UpstreamFailed
from parkd.types import TurnRequest
from tests.integration.api.api_harness import body_of
from tests.integration.llama.sidecar_kit import before, mounted
from tests.unit.llama_server.test_upstream_template import PLAIN
from tests.unit.llama_server.upstream_kit import FakeLlama, expected_answer, ok

pytestmark = pytest.mark.anyio

LIMIT = 8


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[FakeLlama]:
    with mounted(tmp_path) as upstream:
        upstream.template = PLAIN
        yield upstream


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_prompt_rendered_here_is_answered_as_the_server_would(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        for text in ("the first", "the second", "the third"):
            answer = await server.chat(said(text), max_tokens=LIMIT)
            rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            ids = upstream.tokenizer.encode(rendered)
            assert upstream.bodies[-1]["prompt"] == ids
            assert answer.text == expected_answer(ids, LIMIT)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_the_server_writes_otherwise_is_not_answered(upstream: FakeLlama, stream: bool) -> None:
    async with before(upstream) as server:
        await server.chat(said("the first"), max_tokens=LIMIT)
        other = "<|im_start|>user\nnot this<|im_end|>\n<|im_start|>assistant\n"
        upstream.answers["/apply-template"] = lambda _: ok({"prompt": other})
        body = {**body_of(said("the second"), LIMIT), "stream": stream}
        failed = await server.client.post("/v1/chat/completions", json=body)
        assert failed.status_code == 502, failed.text
        assert "Send the request again" in failed.json()["error"]["message"]
        await server.settled()
        again = await server.chat(said("the second"), max_tokens=LIMIT)
        assert again.text == expected_answer(upstream.tokenizer.encode(other), LIMIT)


async def test_tokens_are_counted_of_proved_prompts_alone(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        await server.chat(said("the first"), max_tokens=LIMIT)
        upstream.answers["/apply-template"] = lambda _: ok({"prompt": "x"})
        body = {"model": "any", "messages": said("the second")}
        failed = await server.client.post("/v1/messages/count_tokens", json=body)
        assert failed.status_code == 502, failed.text
        counted = await server.client.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": 1}


async def test_a_prompt_is_shown_once_it_is_proved(upstream: FakeLlama) -> None:
    async with before(upstream) as server:
        await server.chat(said("the first"), max_tokens=LIMIT)
        upstream.answers["/apply-template"] = lambda _: ok({"prompt": "x"})
        request = TurnRequest(messages=said("the second"))
        with pytest.raises(UpstreamFailed):
            server.identity.render(request)
        assert server.identity.render(request) == "x"


async def test_what_is_remembered_of_a_request_holds_no_text(upstream: FakeLlama) -> None:
    """A proof holds the messages that it is of, and requests are remembered by the hundreds."""
    async with before(upstream) as server:
        for text in ("the first", "the second"):
            answer = await server.client.post("/v1/chat/completions", json=body_of(said(text), LIMIT))
            remembered = server.server.proxy.requests.get(answer.headers["x-request-id"], "")
            assert remembered is not None
            assert remembered.prompt.proof is None
