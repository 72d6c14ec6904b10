"""Optional abilities of engines. Callers check for each with `isinstance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from parkd.state import Checksums, Transfer
from parkd.types import DraftCounts, SamplingParams, TokenIds, TokenMask


class CaptureInFlight(Protocol):
    """A capture whose copy goes on while the engine works."""

    def wait(self) -> Checksums:
        """Blocks until every byte is in the buffers; from any thread. Raises EngineFailure, EngineLost.

        The buffers may be written to until this returns or raises.
        """


@runtime_checkable
class OverlappingEngine(Protocol):
    """Captures that the next prompt need not wait for."""

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:
        """Begins a capture and returns at once; None if this state can only be captured with `capture`.

        The engine makes sure that no row is overwritten before it is copied. Raises as `capture`.
        """


@runtime_checkable
class ReadingRestoreEngine(Protocol):
    """Reading on while a restore is still under way."""

    @property
    def reads_while_restoring(self) -> bool:
        """Whether that saves time on the engine's devices."""

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        """Does `restore`, then `extend` by `token_ids`, which contain no image and fit the context.

        The position is committed only after all checksums were compared: nothing stays of damaged rows, nor of what
        was read after them. Raises RestoreFailed and EngineFailure, each after a reset.
        """


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine in another process, which may restart, and which decides itself what it reuses."""

    @property
    def is_awake(self) -> bool:
        """Whether the process has answered so recently that its live state is known without asking. Never waits. May be
        called from any thread, between engine calls."""

    def awake(self) -> None:
        """Call it before a turn decides how to start: if the process was restarted, nothing is live.

        Raises EngineFailure, and EngineLost if it serves another model now.
        """

    def begin_prompt(
        self, token_ids: TokenIds, sampling: SamplingParams, mask: TokenMask | None, limit: int | None
    ) -> int:
        """Sends the whole prompt; `extend` and `generate` then follow the answer, which has at most `limit` tokens.

        Returns the position from which the process really starts, now also `position`. It is lower than before if the
        process no longer held that state. Raises EngineFailure and InvalidRequest, after which nothing is live.
        """


@runtime_checkable
class DraftingEngine(Protocol):
    """Guessing tokens ahead with a draft head."""

    @property
    def drafts(self) -> DraftCounts:
        """Counts of the last answer."""
