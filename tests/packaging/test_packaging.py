"""What a stranger gets: the wheel and the sdist, the unit file, the container file, completion (found by use 26)."""

from __future__ import annotations

import configparser
import email
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from parkd import __version__, cli
from parkd.cli import arguments
from parkd.config import SETTINGS
from parkd.proxy.page.static import FOLDER

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it. Built from a copy, as building writes there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.split("\n"):
        if name.startswith(("parkd/", "engine/", "pyproject.toml", "README.md", "LICENSE", "setup")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return out


@pytest.mark.slow
def test_the_wheel_installs_no_package_of_a_generic_name(built: Path) -> None:
    """It once installed a package named `engine`, which any project may have."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        assert {f"parkd/proxy/page/files/{path.name}" for path in FOLDER.iterdir()} <= set(archive.namelist())
        assert "parkd_engine/kernels/coded_products.cu" in archive.namelist()
        [metadata] = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    assert tops == {"parkd", "parkd_engine", f"parkd-{__version__}.dist-info"}
    said = email.message_from_bytes(metadata)
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("parkd", __version__, "Apache-2.0")
    assert {"llama-cpp", "cuda", "demo"} <= set(said.get_all("Provides-Extra") or ())
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("engine/parkd_engine/session.py") for name in archive.getnames())


@pytest.mark.slow
def test_what_is_installed_runs_away_from_its_sources(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    code = "import parkd, parkd_engine, parkd.cli; print(parkd.__file__, parkd_engine.__file__)"
    environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(target)) for path in shown.stdout.split())
    command = [
        sys.executable,
        str(target / "bin" / "parkd"),
        "plan",
        "--model",
        "random:tiny-llama",
        "--devices",
        "cpu",
    ]
    planned = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr


def test_the_unit_starts_parkd_with_flags_that_exist() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(PACKAGING / "parkd.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program == "/opt/parkd/bin/parkd"
    flags = arguments.parse(words).flags
    assert flags["park-dir"].startswith("/var/lib/" + unit["Service"]["StateDirectory"])
    assert unit["Service"]["Environment"] == "XDG_CACHE_HOME=/var/cache/" + unit["Service"]["CacheDirectory"]


def test_the_container_installs_by_the_script_and_starts_parkd() -> None:
    lines = (PACKAGING / "Containerfile").read_text().splitlines()
    assert any(line.startswith("RUN bash /install.sh /opt/parkd /wheels/") for line in lines)
    [entry] = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")]
    program, *words = [word.strip('"') for word in entry.strip("[]").split(", ")]
    assert program == "/opt/parkd/bin/parkd"
    assert arguments.parse(words).flags == {"host": "0.0.0.0"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_complete_every_flag_and_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    missing = [setting.name for setting in SETTINGS if setting.name not in script]
    assert not missing
    assert all(command in script for command in (*arguments.COMMANDS, *arguments.OTHER_COMMANDS))
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 2
    assert "bash, zsh, tcsh" in capsys.readouterr().err
