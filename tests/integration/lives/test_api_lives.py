"""Random histories of several conversations through the whole server, on every kind of state, in RAM and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lives.api_lives import Life

pytestmark = pytest.mark.anyio

EVENTS = 20
ON_DISK = ("rows", "linear", "late-linear", "opaque-linear", "file")
SHORT = {"rows": 0, "linear": 4, "window": 6, "late": 0, "late-linear": 4, "opaque": 5, "opaque-linear": 0}
"""A seed for each kind, chosen so that little time covers much."""


@pytest.mark.parametrize(("kind", "seed"), SHORT.items())
async def test_a_short_life(kind: str, seed: int) -> None:
    counts = await Life(kind, seed).go_on(EVENTS)
    assert counts["live"]
    assert counts["restored-ram"]
    assert counts["restorable"]


async def test_a_short_life_on_disk(tmp_path: Path) -> None:
    counts = await Life("linear", 4, tmp_path / "park").go_on(EVENTS)
    assert counts["restored-disk"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 102))
@pytest.mark.parametrize("kind", SHORT)
async def test_a_life(kind: str, seed: int) -> None:
    await Life(kind, seed).go_on(2 * EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_DISK)
async def test_a_life_on_disk(kind: str, tmp_path: Path) -> None:
    await Life(kind, 100, tmp_path / "park").go_on(2 * EVENTS)
