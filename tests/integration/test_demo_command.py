"""`parkd demo` as a newcomer runs it: real servers, the demo model, over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_restores_a_conversation_and_ends_well() -> None:
    words = [sys.executable, "-m", "parkd", "demo", "--conversation-cache-mib", "512"]
    ran = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    rows = {line[:12].strip(): line[12:].split() for line in ran.stdout.splitlines() if line.startswith(("A", "B"))}
    assert rows["A1"][-1] == "cold"
    assert rows["A + turn"][-1] == "live"
    assert rows["A2 after B"][-1] == "restored-ram"
    assert "the answers are the same." in ran.stdout
