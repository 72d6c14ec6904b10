"""parkd before a real llama-server (the one inside `xllamacpp`), both as processes of their own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.chat import Answer, ask
from benchmarks.servers import Server, demo_model, free_port, sidecar_server, upstream_server

pytest.importorskip("xllamacpp", reason="pip install '.[bench]'")
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT_TOKENS = 1024
Messages = list[dict[str, str]]


@pytest.fixture(autouse=True)
def needs_the_demo_model() -> None:
    try:
        demo_model()
    except SystemExit:
        pytest.skip("the demo model is not installed")


def opening(name: str) -> Messages:
    return [{"role": "user", "content": " ".join(f"{name} {number}" for number in range(30))}]


def after(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def say(server: Server, messages: Messages) -> Answer:
    answer = ask(server.base_url, messages, output_tokens=6)
    time.sleep(1.0)  # parking behind the reply
    return answer


def test_a_conversation_outlives_a_switch_and_a_restart_of_the_server(tmp_path: Path) -> None:
    a, b, port = opening("alpha"), opening("beta"), free_port()
    with upstream_server(tmp_path, context_tokens=CONTEXT_TOKENS, port=port) as upstream:
        never_left = [ask(upstream.base_url, a, output_tokens=6).text]
        for question in ("And?", "So?"):
            never_left.append(ask(upstream.base_url, after(a, never_left[0], question), output_tokens=6).text)
    with ExitStack() as stack:
        with upstream_server(tmp_path, context_tokens=CONTEXT_TOKENS, port=port) as upstream:
            parkd = stack.enter_context(sidecar_server(upstream.base_url, tmp_path))
            first = say(parkd, a)
            say(parkd, b)
            second = say(parkd, after(a, first.text, "And?"))
        with upstream_server(tmp_path, context_tokens=CONTEXT_TOKENS, port=port):
            third = say(parkd, after(a, first.text, "So?"))
    assert [first.text, second.text, third.text] == never_left
    assert second.cache.startswith("restored")
    assert third.cache.startswith("restored")
    for answer in (second, third):
        assert answer.reused_tokens >= first.prompt_tokens
    assert not list(tmp_path.glob("parkd-*.slot"))
