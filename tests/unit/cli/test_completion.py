"""What bash offers by the script that `parkd completion bash` prints."""

from __future__ import annotations

import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from parkd import cli

SERVER = {"--url", "--api-key"}
ASK = """
source ./script
COMP_WORDS=(parkd "$@")
COMP_CWORD=$#
_shtab_parkd
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch, (folder / "script").open("w") as out, redirect_stdout(out):
        patch.setenv("PARKD_API_KEY", "k-secret")
        assert cli.main(["completion", "bash"]) == 0
    (folder / "talk.parkd").touch()
    (folder / "parked").mkdir()
    return folder


def offered(folder: Path, *words: str) -> set[str]:
    asked = subprocess.run(["bash", "-c", ASK, "bash", *words], cwd=folder, capture_output=True, text=True, check=True)
    assert not asked.stderr
    return set(asked.stdout.split())


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["ps"], {"--help", "--json", *SERVER}),
        (["why"], {"--help", "--json", *SERVER}),
        (["bill"], {"--help", "--json", "--since", *SERVER}),
        (["keep", "3f9c"], {"--help", "--json", "--for", *SERVER}),
        (["top"], {"--help", "--json", "--step", "--once", *SERVER}),
        (["export", "3f9c"], {"--help", "--park-dir", "--force", *SERVER}),
        (["import"], {"--help", "--park-dir", "--into", "--api-key-file", *SERVER}),
        (
            ["forget"],  # of a running server, and of a directory
            {"--help", "--json", "--park-dir", "--all", "--key", "--conversation", "--list", "--api-key-file", *SERVER},
        ),
    ],
)
def test_a_command_is_offered_its_own_flags_and_no_others(folder: Path, words: list[str], flags: set[str]) -> None:
    assert offered(folder, *words, "--") == flags


@pytest.mark.parametrize("words", [[], ["serve"], ["plan"], ["canary"], ["demo"]])
def test_commands_that_take_the_settings_are_offered_them(folder: Path, words: list[str]) -> None:
    assert offered(folder, *words, "--sched") == {"--schedule"}
    assert offered(folder, *words, "--js") == ({"--json"} if words == ["canary"] else set())


def test_files_directories_and_shells_are_offered_where_they_belong(folder: Path) -> None:
    assert offered(folder, "export", "3f9c", "t") == {"talk.parkd"}
    assert offered(folder, "import", "--park-dir", "") == {"parked"}
    assert offered(folder, "replay", "--pl") == {"--plot"}
    assert offered(folder, "completion", "") == {"bash", "zsh", "tcsh"}
    assert offered(folder, "p") == {"plan", "ps", "pin"}


def test_no_key_is_in_the_script(folder: Path) -> None:
    assert "k-secret" not in (folder / "script").read_text()
