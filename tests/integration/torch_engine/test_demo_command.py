"""`parkd demo` as a newcomer runs it: real servers, the demo model, HTTP; on shorter texts, as all is read twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from parkd import cli
from parkd.demo import command as demo


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """The command takes SIGTERM over, to take its servers with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_own_signals")
def test_the_demo_restores_a_conversation_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "LONG_CHARACTERS", 3_000)
    monkeypatch.setattr(demo, "SHORT_CHARACTERS", 1_000)
    code = cli.main(["demo", "--conversation-cache-mib", "512"])
    told = capsys.readouterr()
    assert code == 0, f"{told.out}\n{told.err}"
    rows = {line[:12].strip(): line[12:].split() for line in told.out.splitlines() if line.startswith(("A", "B"))}
    assert rows["A1"][-1] == "cold"
    assert rows["A + turn"][-1] == "live"
    assert rows["A2 after B"][-1] == "restored-ram"
    assert "the answers are the same." in told.out
