"""A browser for the tests of the page: Debian's chromium, driven by Playwright, or nothing is tested here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NO_BROWSER = "the page is not tested: it needs Playwright (pip install '.[page-test]') and chromium (make test-page)"
AXE_VERSION = "4.14.1"
FETCH_TIMEOUT_S = 120


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
    """The source of axe-core, from npm, fetched once."""
    cache = Path(os.environ.get("PARKD_TEST_CACHE", Path.home() / ".cache" / "parkd-tests"))
    folder = cache / f"axe-core-{AXE_VERSION}"
    source = folder / "package" / "axe.min.js"
    if not source.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, so axe-core cannot be fetched")
        folder.mkdir(parents=True, exist_ok=True)
        fetch = [npm, "pack", "--silent", f"axe-core@{AXE_VERSION}"]
        try:
            subprocess.run(fetch, cwd=folder, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm could not fetch axe-core: {error}")
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
    return source.read_text(encoding="utf-8")
