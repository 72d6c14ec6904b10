"""A head that is rarely right is left alone for a while, one that is right is not."""

from __future__ import annotations

import pytest
from parkd_engine import EngineConfig, open_session
from parkd_engine.decoding import Decoder
from parkd_engine.draft.pace import DraftPace
from parkd_engine.words.sampling import TensorSampler

from parkd.types import SamplingParams
from tests.unit.engine.kit.draft_models import drafting, drafting_session, greedy, prompt_ids, say


def pattern(accepted: int, steps: int, pace: DraftPace | None = None) -> str:
    """`g` for each step that guesses two tokens, of which `accepted` are right, `.` for one that does not."""
    pace = DraftPace() if pace is None else pace
    seen = ""
    for _ in range(steps):
        guesses = pace.guesses()
        seen += "g" if guesses else "."
        if guesses:
            pace.note(2, accepted)
    return seen


def test_pauses_grow_and_end_in_another_trial() -> None:
    trial = "g" * 8
    pauses = ["." * length for length in (32, 64, 128, 256, 256)]
    assert pattern(0, 8 * 5 + 736) == "".join(trial + pause for pause in pauses)


def test_a_head_that_is_right_never_pauses_and_ends_the_growth() -> None:
    assert pattern(1, 100) == "g" * 100
    pace = DraftPace()
    pattern(0, 8 + 32 + 8 + 64, pace)
    assert pattern(1, 8, pace) == "g" * 8
    assert pattern(0, 8 + 33, pace) == "g" * 8 + "." * 32 + "g"


@pytest.mark.parametrize(("pauses", "most"), [(True, 16), (False, 80)])
def test_guessing_that_is_rarely_right_pauses(pauses: bool, most: int) -> None:
    """A random head: 8 steps of two guesses, then single steps. Answers are the same."""
    ids, count = prompt_ids(), 40
    model, head = drafting("qwen3.5")
    session = open_session(model, EngineConfig(context_tokens=256, draft_tokens=2), draft_model=head)
    assert session.draft_pauses
    session.draft_pauses = pauses
    session.extend(ids[:-1])
    decoding = Decoder(session, TensorSampler(SamplingParams(temperature=0.0), int(model.config.vocab_size), ids))
    said = say(decoding, int(ids[-1]), count)
    assert most - 16 < decoding.counts.drafted <= most
    plain = drafting_session("qwen3.5", 1)
    plain.extend(ids[:-1])
    assert said == greedy(plain, ids, count)


@pytest.mark.parametrize("devices", [("cpu",), ("cuda:0", "cuda:1"), ("cuda", "cpu")])
def test_nobody_guesses_unasked(devices: tuple[str, ...]) -> None:
    assert EngineConfig(devices=devices).guesses == 0
    assert EngineConfig(devices=devices, draft_tokens=2).guesses == 2
