"""Steps of several seats at once: each has the bits of its own step."""

from __future__ import annotations

import pytest
import torch
from parkd_engine.together import Together

from parkd.errors import ContextFull
from tests.unit.engine.kit.core_models import tiny_model, token_ids
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
