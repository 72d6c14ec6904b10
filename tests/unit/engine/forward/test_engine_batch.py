"""How long chunks are where nobody said."""

from __future__ import annotations

import pytest

from parkd.state.engine_config import CARD_BATCH, CPU_BATCH, batch_for


@pytest.mark.parametrize(
    ("devices", "tokens"),
    [
        (("cpu",), CPU_BATCH),
        (("cuda:0",), CARD_BATCH),
        (("cuda:0", "cuda:1"), CARD_BATCH),
        (("cuda:0", "cpu"), CPU_BATCH),
    ],
)
def test_cards_read_longer_chunks(devices: tuple[str, ...], tokens: int) -> None:
    assert batch_for(devices) == tokens
