"""Decoding behind a restore is the work it was before (report 19, Strata#528: a third of the speed after one)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parkd_engine import Session, capture, host_transfer, restore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.engine.kit.core_models import FAMILIES, tiny_model, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model

PROMPT = 90


class OperationLog(TorchDispatchMode):
    """Every operation that runs, with the shapes and strides of what it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        self.seen.append((str(func), [(tuple(each.shape), each.stride(), each.dtype) for each in tensors]))
        return func(*args, **(kwargs or {}))


def operations_of_a_step(session: Session, token: int) -> list[Any]:
    with OperationLog() as log:
        session.step(token)
    return log.seen


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3.5", "qwen4-exp", "deepseek-v3"])
def test_a_step_behind_a_restore_runs_what_it_ran_before(family: str, kv_format: str | None) -> None:
    model = tiny_model(family) if family in FAMILIES else hybrid_model(family)
    session = tiny_session(2, model, context=256, kv_format=kv_format)
    ids = token_ids(PROMPT + 2)
    session.extend(ids[:PROMPT])
    plan = host_transfer(session, PROMPT, block_tokens=32)
    sums = capture(session, plan)
    session.step(int(ids[PROMPT]))
    expected = operations_of_a_step(session, int(ids[PROMPT + 1]))
    session.reset()
    session.extend(token_ids(50, seed=7))
    restore(session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed if len(sums.fixed) else None))
    # What follows from rows (an index) is made once, by the first.
    session.step(int(ids[PROMPT]))
    again = operations_of_a_step(session, int(ids[PROMPT + 1]))
    assert len(expected) > 50
    assert again == expected
