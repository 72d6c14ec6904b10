"""What is drawn, how often, and why."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from parkd_engine.words.sampling import TensorSampler

from parkd.errors import LogitsNotFinite, NothingAllowed
from parkd.types import SamplingParams


def sampler(
    history: list[int] | None = None, *, vocab: int = 6, fresh_seed: int = 0, **settings: object
) -> TensorSampler:
    ids = np.array(history or [], dtype=np.int64)
    return TensorSampler(SamplingParams(**settings), vocab, ids, fresh_seed=fresh_seed)  # type: ignore[arg-type]


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probabilities], dtype=torch.float32)


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum((counts[token] - total * p) ** 2 / (total * p) for token, p in expected.items())


FIVE = (0.4, 0.3, 0.15, 0.1, 0.05)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, dict(enumerate(FIVE))),
        ({"top_k": 2}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.6}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.71}, {0: 0.4 / 0.85, 1: 0.3 / 0.85, 2: 0.15 / 0.85}),
        ({"min_p": 0.26}, {0: 0.4 / 0.85, 1: 0.3 / 0.85, 2: 0.15 / 0.85}),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.0}, {0: 4 / 7, 1: 3 / 7}),
        ({"temperature": 0.5}, {k: p * p / sum(q * q for q in FIVE) for k, p in enumerate(FIVE)}),
        ({"temperature": 2.0, "top_k": 2}, {0: 2 / (2 + math.sqrt(3)), 1: math.sqrt(3) / (2 + math.sqrt(3))}),
    ],
)
def test_draws_follow_the_filtered_distribution(settings: dict[str, float], expected: dict[int, float]) -> None:
    picker = sampler(vocab=5, seed=11, **settings)
    scores = logits(*FIVE)
    counts = Counter(picker.pick(scores) for _ in range(4000))
    assert set(counts) == set(expected)
    # 99.9% quantile of chi-square with 4 degrees of freedom, the most there are here.
    assert chi_square(counts, expected) < 18.5


def test_top_p_over_a_flat_vocabulary_looks_behind_the_head() -> None:
    size = 5000
    scores = torch.zeros(size)
    picker = sampler(vocab=size, seed=3, top_p=0.8)
    drawn = {picker.pick(scores) for _ in range(3000)}
    assert max(drawn) < 4000
    assert len(drawn) > 1500  # More than the head alone could give.


def test_one_token_always_stays() -> None:
    picker = sampler(vocab=5, seed=1, top_p=1e-9, min_p=1.0)
    assert {picker.pick(logits(*FIVE)) for _ in range(50)} == {0}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])
    assert sampler(vocab=5, temperature=0).pick(scores) == 1
    assert sampler(vocab=5, temperature=0, logit_bias={0: 0.0}).pick(scores) == 1


def test_the_same_seed_repeats_and_another_does_not() -> None:
    scores = logits(*[0.1] * 10)

    def answer(**settings: object) -> list[int]:
        picker = sampler(vocab=10, **settings)  # type: ignore[arg-type]
        return [picker.pick(scores) for _ in range(30)]

    assert answer(seed=7) == answer(seed=7, fresh_seed=99)
    assert answer(seed=7) != answer(seed=8)
    assert answer(fresh_seed=1) == answer(fresh_seed=1)
    assert answer(fresh_seed=1) != answer(fresh_seed=2)
    assert answer(seed=-1) == answer(seed=2**64 - 1)


def test_repetition_penalty_covers_prompt_and_answer_once_each() -> None:
    picker = sampler([2, 2, 4], temperature=0, repetition_penalty=2.0)
    # Prompt ids 2 and 4: 3.0 / 2 = 1.5 and -1.0 * 2 = -2.0, however often they occur.
    assert picker.pick(torch.tensor([1.4, 1.0, 3.0, 0.0, -1.0, -1.9])) == 2
    assert picker.pick(torch.tensor([1.6, 1.0, 3.0, 0.0, -1.0, -1.9])) == 0
    # Now 0 was said too: 1.6 / 2 = 0.8 < 1.0.
    assert picker.pick(torch.tensor([1.6, 1.0, 1.0, 0.0, -1.0, -1.9])) == 1
    # Negative scores are multiplied: 4 falls from -1.0 to -2.0, below the unsaid 5.
    low = torch.tensor([-9.0, -9.0, -9.0, -9.0, -1.0, -1.9])
    assert picker.pick(low) == 5


def test_presence_and_frequency_penalties_count_the_answer_alone() -> None:
    picker = sampler([0, 0, 0, 0], vocab=3, temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = torch.tensor([2.0, 1.1, 0.0])
    # Said k times, 0 scores 2 - 0.5 - 0.25 k: 2.0, 1.25, then 1.0 < 1.1.
    assert [picker.pick(scores) for _ in range(3)] == [0, 0, 1]
    # 0 still at 1.0, 1 at 1.1 - 0.75 = 0.35.
    assert picker.pick(scores) == 0


def test_bias_is_added_after_penalties_and_ignores_unknown_ids() -> None:
    picker = sampler([1], vocab=3, temperature=0, repetition_penalty=2.0, logit_bias={1: 1.0, 77: 100.0})
    # 1: 3 / 2 + 1 = 2.5; the other order would give (3 + 1) / 2 = 2.
    assert picker.pick(torch.tensor([2.4, 3.0, 0.0])) == 1
    assert picker.pick(torch.tensor([2.6, 3.0, 0.0])) == 0


def test_a_mask_rules_over_everything_else() -> None:
    mask = np.array([False, False, True, False, True])
    assert sampler(vocab=5, temperature=0, logit_bias={0: 100.0}).pick(logits(*FIVE), mask) == 2
    picker = sampler(vocab=5, seed=5)
    counts = Counter(picker.pick(logits(*FIVE), mask) for _ in range(2000))
    assert set(counts) == {2, 4}
    assert chi_square(counts, {2: 0.75, 4: 0.25}) < 10.9


def test_a_mask_shorter_than_padded_logits_forbids_the_padding() -> None:
    assert sampler(temperature=0).pick(torch.tensor([1.0, 2.0, 9.0]), np.array([True, True])) == 1


def test_the_callers_logits_are_left_alone() -> None:
    scores = logits(*FIVE)
    before = scores.clone()
    sampler([0, 1], vocab=5, repetition_penalty=1.5, logit_bias={3: 4.0}).pick(scores, np.ones(5, dtype=np.bool_))
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {2: 9.0}},
        {"temperature": 0.0, "presence_penalty": 2},
    ],
)
@pytest.mark.parametrize("mask", [None, np.array([False, True, True, True, True])])
def test_a_row_in_memory_is_picked_from_as_a_tensor_is(settings: dict, mask: np.ndarray | None) -> None:
    one, other = (sampler(vocab=5, fresh_seed=3, **settings) for _ in range(2))
    scores = logits(0.3, 0.3, 0.2, 0.1, 0.1)
    picked = [one.pick_row(scores.numpy(), mask) for _ in range(40)]
    assert picked == [other.pick(scores, mask) for _ in range(40)]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_row_without_a_usable_score_is_an_error(value: float) -> None:
    with pytest.raises(LogitsNotFinite):
        sampler(vocab=3, temperature=0.0).pick_row(np.full(3, value, dtype=np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_usable_score_is_an_error(temperature: float) -> None:
    with pytest.raises(LogitsNotFinite):
        sampler(vocab=3, temperature=temperature).pick(torch.full((3,), math.nan))
    damaged = np.full(3, -math.inf, dtype=np.float32)
    with pytest.raises(LogitsNotFinite):
        sampler(vocab=3, temperature=temperature).pick_row(damaged, np.array([False, True, True]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_request_excludes_is_the_requests_fault(temperature: float) -> None:
    """`logit_bias` against the token that a form needs next: it was a 500 that advised to send the request again."""
    nothing, two = np.zeros(3, dtype=np.bool_), np.array([False, True, True])
    never = {1: -math.inf, 2: -math.inf}
    for mask, bias in ((nothing, {}), (two, never), (None, {0: -math.inf, **never})):
        by_row, by_tensor = (sampler(vocab=3, temperature=temperature, logit_bias=bias) for _ in range(2))
        with pytest.raises(NothingAllowed, match="exclude them all"):
            by_row.pick_row(np.zeros(3, dtype=np.float32), mask)
        with pytest.raises(NothingAllowed, match="exclude them all"):
            by_tensor.pick(torch.zeros(3), mask)
    assert sampler(vocab=3, temperature=temperature, logit_bias=never).pick(torch.zeros(3)) == 0


GUESSED = (0.05, 0.1, 0.25, 0.3, 0.3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 3},
        {"top_p": 0.71},
        {"min_p": 0.26},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"top_k": 2, "logit_bias": {4: 3.0}},
    ],
)
@pytest.mark.parametrize("guesses_of", [GUESSED, FIVE, (0.0, 0.0, 0.0, 0.0, 1.0)])
def test_judged_guesses_have_the_distribution_of_draws(
    settings: dict[str, float], guesses_of: tuple[float, ...]
) -> None:
    """Whatever the guesses were drawn from. Chi-square over 3000 tokens."""
    picker = sampler([1, 3], vocab=5, seed=3, **settings)
    wanted, guessed = picker.distribution(logits(*FIVE)), picker.distribution(logits(*guesses_of))
    counts: Counter[int] = Counter()
    right = 0
    for _ in range(3000):
        guess = picker.draw(guessed)
        token = picker.judge(guess, guessed, wanted)
        counts[token] += 1
        right += token == guess
    expected = {token: p for token in range(5) if (p := wanted.probability(token)) > 0}
    assert set(counts) <= set(expected)
    assert chi_square(counts, expected) < 18.5
    # As often as can be: by what the two have in common.
    common = sum(min(wanted.probability(token), guessed.probability(token)) for token in range(5))
    assert abs(right / 3000 - common) < 0.035


def test_a_mask_holds_for_what_takes_the_place_of_a_guess() -> None:
    picker = sampler(vocab=5, seed=3)
    mask = np.array([False, True, True, False, False])
    wanted, guessed = picker.distribution(logits(*FIVE), mask), picker.distribution(logits(*GUESSED))
    counts = Counter(picker.judge(picker.draw(guessed), guessed, wanted) for _ in range(2000))
    assert set(counts) == {1, 2}
    assert chi_square(counts, {1: 2 / 3, 2: 1 / 3}) < 10.8


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.7}]
)
def test_tokens_ahead_are_penalised_as_if_they_had_been_said(settings: dict[str, float]) -> None:
    supposing, saying = sampler([2], vocab=5, **settings), sampler([2], vocab=5, **settings)
    for picker in (supposing, saying):
        picker.remember(1)
    ahead = supposing.distribution(logits(*FIVE), ahead=[1, 3])
    for token in (1, 3):
        saying.remember(token)
    assert np.array_equal(ahead.weights, saying.distribution(logits(*FIVE)).weights)
    assert not np.array_equal(ahead.weights, supposing.distribution(logits(*FIVE)).weights)


def test_a_greedy_judge_takes_the_best() -> None:
    picker = sampler(vocab=5, temperature=0.0)
    wanted = picker.distribution(logits(*FIVE))
    assert picker.judge(0, picker.distribution(logits(*FIVE)), wanted) == 0
    assert picker.judge(3, picker.distribution(logits(*GUESSED)), wanted) == 0
