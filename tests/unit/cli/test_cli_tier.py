"""`parkd tier` with and without the distribution that has it."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from parkd.cli import main, tier


def test_its_words_go_to_parkd_tier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = EntryPoint(name="tier", value="parkd_tier.cli:main", group="parkd.commands")
    monkeypatch.setattr(tier, "entry_points", lambda **asked: EntryPoints([entry]).select(**asked))
    assert main(["tier", "config", "--dir", "/x", "--ram-mib", "100", "--disk-mib", "100"]) == 0
    assert '"kv_connector": "ParkdConnector"' in capsys.readouterr().out


def test_without_it_is_said_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tier, "entry_points", lambda **_: EntryPoints([]))
    assert main(["tier", "config"]) == 2
    assert "pip install parkd-tier in the environment of vLLM" in capsys.readouterr().err
