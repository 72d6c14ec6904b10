"""parkd before a real llama-server (the one inside `xllamacpp`), both as processes of their own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chat import Answer, ask
from benchmarks.servers import Server, demo_model, free_port, sidecar_server, upstream_server
from tests.integration.llama import tiny_gguf

pytest.importorskip("xllamacpp", reason="pip install '.[bench]'")
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT_TOKENS = 1024
SERVERS_TAIL = 8
"""At least the tokens between the end of a prompt and the last checkpoint, where a model with windows goes on after a
restore."""
PARKING_S = 60.0
"""Longest wait for what is parked behind a reply."""
Messages = list[dict[str, str]]


TINY = {"hybrid": tiny_gguf.write_tiny_hybrid, "windows": tiny_gguf.write_tiny_sliding}


@pytest.fixture(params=["full attention", *TINY])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in TINY:
        path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
        TINY[request.param](path)
        return path
    try:
        return demo_model()
    except SystemExit:
        pytest.skip("the demo model is not installed")


def opening(name: str) -> Messages:
    return [{"role": "user", "content": " ".join(f"{name} {number}" for number in range(30))}]


def after(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def say(server: Server, messages: Messages) -> Answer:
    return ask(server.base_url, messages, output_tokens=6)


def all_written(parkd: Server, answers: int) -> None:
    """Waits until what is parked behind each of so many answers has its manifest, which a busy machine delays."""
    until_s = time.monotonic() + PARKING_S
    while parkd.metrics()["parkd_disk_writes_total"] < answers:
        assert time.monotonic() < until_s, "not all is parked"
        time.sleep(0.1)


def test_a_conversation_outlives_a_switch_and_a_restart_of_the_server(tmp_path: Path, model: Path) -> None:
    a, b = opening("alpha"), opening("beta")
    settings: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "port": free_port(), "model": model}
    with upstream_server(tmp_path, **settings) as upstream:
        never_left = [ask(upstream.base_url, a, output_tokens=6).text]
        for question in ("And?", "So?"):
            never_left.append(ask(upstream.base_url, after(a, never_left[0], question), output_tokens=6).text)
    with ExitStack() as stack:
        with upstream_server(tmp_path, **settings) as upstream:
            parkd = stack.enter_context(sidecar_server(upstream.base_url, tmp_path))
            first = say(parkd, a)
            say(parkd, b)
            second = say(parkd, after(a, first.text, "And?"))
            all_written(parkd, answers=3)
        with upstream_server(tmp_path, **settings):
            third = say(parkd, after(a, first.text, "So?"))
    assert [first.text, second.text, third.text] == never_left
    assert second.cache.startswith("restored")
    assert third.cache.startswith("restored")
    for answer in (second, third):
        assert answer.reused_tokens >= first.prompt_tokens - (SERVERS_TAIL if model.stem == "windows" else 0)
    assert not list(tmp_path.glob("parkd-*.slot"))


@pytest.mark.parametrize("model", ["full attention"], indirect=True)  # a hybrid's file is of use at its end alone
def test_agents_branches_and_damage_on_a_real_server(tmp_path: Path, model: Path) -> None:
    """Reports 1, 4 and 11: three agents on two slots, a branch of the first, and a file whose bytes have changed."""
    openings = {name: opening(name) for name in ("alpha", "beta", "gamma")}
    with ExitStack() as stack:
        upstream = stack.enter_context(upstream_server(tmp_path, context_tokens=CONTEXT_TOKENS, slots=2, model=model))
        parkd = stack.enter_context(sidecar_server(upstream.base_url, tmp_path))
        first = {name: say(parkd, messages) for name, messages in openings.items()}
        for name, messages in openings.items():
            answer = say(parkd, after(messages, first[name].text, "And?"))
            assert answer.reused_tokens >= first[name].prompt_tokens, name
        branch = say(parkd, after(openings["alpha"], first["alpha"].text, "Or?"))
        assert branch.reused_tokens >= first["alpha"].prompt_tokens
        back = say(parkd, after(openings["alpha"], first["alpha"].text, "And?"))
        assert back.reused_tokens >= back.prompt_tokens - 1
        for name in ("beta", "gamma"):  # both slots are others', so that A must come from its file
            say(parkd, after(openings[name], first[name].text, "And?"))
        time.sleep(1.0)
        for path in (tmp_path / "parkd").glob("*.extent"):
            data = bytearray(path.read_bytes())
            data[-9] ^= 0x20
            path.write_bytes(data)
        damaged = say(parkd, after(openings["alpha"], first["alpha"].text, "And?"))
        assert damaged.reused_tokens < first["alpha"].prompt_tokens // 2
        whole = say(parkd, after(openings["alpha"], first["alpha"].text, "And?"))
        assert whole.reused_tokens == whole.prompt_tokens - 1


@pytest.mark.parametrize("model", list(TINY), indirect=True)
def test_a_grown_conversation_comes_back_and_is_resumed_inside(tmp_path: Path, model: Path) -> None:
    """The server appends its checkpoints to its files: they are larger than their tokens say, and of use inside."""
    settings: dict[str, Any] = {"context_tokens": 8192, "model": model}
    with ExitStack() as stack:
        upstream = stack.enter_context(upstream_server(tmp_path, **settings))
        parkd = stack.enter_context(sidecar_server(upstream.base_url, tmp_path))
        history = before = opening("alpha")
        asked = 0
        for _ in range(6):
            answer = say(parkd, history)
            assert answer.reused_tokens >= asked - SERVERS_TAIL
            assert answer.cache.startswith("restored" if asked else "cold")
            asked, before = answer.prompt_tokens, history
            history = after(history, answer.text, " ".join(f"question {asked}.{part}" for part in range(60)))
            say(parkd, opening("beta"))
        edited = [*before[:-1], {"role": "user", "content": "Something else?"}]
        branch = say(parkd, edited)
        assert 0 < branch.reused_tokens < asked
        assert branch.reused_tokens > asked // 2
        say(parkd, opening("beta"))
        back = say(parkd, history)
        assert back.reused_tokens >= asked - SERVERS_TAIL  # the branch has not cost the file
        assert "not parked" not in parkd.log.read_text()
