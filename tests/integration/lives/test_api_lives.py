"""Random histories of several conversations through the whole server, on every kind of state, in RAM and on disk."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from random import Random

import pytest
from parkd_engine.families.presets.shapes import PRESETS, WITH_HEAD

from tests.integration.lives.api_lives import Life
from tests.integration.lives.life_dialects import DIALECTS
from tests.integration.lives.life_families import FamilyLife
from tests.integration.lives.scripted_lives import ScriptedLife

pytestmark = pytest.mark.anyio

EVENTS = 20
ON_DISK = ("rows", "linear", "late-linear", "opaque-linear", "file")
SHORT = {"rows": 0, "linear": 4, "window": 6, "late": 0, "late-linear": 4, "opaque": 5, "opaque-linear": 3}
"""A seed for each kind, chosen so that little time covers much."""
TEAMS = ("rows", "late")
"""In these, a key goes on with what another key of its namespace has said."""
SCRIPTED = {"rows": 0, "linear": 1}


@pytest.mark.parametrize(("kind", "seed"), SHORT.items())
async def test_a_short_life(kind: str, seed: int) -> None:
    counts = await Life(kind, seed).go_on(EVENTS)
    assert counts["live"]
    assert counts["restored-ram"]
    assert counts["restorable"]
    assert all(counts[f"in {dialect}"] for dialect in DIALECTS)
    assert counts["divergence"]
    assert counts["of a sibling"] or kind not in TEAMS


@pytest.mark.parametrize(("kind", "seed"), SCRIPTED.items())
async def test_a_short_life_of_answers_cut_at_any_token(kind: str, seed: int) -> None:
    counts = await ScriptedLife(kind, seed).go_on(EVENTS)
    assert counts["restored-ram"]
    assert all(counts[f"in {dialect}"] for dialect in DIALECTS)
    assert min(counts[what] for what in ("cut", "budget", "thought", "calls")) > 4


async def test_a_short_life_on_disk(tmp_path: Path) -> None:
    counts = await Life("linear", 4, tmp_path / "park").go_on(EVENTS)
    assert counts["restored-disk"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 102))
@pytest.mark.parametrize("kind", SHORT)
async def test_a_life(kind: str, seed: int) -> None:
    await Life(kind, seed).go_on(2 * EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 102))
@pytest.mark.parametrize("kind", SHORT)
async def test_a_life_of_answers_cut_at_any_token(kind: str, seed: int) -> None:
    await ScriptedLife(kind, seed).go_on(3 * EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_DISK)
async def test_a_life_on_disk(kind: str, tmp_path: Path) -> None:
    await Life(kind, 100, tmp_path / "park").go_on(2 * EVENTS)


FAMILIES = [name for name in PRESETS if name.startswith("tiny") and WITH_HEAD not in name]
DAY = int(os.environ.get("PARKD_LIVES_SEED", date.today().toordinal()))
"""The seed of lives of real families, which differ from day to day; their names say it."""
DRAWN = Random(DAY).sample(FAMILIES, int(os.environ.get("PARKD_LIVES_FAMILIES", 4)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [DAY])
@pytest.mark.parametrize("family", DRAWN)
async def test_a_life_of_a_real_family(family: str, seed: int, tmp_path: Path) -> None:
    await FamilyLife(family, seed, tmp_path).go_on(EVENTS // 2)
