"""A browser for the tests of the page: Debian's chromium, driven by Playwright, or nothing is tested here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.npm_packages import npm_package

NO_BROWSER = "the page is not tested: it needs Playwright (pip install '.[page-test]') and chromium (make test-page)"
AXE_VERSION = "4.14.1"


def chromium() -> str | None:
    return os.environ.get("PARKD_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=NO_BROWSER)
    path = chromium()
    if path is None:
        pytest.skip(NO_BROWSER)
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
        opened = playwright.chromium.launch(executable_path=path, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, from npm."""
    return (npm_package("axe-core", AXE_VERSION) / "axe.min.js").read_text(encoding="utf-8")
