"""Background work: in order, bounded, and what it prepares for the next prompt."""

from __future__ import annotations

import threading

import pytest

from parkd.identity.background import BackgroundWork
from parkd.identity.output_memory import Said
from tests.unit.identity.identity_fakes import WordTokenizer, make_builder, say, talk

ANSWER = "three and four"


def test_work_is_done_in_order_and_before_it_closes() -> None:
    done: list[int] = []
    background = BackgroundWork()
    for number in range(100):
        assert background.submit(lambda number=number: done.append(number))
    background.close()
    assert done == list(range(100))


def test_what_finds_no_room_is_left_out_and_counted() -> None:
    gate, done = threading.Event(), []
    background = BackgroundWork(limit=2)
    running = threading.Event()
    background.submit(lambda: (running.set(), gate.wait(10)))
    assert running.wait(10)
    assert [background.submit(lambda: done.append(1)) for _ in range(3)] == [True, True, False]
    assert background.left_out == 1
    gate.set()
    background.close()
    assert done == [1, 1]


def test_a_failure_is_logged_and_the_next_piece_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    background = BackgroundWork()
    background.submit(lambda: done.append(1 // 0))
    background.submit(lambda: done.append(1))
    background.close()
    assert done == [1]
    assert "background work failed" in caplog.text


def test_closing_what_never_worked_is_nothing() -> None:
    BackgroundWork().close()


class Counting(WordTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode(text)


@pytest.mark.parametrize("reasoning", ["", "hm"])
def test_an_expected_answer_is_not_tokenised_again(reasoning: str) -> None:
    tokenizer = Counting()
    builder = make_builder(tokenizer)
    first = builder.build(talk(say("user", "one two")))
    thought = f"<|start|>think\n{reasoning}<|end|>" if reasoning else ""
    builder.expect(first, tokenizer.encode(thought + ANSWER), Said((ANSWER,), reasoning))
    tokenizer.texts.clear()
    again = builder.build(talk(say("user", "one two"), say("assistant", ANSWER), say("user", "more")))
    assert not any(ANSWER in text for text in tokenizer.texts)
    assert any("more" in text for text in tokenizer.texts)
    assert again.token_ids.tolist() == tokenizer.encode(
        builder.render(talk(say("user", "one two"), say("assistant", ANSWER), say("user", "more")))
    )
