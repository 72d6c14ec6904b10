"""Steps of several seats at once: each has the bits of its own step."""

from __future__ import annotations

import pytest
import torch
from parkd_engine import Session
from parkd_engine.decoding import Decoder
from parkd_engine.together import Together
from parkd_engine.words.sampling import TensorSampler

from parkd.errors import ContextFull
from parkd.types import SamplingParams
from parkd.words.logprobs import TokenLogprobs
from tests.unit.engine.kit.core_models import VOCAB, tiny_model, token_ids
from tests.unit.engine.kit.draft_models import drafting_session, prompt_ids
from tests.unit.engine.kit.hybrid_models import model_of
from tests.unit.engine.kit.seats import opened_seats

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3.5"])
def test_seats_that_step_together_have_the_bits_of_each_alone(family: str) -> None:
    model = model_of(family)
    seats = opened_seats(model, 3, 240)
    together = Together(seats)
    assert not together.record(), "on a CPU nothing is"
    for number, seat in enumerate(seats):
        seat.extend(token_ids(20 + 13 * number, number))
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step, chosen in enumerate(((0, 1, 2), (2, 0), (1,), (2, 1, 0))):
        logits = together.step(chosen, [step + number for number in chosen])
        for number, scores in zip(chosen, logits, strict=True):
            found[number].append(scores)
    for number, steps in ((0, (0, 1, 3)), (1, (0, 2, 3)), (2, (0, 1, 3))):
        [alone] = opened_seats(model, 1)
        alone.extend(token_ids(20 + 13 * number, number))
        expected = [alone.step(step + number) for step in steps]
        assert all(torch.equal(*pair) for pair in zip(found[number], expected, strict=True))
        assert seats[number].position == alone.position


def test_seats_whose_rows_do_not_fit_together_do_not_step() -> None:
    seats = opened_seats(tiny_model(), 2, 192)
    for number, tokens in enumerate((96, 90)):
        seats[number].extend(token_ids(tokens, number))
    with pytest.raises(ContextFull):
        Together(seats).step((0, 1), (3, 4))
    assert [seat.position for seat in seats] in ([96, 0], [0, 90])


def decoders(sessions: list[Session]) -> list[Decoder]:
    """One answer in each session, in ways that differ. All prompts are read but for their last tokens."""
    settings = (SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=3), SamplingParams(top_k=5, seed=9))
    found = []
    for number, session in enumerate(sessions):
        prompt = token_ids(20 + 13 * number, number)
        session.extend(prompt[:-1])
        found.append(Decoder(session, TensorSampler(settings[number], VOCAB, prompt), top_logprobs=3))
    return found


def answers(sessions: list[Session], joined: int) -> list[list[TokenLogprobs]]:
    """Twelve tokens of each; of the steps behind the first, `joined` are made ahead together, with those of others."""
    together, mine = Together(sessions), decoders(sessions)
    tokens = [each.tokens(int(token_ids(20 + 13 * number, number)[-1])) for number, each in enumerate(mine)]
    for number in range(12):
        if 0 < number <= joined:
            wanted = [each.steps_next for each in mine]
            assert None not in wanted
            for each, logits in zip(mine, together.step(range(len(mine)), wanted), strict=True):  # type: ignore[arg-type]
                each.stepped_ahead(logits)
        said = [next(each) for each in tokens]
        assert [each.logprobs[-1].token_id for each in mine] == said
    for each in tokens:
        each.close()
    assert [each.steps_next for each in mine] == [None] * len(mine)
    return [each.logprobs for each in mine]


def test_answers_whose_steps_are_made_ahead_are_those_of_their_own_steps() -> None:
    model = tiny_model()
    ahead = opened_seats(model, 3, 480)
    found, expected = answers(ahead, joined=11), answers(opened_seats(model, 3, 480), joined=0)
    assert found == expected
    assert [session.position for session in ahead] == [31, 44, 57]


def test_a_step_made_ahead_whose_token_nobody_takes_is_undone() -> None:
    session = opened_seats(tiny_model(), 1)[0]
    [mine] = decoders([session])
    tokens = mine.tokens(3)
    assert mine.steps_next is None, "before its first step"
    next(tokens)
    before, wanted = session.position, mine.steps_next
    assert wanted is not None
    mine.stepped_ahead(session.step(wanted))
    assert session.position == before + 1
    tokens.close()
    assert (session.position, mine.steps_next) == (before, None)


def test_a_step_made_ahead_that_fills_the_context_is_still_taken() -> None:
    session = opened_seats(tiny_model(), 1)[0]
    session.extend(token_ids(session.context_tokens - 3))
    mine = Decoder(session, TensorSampler(SamplingParams(temperature=0), VOCAB, token_ids(9)))
    tokens = mine.tokens(5)
    said = [next(tokens), next(tokens)]
    wanted = mine.steps_next
    assert wanted == said[-1]
    mine.stepped_ahead(session.step(wanted))
    assert session.position == session.context_tokens
    assert len([*said, *tokens]) == 3


def test_an_answer_that_guesses_makes_no_step_ahead() -> None:
    session = drafting_session("qwen3", draft_tokens=2)
    prompt = prompt_ids(40)
    session.extend(prompt[:-1])
    mine = Decoder(session, TensorSampler(SamplingParams(temperature=0), VOCAB, prompt))
    next(mine.tokens(int(prompt[-1])))
    assert mine.steps_next is None
