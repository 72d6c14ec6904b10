"""What the figures rest on: the client that times the first token, the texts, and the verdicts."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest
import respx

from benchmarks import aba, chat, texts
from benchmarks.common import Result, Table, percentile

URL = "http://server.test"
ENDPOINT = f"{URL}/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def stream(*documents: dict[str, object], done: bool = True) -> bytes:
    lines = [": waiting\n\n", *(f"data: {json.dumps(document)}\n\n" for document in documents)]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def piece(text: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}


@respx.mock
def test_the_first_token_is_the_first_piece_with_text() -> None:
    body = stream(piece(None), piece(""), piece("a"), piece("b"), {"choices": [], "usage": USAGE})
    respx.post(ENDPOINT).respond(200, content=body, headers={"x-parkd-cache": "live; reused=7"})
    told: list[bool] = []
    answer = chat.ask(URL, MESSAGES, output_tokens=2, on_first_token=lambda: told.append(True))
    assert answer.text == "ab"
    assert told == [True]
    assert 0 < answer.first_token_s <= answer.total_s
    assert (answer.prompt_tokens, answer.reused_tokens, answer.output_tokens) == (9, 7, 2)
    assert answer.cache == "live; reused=7"


@respx.mock
def test_reused_tokens_come_from_timings_where_usage_does_not_say() -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}, "timings": {"cache_n": 5}}
    respx.post(ENDPOINT).respond(200, content=stream(piece("a"), last))
    assert chat.ask(URL, MESSAGES, output_tokens=1).reused_tokens == 5


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, b"busy"),
        (200, stream({"error": {"message": "broken"}})),
        (200, stream(piece("cut off"), done=False)),
        (200, stream({"choices": [], "usage": USAGE})),
    ],
    ids=["status", "error in the stream", "no usage", "no text"],
)
@respx.mock
def test_an_answer_that_is_not_whole_is_an_error(status: int, body: bytes) -> None:
    respx.post(ENDPOINT).respond(status, content=body)
    with pytest.raises(chat.ServerError):
        chat.ask(URL, MESSAGES, output_tokens=2)


@respx.mock
def test_a_server_that_is_not_there_is_told_as_such() -> None:
    respx.post(ENDPOINT).mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(httpx.ConnectError):
        chat.ask(URL, MESSAGES, output_tokens=2)


def test_texts_are_the_same_each_time_and_differ_from_the_first_words_on() -> None:
    assert texts.document(1, 5000) == texts.document(1, 5000)
    assert len(texts.document(1, 5000)) == 5000
    assert texts.document(1, 5000)[:30] != texts.document(2, 5000)[:30]
    one, other = (texts.opening("Ada", seed, 1000, "Why?") for seed in (1, 2))
    assert one[0]["content"] != other[0]["content"]


def test_a_table_has_one_width_a_column() -> None:
    lines = Table("", ("a", "long name"), (("wide cell", "1"),)).markdown().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == "| wide cell | 1         |"


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(100)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([3.0], 0.99) == 3.0


class FakeContender:
    """Answers with the number of messages, and remembers what it was asked."""

    def __init__(self, first_token_s: float, cold_text: str = "") -> None:
        self.first_token_s = first_token_s
        self.cold_text = cold_text
        self.asked: list[int] = []
        self.asked_cold: list[int] = []

    def answer(self, text: str, seconds: float) -> chat.Answer:
        return chat.Answer(text, seconds, seconds + 1, 3000, 2999, 48, "")

    def ask(self, messages: list[dict[str, str]]) -> chat.Answer:
        self.asked.append(len(messages))
        return self.answer(f"{len(messages)} messages", self.first_token_s)

    def ask_cold(self, messages: list[dict[str, str]]) -> chat.Answer:
        self.asked_cold.append(len(messages))
        return self.answer(self.cold_text or f"{len(messages)} messages", 10 * self.first_token_s)


def measured(ours: FakeContender, theirs: FakeContender) -> aba.Measured:
    contenders = [aba.Contender("parkd", ours.ask, ours.ask_cold), aba.Contender("peer", theirs.ask, theirs.ask_cold)]
    return aba.measure(contenders, 1)


def judged(ours: FakeContender, theirs: FakeContender) -> tuple[Result, dict[str, bool]]:
    result = Result("aba", "", "")
    answers = measured(ours, theirs)
    aba.report(answers, result)
    aba.judge(answers, result)
    return result, {goal.claim: goal.met for goal in result.goals}


def test_steps_send_the_whole_history() -> None:
    ours = FakeContender(0.1)
    measured(ours, FakeContender(0.1))
    assert ours.asked == [2, 4, 2, 4, 4, 6]
    assert ours.asked_cold == [4, 6]


def test_goals_are_met_by_a_faster_server_with_equal_answers() -> None:
    result, met = judged(FakeContender(0.1), FakeContender(0.2))
    assert all(met.values())
    assert any("peer: answer of 'A3 after B' equals the cold one in 1 of 1" in note for note in result.notes)
    assert dataclasses.asdict(result)["raw"]["answers"]["parkd"]["A1"][0]["prompt_tokens"] == 3000


def test_goals_are_missed_by_a_slower_server_or_another_answer() -> None:
    _, met = judged(FakeContender(0.3), FakeContender(0.2))
    assert not met["seconds to first token of 'A2 after B', parkd / peer"]
    _, met = judged(FakeContender(0.1, cold_text="another"), FakeContender(0.2))
    assert not met["answer of 'A2 after B' equals the cold one"]
