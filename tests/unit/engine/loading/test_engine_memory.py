"""How long a context is chosen."""

from __future__ import annotations

import pytest
from parkd_engine.errors import ModelLoadError
from parkd_engine.memory import StageNeed, choose_context

GIB = 1 << 30


STAGES = [StageNeed("cpu", 1000, 0), StageNeed("cpu", 1000, 0)]


def test_the_largest_context_that_fits_is_chosen() -> None:
    # 8 GiB free, a tenth kept, 1 GiB promised; two stages on one device share what is left.
    room = 8 * GIB - int(8 * GIB * 0.1) - GIB
    chosen = choose_context(STAGES, 10**9, None, reserved_bytes=GIB, free=lambda _: 8 * GIB)
    assert chosen == room // 2000 // 256 * 256
    assert choose_context(STAGES, 4097, None, free=lambda _: 2 * GIB) == 4097


def test_the_tightest_device_decides() -> None:
    stages = [StageNeed("cuda:0", 1000, 0), StageNeed("cuda:1", 1000, 0)]
    free = {"cuda:0": 4 * GIB, "cuda:1": GIB}
    assert choose_context(stages, 10**9, None, reserved_bytes=3 * GIB, free=free.__getitem__) == (
        (GIB - (256 << 20)) // 1000 // 256 * 256
    )


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ModelLoadError, match=r"1000000 tokens needs 1,907 MiB on cpu; \d+ tokens"):
        choose_context(STAGES, 10**9, 10**6, free=lambda _: GIB)
    with pytest.raises(ModelLoadError, match="at most 4096"):
        choose_context(STAGES, 4096, 5000, free=lambda _: GIB)
    with pytest.raises(ModelLoadError, match="0 tokens"):
        choose_context(STAGES, 4096, None, free=lambda _: 1 << 20)
