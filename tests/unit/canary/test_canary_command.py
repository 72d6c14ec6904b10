"""`parkd canary`, and the canary of a first start: what is printed, the exit codes, and what is remembered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parkd import cli
from parkd.cli import canary
from parkd.cli.startup import CANARY_FAILED, Budget, describe
from parkd.state import Grain, StateLayout, Transfer
from tests.fakes.engine import FakeEngine

WORDS = ["canary", "--model", "random:tiny-llama", "--ctx-size", "512", "--devices", "cpu,cpu"]


def no_progress(_what: str, _share: float) -> None: ...


class Forgetful(FakeEngine):
    """Restores nothing."""

    def restore(self, transfer: Transfer) -> None:
        super().restore(transfer)
        self.truncate(transfer.position - 1)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_that_state_came_back(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main([*WORDS, *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    if as_json:
        told = json.loads(out)
        assert (told["passed"], told["steps"], told["differences"]) == (True, 4, [])
        assert told["devices"] == ["cpu", "cpu"]
    else:
        assert "canary    state came back bit for bit in 4 trials" in out
    assert len(list((tmp_path / "parkd" / "canary").glob("*.json"))) == 1


def test_a_difference_is_exit_code_1_and_is_not_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canary.report(Forgetful(), tmp_path, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["passed"]
    assert [each["step"] for each in told["differences"]] == [
        "restored at its end",
        "restored at an earlier position",
        "another conversation, restored at its end",
    ]
    assert not (tmp_path / "canary").exists()
    assert canary.report(Forgetful(), tmp_path, as_json=False) == 1
    assert "restored at its end: the position" in capsys.readouterr().out


@pytest.mark.parametrize("fixed_bytes", [0, 64])
def test_a_first_start_tries_and_the_next_does_not(
    fixed_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(fixed_bytes=fixed_bytes)
    assert canary.at_start(engine, tmp_path, no_progress) == ()
    assert "came back bit for bit in 4 trials" in capsys.readouterr().out
    monkeypatch.setattr(engine, "extend", None)
    assert canary.at_start(engine, tmp_path, no_progress) == ()
    assert capsys.readouterr().out == ""


def test_a_start_whose_canary_fails_says_what_differed_and_that_parking_is_off(tmp_path: Path) -> None:
    engine = Forgetful()
    failures = canary.at_start(engine, tmp_path, no_progress)
    assert len(failures) == 3
    lines = describe(engine.info, Budget(0, 0, 0), "http://x", needs_key=False, warning=None, failures=failures)
    assert f"budget    {CANARY_FAILED}" in lines
    assert [line for line in lines if line.startswith("warning   restored at its end: ")]
    assert canary.at_start(engine, tmp_path, no_progress) == failures, "a failure is tried again"


def test_the_files_of_a_llama_server_are_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(stages=1)
    layout = StateLayout(engine.info.layout.stages, "xxh3-64", Grain.FILE)
    object.__setattr__(engine.info, "layout", layout)
    assert canary.at_start(engine, tmp_path, no_progress) == ()
    assert "canary    not tried: the state is in a llama-server's own files" in capsys.readouterr().out
    assert not (tmp_path / "canary").exists()
