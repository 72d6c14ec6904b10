"""Which error an exception of a library or a device becomes.

in a stage       StageFailed, with advice if the device has too little memory       the position is valid
anywhere         EngineLost if the device stopped answering                         the process must end
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parkd.errors import EngineFailure, EngineLost, StageFailed, unfinished

_LOST_SIGNS = ("device-side assert", "illegal memory access", "unspecified launch failure", "Xid", "uncorrectable ECC")


def stage_failed(stage: int, doing: str, cause: BaseException) -> EngineFailure:
    """The error to raise from `cause`, an exception of stage `stage`."""
    reason = f"stage {stage} failed in {doing}: {type(cause).__name__}: {cause}"
    if is_lost(cause):
        return lost(reason)
    if isinstance(cause, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return StageFailed(
            stage,
            f"The device has too little free memory for this turn: {reason}. Start with a smaller --batch-size or "
            f"--ctx-size, or send a shorter prompt.",
        )
    return StageFailed(stage, unfinished(reason))


@contextmanager
def noticing_loss() -> Iterator[None]:
    """Raises EngineLost for an exception of a device that stopped answering. Others pass through."""
    try:
        yield
    except EngineLost:
        raise
    except Exception as error:
        if is_lost(error):
            raise lost(str(error)) from error
        raise


def is_lost(error: BaseException) -> bool:
    """Whether the device's context is poisoned, so that every later call on it would fail too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.AcceleratorError) and not isinstance(cause, torch.OutOfMemoryError):
            return True
        if any(sign in str(cause) for sign in _LOST_SIGNS):
            return True
        cause = cause.__cause__
    return False


def lost(reason: str) -> EngineLost:
    return EngineLost(f"The device stopped working and parkd must be restarted: {reason}")
