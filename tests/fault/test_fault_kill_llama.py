"""Few of the lives of `tests.fault.killed_lives`: parkd over llama.cpp in process, and before a llama-server."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.fault.killed_lives import WAYS, live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIVES = 2


@pytest.mark.parametrize("way", WAYS)
def test_killed_again_and_again_it_answers_right(tmp_path: Path, way: str) -> None:
    needed = "llama_cpp" if way == "in process" else "xllamacpp"
    found = importlib.util.find_spec(needed)
    if found is None or found.origin is None:  # a folder of tests has the name too
        pytest.skip(f"{needed} is not installed")
    talks = live(way, tmp_path, LIVES)
    # Where parkd itself lives on, its files are what it calls memory.
    came_back = talks.caches["restored-ram" if way == "upstream" else "restored-disk"]
    assert came_back, "nothing ever came back, so nothing was tried"
