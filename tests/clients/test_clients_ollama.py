"""Ollama's official client against the running server (found by use 25: editors and web pages speak its API first)."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import ollama
import pytest

from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import CALL, CALLS, SCHEMA, Served, serving

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "Hello"}]
THOUGHT = "<think>\nA greeting.\n</think>\n\nHéllo 😀."


@contextmanager
def client_of(served: Served, key: str = "") -> Iterator[ollama.Client]:
    """Closed at the end, which the client itself does not offer."""
    made = ollama.Client(host=served.url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=20)
    with made._client:
        yield made


def test_an_answer_whole_and_in_pieces_with_its_thinking_apart() -> None:
    with serving(THOUGHT) as served, client_of(served) as client:
        whole = client.chat("any", HELLO)
        assert (whole.message.role, whole.message.content) == ("assistant", "Héllo 😀.")
        assert whole.message.thinking == "A greeting."
        assert (whole.model, whole.done, whole.done_reason) == ("any", True, "stop")
        assert whole.prompt_eval_count is not None
        assert whole.eval_count is not None
        assert whole.prompt_eval_count > 5
        pieces = list(client.chat("any", HELLO, stream=True))
        assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
        assert "".join(piece.message.thinking or "" for piece in pieces) == whole.message.thinking
        assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert (pieces[-1].prompt_eval_count, pieces[-1].eval_count) == (whole.prompt_eval_count, whole.eval_count)


def test_calls_arrive_whole_and_come_back_without_ids_into_the_same_conversation() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "Seen." if "tool_response" in prompt or prompt.count("<|im_start|>") > 4 else CALLS

    with serving(answer) as served, client_of(served) as client:
        streamed = [
            call
            for piece in client.chat("m", HELLO, tools=[TOOL], stream=True)
            for call in piece.message.tool_calls or ()
        ]
        whole = client.chat("m", HELLO, tools=[TOOL])
        calls = [(call.function.name, dict(call.function.arguments)) for call in whole.message.tool_calls or ()]
        assert calls == [("look", {"path": "a/b", "depth": 2}), ("look", {"path": "c"})]
        assert [(call.function.name, dict(call.function.arguments)) for call in streamed] == calls
        history = [
            *HELLO,
            whole.message,
            *({"role": "tool", "content": text, "tool_name": "look"} for text in ("1", "2")),
        ]
        again = client.chat("m", history, tools=[TOOL])
        assert again.message.content == "Seen."
        report = httpx.post(
            f"{served.url}/api/chat",
            json={"messages": [_plain(one) for one in history], "tools": [TOOL], "stream": False},
        )
        assert int(report.headers["x-parkd-reused-tokens"]) > 0


def _plain(message: object) -> object:
    return message.model_dump(exclude_none=True) if isinstance(message, ollama.Message) else message


def test_a_call_that_was_cut_is_no_call() -> None:
    with serving(CALL) as served, client_of(served) as client:
        cut = client.chat("m", HELLO, tools=[TOOL], options={"num_predict": 40})
        assert cut.done_reason == "length"
        assert not cut.message.tool_calls


def test_a_prompt_goes_through_the_template_or_raw() -> None:
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return "Yes."

    with serving(answer) as served, client_of(served) as client:
        assert client.generate("m", "Is it?", system="Be brief.").response == "Yes."
        assert client.generate("m", "Is it?", raw=True).response == "Yes."
        assert "".join(piece.response for piece in client.generate("m", "Is it?", stream=True)) == "Yes."
    assert "Be brief." in seen[0]
    assert seen[0].count("Is it?") == 1
    assert seen[1] == "Is it?"


@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_a_form_that_was_asked_for_is_kept(form: object) -> None:
    with serving() as served, client_of(served) as client:
        answer = client.chat("m", HELLO, format=form, options={"num_predict": 400, "temperature": 0})
        assert (answer.message.content or "").startswith("{")


def test_the_model_is_listed_shown_and_loaded() -> None:
    with serving(config=ProxyConfig(alias="house")) as served, client_of(served) as client:
        assert [model.model for model in client.list().models] == ["house"]
        [running] = client.ps().models
        assert (running.model, running.context_length) == ("house", 32768)
        shown = client.show("house")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo is not None
        assert 32768 in shown.modelinfo.values()
        assert client.generate("house").done_reason == "load"
        assert client.chat("house").done_reason == "load"


def test_errors_are_the_clients_own() -> None:
    config = ProxyConfig(api_keys=("k1",))
    with serving(THOUGHT, config=config, context_tokens=600) as served:
        with client_of(served) as client, pytest.raises(ollama.ResponseError, match="API key") as refused:
            client.chat("m", HELLO)
        assert refused.value.status_code == 401
        with client_of(served, "k1") as client:
            with pytest.raises(ollama.ResponseError, match="context") as refused:
                client.chat("m", [{"role": "user", "content": "x" * 3000}])
            assert refused.value.status_code == 400
            image = base64.b64encode(b"no image").decode()
            with pytest.raises(ollama.ResponseError, match="image"):
                client.chat("m", [{"role": "user", "content": "See", "images": [image]}])
        unknown = httpx.post(f"{served.url}/api/pull", json={})
        assert unknown.status_code == 404
        assert "--model" in unknown.json()["error"]


def test_a_waiting_client_gets_lines_that_it_can_read() -> None:
    import json
    import threading

    held = threading.Event()
    config = ProxyConfig(keep_alive_s=0.05, first_byte_deadline_s=0.05)

    def wait(step: str, _count: int) -> None:
        if step == "chunk":
            held.wait(0.5)

    with serving("Done.", config=config, hook=wait) as served:
        lines = httpx.post(f"{served.url}/api/chat", json={"messages": HELLO}, timeout=20).text.splitlines()
    documents = [json.loads(line) for line in lines]
    assert len(documents) > 3
    assert "".join(document["message"]["content"] for document in documents) == "Done."
