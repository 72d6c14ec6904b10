"""How fast memory is copied to the devices, by a clock of the test's own."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from parkd_engine.moves import copy_speed
from parkd_engine.moves.copy_speed import COPIES, TRIAL_BYTES, copy_bytes_per_s


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_found_by_use_14_copies_to_a_device_are_measured_once(
    devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the disk was measured at start; memory was taken to give 8 GB/s."""
    copied: list[int] = []
    plain = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, **more: bool) -> torch.Tensor:
        copied.append(source.nbytes)
        return plain(target, source, **more)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    seconds = count(0.0, 0.5)
    assert copy_bytes_per_s(devices, lambda: next(seconds)) == COPIES * TRIAL_BYTES / 0.5
    assert copied == [TRIAL_BYTES] * COPIES


def test_a_device_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_shape: int, **_more: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(copy_speed.torch, "zeros", fails)
    assert copy_bytes_per_s(("cpu",)) is None
