"""The demo's own judgement; `tests/integration` runs the whole of it on the demo model."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest

from parkd.demo import command as demo
from parkd.demo.command import Turn
from parkd.demo.server import ServerFailed, running_server


def turn(name: str, prompt: int, reused: int, first_s: float, cache: str, text: str = "Yes.") -> Turn:
    return Turn(name, prompt, reused, first_s, cache, text, 3)


GOOD = [
    turn("A1", 3000, 0, 12.0, "cold"),
    turn("A + turn", 3030, 3010, 0.4, "live"),
    turn("B1", 1000, 5, 4.0, "cold"),
    turn("A2 after B", 3060, 3040, 0.5, "restored-ram"),
]
COLD = turn("A2 cold", 3060, 0, 12.5, "cold")


def test_a_restored_equal_answer_is_as_promised() -> None:
    assert demo.verdict(GOOD, COLD) == []


@pytest.mark.parametrize(
    ("back", "cold", "problem"),
    [
        ({"reused_tokens": 2969}, {}, "reused 2969 tokens of the 3000"),
        ({"cache": "live"}, {}, "not restored"),
        ({"text": "No."}, {}, "answers differ"),
        ({"output_tokens": 4}, {}, "answers differ"),
        ({}, {"reused_tokens": 1}, "was not cold"),
    ],
)
def test_each_broken_promise_is_a_problem(back: dict[str, object], cold: dict[str, object], problem: str) -> None:
    turns = [*GOOD[:-1], dataclasses.replace(GOOD[-1], **back)]  # type: ignore[arg-type]
    (found,) = demo.verdict(turns, dataclasses.replace(COLD, **cold))  # type: ignore[arg-type]
    assert problem in found


def test_99_percent_reused_is_enough() -> None:
    turns = [*GOOD[:-1], dataclasses.replace(GOOD[-1], reused_tokens=2970)]
    assert demo.verdict(turns, COLD) == []


def test_the_table_has_a_line_for_each_turn_and_the_ratio() -> None:
    lines = demo.table([*GOOD, COLD]).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:6]] == [item.name for item in [*GOOD, COLD]]
    assert lines[4].split() == ["A2", "after", "B", "3,060", "3,040", "0.50", "s", "restored-ram"]
    assert "25.0 times sooner" in lines[-1]
    assert lines[-1].endswith("the answers are the same.")
    differing = dataclasses.replace(COLD, text="No.")
    assert "NOT the same" in demo.table([*GOOD, differing])


def test_the_documents_are_long_enough_to_show_something() -> None:
    long, short = demo.documents()
    assert len(long) == demo.LONG_CHARACTERS
    assert len(short) == demo.SHORT_CHARACTERS
    assert "parkd" in long
    assert "Apache License" in short


def stream(*chunks: dict[str, object]) -> bytes:
    frames = [b": keep-alive\n\n", *(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)]
    return b"".join([*frames, b"data: [DONE]\n\n"])


def delta(text: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"role": "assistant"} if text is None else {"content": text}}]}


USAGE: dict[str, object] = {
    "choices": [],
    "usage": {"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 20}},
}


def asked(answer: httpx.Response) -> tuple[Turn, dict[str, object]]:
    bodies: list[dict[str, object]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(handle)) as client:
        found = demo.ask(client, "A1", [{"role": "user", "content": "hi"}])
    return found, bodies[0]


def test_asking_reads_text_counts_and_where_the_state_came_from() -> None:
    body = stream(delta(None), delta("He"), delta("llo"), USAGE)
    found, sent = asked(httpx.Response(200, content=body, headers={"x-parkd-cache": "live"}))
    assert (found.text, found.prompt_tokens, found.reused_tokens, found.output_tokens) == ("Hello", 30, 20, 2)
    assert found.cache == "live"
    assert found.first_token_s > 0
    assert sent["temperature"] == 0
    assert sent["stream"] is True


def test_the_word_in_timings_is_the_final_one() -> None:
    body = stream(delta("x"), USAGE | {"timings": {"cache": "restored-ram"}})
    found, _ = asked(httpx.Response(200, content=body, headers={"x-parkd-cache": "pending"}))
    assert found.cache == "restored-ram"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, json={"error": {"message": "busy"}}),
        httpx.Response(200, content=stream(delta("x"), {"error": {"message": "busy"}, "choices": []})),
    ],
)
def test_an_error_ends_the_demo_with_its_words(answer: httpx.Response) -> None:
    with pytest.raises(ServerFailed, match="busy"):
        asked(answer)


def test_a_server_that_ends_at_once_is_a_failure_with_its_last_words() -> None:
    with pytest.raises(ServerFailed, match="exit code 2") as caught, running_server({"port": "x"}):
        pass
    assert "whole number" in caught.value.message


def test_last_words_that_were_shown_are_not_repeated() -> None:
    shown: list[str] = []
    with pytest.raises(ServerFailed, match="exit code 2") as caught, running_server({"port": "x"}, shown.append):
        pass
    assert "whole number" not in caught.value.message
    assert any("whole number" in line for line in shown)
