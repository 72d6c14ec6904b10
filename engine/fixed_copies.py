"""Copies fixed state out: each part of a plan comes from the checkpoint of its position, or from the live state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.copies import host_tensor
from engine.session import Session
from engine.transfer import CopySteps

if TYPE_CHECKING:
    from engine.snapshot import Plan


def copy_fixed_out(session: Session, plan: Plan, steps: CopySteps) -> npt.NDArray[np.uint64]:
    """Fills the fixed parts of a checked plan; returns their checksums `[parts, stages]`. Raises what a copy raises."""
    parts = [part.position for part in plan.stages[0].fixed]
    sums = np.zeros((len(parts), len(plan.stages)), dtype=np.uint64)
    for index, position in enumerate(parts):
        copies = session.fixed_state.at(position) or session.fixed_state.live(position)
        running = []
        for stage, source in zip(plan.stages, copies, strict=True):
            _copy(stage.fixed[index].buffer, source, steps)
            running.append(session.checksum.start())
            running[-1].update(source)
        sums[index] = session.checksum.values(running)
    return sums


def checkpoint_of(session: Session, position: int) -> list[torch.Tensor]:
    """Copies on the devices of all stages' fixed state at `position`, which is a checkpoint's or the present one."""
    kept = session.fixed_state.at(position)
    return kept if kept is not None else [live.clone() for live in session.fixed_state.live(position)]


def _copy(buffer: npt.NDArray[np.uint8], source: torch.Tensor, steps: CopySteps) -> None:
    if source.device.type == "cpu":
        steps.host(buffer, source.numpy())
        return
    steps.device(host_tensor(buffer), source)
    # The buffer is whole when this returns: it may be another conversation's as soon as a capture has failed.
    torch.cuda.current_stream(source.device).synchronize()
