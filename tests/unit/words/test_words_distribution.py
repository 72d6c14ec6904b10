"""Which weights stay and which is drawn, against the plain way to say it: sort all, add all."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.words.distribution import FLOORS, GROUP, Distribution, Weights, heaviest, nucleus, place_of

VOCABULARY = 5000


def weights(seed: int, spread: float) -> Weights:
    """As of scores with that spread in standard deviations; the heaviest is 1, and some are equal."""
    scores = (np.random.default_rng(seed).standard_normal(VOCABULARY) * spread).round(2).astype(np.float32)
    made: Weights = np.exp(scores - scores.max())
    return made


def sorted_places(values: Weights) -> list[int]:
    return sorted(range(len(values)), key=lambda place: (-values[place], place))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("count", [1, 2, 40, 900, VOCABULARY - 1])
def test_the_heaviest_are_those_of_a_whole_sort(spread: float, count: int) -> None:
    values = weights(count, spread)
    assert heaviest(values, count).tolist() == sorted_places(values)[:count]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 0.9999999])
def test_a_nucleus_is_the_fewest_that_hold_the_share(spread: float, top_p: float) -> None:
    values = weights(7, spread)
    order = sorted_places(values)
    held, count = 0.0, 0
    while held < top_p * values.sum(dtype=np.float64) and count < len(order):
        held += float(values[order[count]])
        count += 1
    found = nucleus(values, top_p)
    # The share itself may fall on a token by a rounding of the last place.
    assert abs(len(found) - count) <= 1
    assert found.tolist() == order[: len(found)]


def test_some_share_reaches_below_every_floor() -> None:
    """So that the tests above go through all of them."""
    values = weights(7, 3.0)
    lightest = [float(values[nucleus(values, top_p)].min()) for top_p in (0.3, 0.9, 0.999, 0.9999999)]
    floors = list(FLOORS[:-1])
    assert sorted([*lightest, *floors], reverse=True) == [
        value for pair in zip(lightest, floors, strict=False) for value in pair
    ] + [lightest[-1]]


@pytest.mark.parametrize("length", [1, 3, GROUP, GROUP + 1, 5 * GROUP, VOCABULARY])
@pytest.mark.parametrize("empty", ["none", "head", "tail", "most"])
def test_a_share_falls_on_the_token_that_a_running_sum_names(length: int, empty: str) -> None:
    generator = np.random.default_rng(length)
    values = generator.random(length).astype(np.float32)
    if empty != "none":
        zero = {"head": np.s_[: length // 2], "tail": np.s_[(length + 1) // 2 :], "most": np.s_[::2]}[empty]
        values[zero] = 0
        values[length // 2] = 1
    sums = values.cumsum(dtype=np.float64)
    for share in [0.0, *generator.random(200), 1 - 2**-53]:
        place = place_of(values, share)
        assert values[place] > 0
        # Between two ways to add lies the last place of a sum.
        assert sums[place] >= share * sums[-1] * (1 - 1e-12)
        assert place == 0 or sums[place - 1] <= share * sums[-1] * (1 + 1e-12)


def test_probabilities_and_differences_add_up() -> None:
    one = Distribution(np.array([3.0, 1.0]), np.array([4, 2]))
    other = Distribution(np.array([1.0, 1.0, 1.0, 0.0, 1.0]), None)
    assert one.probability(4) == 0.75
    assert one.probability(0) == 0
    assert other.probability(1) == 0.25
    rest = one.minus(other, 5)
    assert [rest.probability(token) for token in range(5)] == [0, 0, 0, 0, 1]
    assert one.minus(one, 5) is one
