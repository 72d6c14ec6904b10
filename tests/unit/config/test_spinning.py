"""Found by use 18: on a machine that is busy with something else, threads that spin without a bound cost most."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parkd.config.spinning import SPINS, bound_spinning


@pytest.mark.parametrize("chosen", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_user_has_chosen_stays(chosen: str) -> None:
    environment = {chosen: "7"}
    bound_spinning(environment)
    assert environment == {chosen: "7"}


def test_the_runtime_of_torch_takes_the_bound() -> None:
    """The runtime itself is asked: it prints its settings when torch loads it."""
    if sys.platform != "linux":
        pytest.skip("torch has GNU's runtime on Linux only")
    environment = {name: value for name, value in os.environ.items() if name not in (*SPINS, "OMP_WAIT_POLICY")}
    code = "from parkd.config.spinning import bound_spinning as b; b(); import torch; torch.ones(9).sum()"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "GOMP_SPINCOUNT = '100000'" in shown.stderr
