"""How long a context is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parkd_engine.account import Part, StageMemory, choose_context, choose_seats

from parkd.errors import ModelError

GIB = 1 << 30


def stage(device: str, row_bytes: int = 1000, *others: Part) -> StageMemory:
    return StageMemory(device, 0, 1, (Part("rows", 0, row_bytes, is_of_rows=True), *others))


STAGES = [stage("cpu"), stage("cpu")]


def always(size: int) -> Callable[[str], int]:
    return lambda _device: size


def test_the_largest_context_that_fits_is_chosen() -> None:
    # 8 GiB free, a tenth kept, 1 GiB promised; two stages on one device share what is left.
    room = 8 * GIB - int(8 * GIB * 0.1) - GIB
    chosen = choose_context(STAGES, 10**9, None, reserved=lambda: GIB, free=always(8 * GIB))
    assert chosen == room // 2000 // 256 * 256
    assert choose_context(STAGES, 4097, None, free=always(2 * GIB)) == 4097


STATE = Part("fixed state", 100 << 20, bytes_a_seat=100 << 20)


def test_seats_get_the_rows_that_are_left_beside_one_context() -> None:
    stages = [stage("cuda:0", 1000, STATE), stage("cuda:1", 2000, STATE)]
    free = {"cuda:0": 40 * GIB, "cuda:1": 2 * GIB}.__getitem__
    room = 2 * GIB - (256 << 20)

    def chosen(context: int, seats: int | None) -> tuple[int, int]:
        return choose_seats(stages, context, seats, free=free)

    assert chosen(100_000, 3) == (3, 3 * 100_096), "one for each fits, in whole ranges of 256"
    left = room - 3 * (100 << 20) - 2000 * 600_000
    assert 0 < left < 2000 * 1_200_000
    assert chosen(600_000, 3) == (3, (600_000 + left // 2000) // 256 * 256), "of the tighter card"
    assert chosen(600_000, 1) == (1, 600_000)
    whole = room // (2000 * 200_192 + (100 << 20))
    assert whole == 3
    assert chosen(200_000, None) == (3, 3 * 200_192)
    assert chosen(20_000, None)[0] == 4, "the most that are chosen automatically"
    assert chosen(700_000, None) == (1, 700_000)


def test_the_context_leaves_room_for_what_each_seat_takes() -> None:
    stages = [stage("cuda:0", 1000, STATE)]
    room = 8 * GIB - int(8 * GIB * 0.06)
    for seats in (1, 4):
        chosen = choose_context(stages, 10**9, None, seats=seats, free=always(8 * GIB))
        assert chosen == (room - seats * (100 << 20)) // 1000 // 256 * 256
        assert choose_seats(stages, chosen, seats, free=always(8 * GIB)) == (seats, chosen)


def test_the_tightest_device_decides() -> None:
    stages = [stage("cuda:0"), stage("cuda:1")]
    free = {"cuda:0": 4 * GIB, "cuda:1": GIB}
    assert choose_context(stages, 10**9, None, reserved=lambda: 3 * GIB, free=free.__getitem__) == (
        (GIB - (256 << 20)) // 1000 // 256 * 256
    )


def test_stages_on_one_device_share_their_workspace() -> None:
    """They run one after the other. What they hold adds up."""
    held, work = Part("fixed state", 100 << 20), Part("workspace", 300 << 20, 500)
    stages = [stage("cuda:0", 1000, held, work), stage("cuda:0", 1000, held, Part("workspace", 200 << 20, 400))]
    room = 8 * GIB - int(8 * GIB * 0.06) - 2 * (100 << 20) - (300 << 20)
    assert choose_context(stages, 10**9, None, free=always(8 * GIB)) == room // 2500 // 256 * 256


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ModelError, match=r"1000000 tokens needs 1,907 MiB on cpu beside the weights.* \d+ tokens"):
        choose_context(STAGES, 10**9, 10**6, free=always(GIB))
    with pytest.raises(ModelError, match="at most 4096"):
        choose_context(STAGES, 4096, 5000, free=always(GIB))
    with pytest.raises(ModelError, match=" 0 tokens fit"):
        choose_context(STAGES, 4096, None, free=always(1 << 20))


def test_the_context_that_a_refusal_names_is_taken() -> None:
    with pytest.raises(ModelError, match="ctx-size of at most") as refused:
        choose_context(STAGES, 10**9, 10**6, free=always(GIB))
    named = int(str(refused.value).split("--ctx-size of at most ")[1].split(",")[0])
    assert choose_context(STAGES, 10**9, named, free=always(GIB)) == named
    with pytest.raises(ModelError):
        choose_context(STAGES, 10**9, named + 1, free=always(GIB))


@pytest.mark.parametrize("asked", [None, 4096])
def test_a_budget_larger_than_memory_is_named_and_not_the_context(asked: int | None) -> None:
    """The message names a budget that is then accepted."""
    with pytest.raises(ModelError, match="Parked conversations are to have 20,480 MiB of the 8,192 MiB") as refused:
        choose_context(STAGES, 10**6, asked, reserved=lambda: 20 * GIB, free=always(8 * GIB))
    assert "0 tokens" not in str(refused.value).replace("4096", "")
    most_mib = int(str(refused.value).split("--conversation-cache-mib of at most ")[1].split(",")[0])
    chosen = choose_context(STAGES, 10**6, asked, reserved=lambda: most_mib << 20, free=always(8 * GIB))
    assert chosen >= (asked or 512)
    with pytest.raises(ModelError):
        choose_context(STAGES, 10**6, asked, reserved=lambda: (most_mib + 1) << 20, free=always(8 * GIB))
