"""Nothing that only some systems have is needed to import parkd, or to park on disk.

Windows and macOS are not at hand: what they lack is taken away from this system instead, after the libraries (which
bring their own ways) are loaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TAKE_AWAY = """
import importlib, os, pkgutil, sys

def load():
    count = 0
    for package in map(importlib.import_module, ("parkd", "parkd_engine")):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
                count += 1
            except ModuleNotFoundError as error:
                if error.name not in ("triton", "llama_cpp"):  # these come with cards, and with an extra
                    raise
    return count

load()  # and with it the libraries, which find their own ways on each system
for name in [name for name in sys.modules if name.partition(".")[0] in ("parkd", "parkd_engine")]:
    del sys.modules[name]
lacks = {"macos": ["O_DIRECT", "posix_fadvise", "sched_getaffinity", "memfd_create"]}
lacks["windows"] = lacks["macos"] + [
    "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "pwritev", "preadv", "pwrite", "pread", "fchmod", "geteuid",
    "getuid", "getpgid", "killpg", "sysconf", "set_blocking",
]
for name in lacks[sys.argv[1]]:
    delattr(os, name)
if sys.argv[1] == "windows":
    os.supports_dir_fd.clear()
    for name in ("fcntl", "resource", "termios", "pwd", "grp", "tty"):
        sys.modules[name] = None
sys.platform = {"windows": "win32", "macos": "darwin"}[sys.argv[1]]
"""
IMPORT = TAKE_AWAY + "print(load())"
PARK = (
    TAKE_AWAY
    + """
from pathlib import Path
import numpy
from parkd.store.files.park_directory import open_directory
from parkd.errors import ConfigError

path = Path(sys.argv[2])
files = open_directory(path)
try:
    open_directory(path)
except ConfigError as error:
    print(error.message)
file = files.create("0" * 16 + ".extent")
file.write(0, [numpy.arange(10, dtype=numpy.uint8)])
file.sync()
file.close()
files.rename("0" * 16 + ".extent", "1" * 16 + ".extent")
files.mark("1" * 16 + ".extent", 1.5e9)
files.sync()
print(files.load("1" * 16 + ".extent") == bytes(range(10)), files.times()["1" * 16 + ".extent"])
files.remove("1" * 16 + ".extent")
print(sorted(files.sizes()))
files.close()
open_directory(path).close()
"""
)


def run(script: str, system: str, *given: object) -> list[str]:
    """The lines that the script prints in a process without what `system` lacks."""
    done = subprocess.run(
        [sys.executable, "-c", script, system, *map(str, given)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_found_by_use_27_every_module_is_imported_without_what_a_system_lacks(system: str) -> None:
    """Issue 22, item 27: `fcntl` was imported by the disk tier and by the cache of models."""
    assert int(run(IMPORT, system)[-1]) > 250


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_found_by_use_27_a_park_directory_is_locked_written_and_read(tmp_path: Path, system: str) -> None:
    busy, content, left = run(PARK, system, tmp_path / "park")
    assert "in use by another parkd" in busy
    assert content == "True 1500000000.0"
    assert left == "['lock', 'parkd-directory']"
