"""SGLang's own interface, without its server: that needs a card and all that its packages import at once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")


def pytest_configure() -> None:
    """Makes the packages importable without what their own files import. Modules in them are SGLang's."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return
    root = Path(found.submodule_search_locations[0])
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


@pytest.fixture(scope="session", autouse=True)
def _interface() -> None:
    pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
