"""What an engine may offer besides, each asked for by its Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from parkd.types import Checksums, DraftCounts, SamplingParams, TokenIds, TokenMask, Transfer


class CaptureInFlight(Protocol):
    """A capture that goes on while the engine does other things."""

    def wait(self) -> Checksums:
        """Blocks until every byte is in the buffers; from any thread. Raises EngineFailure, EngineLost.

        Until it returns, or has raised, the buffers may be written to.
        """


@runtime_checkable
class OverlappingEngine(Protocol):
    """What an engine may offer besides: captures that the next prompt does not wait for."""

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:
        """Begins what `capture` does and returns at once; None if this state can only be captured by waiting.

        The engine itself sees to it that no row is overwritten before it is copied.
        """


@runtime_checkable
class ReadingRestoreEngine(Protocol):
    """What an engine may offer besides: it reads on while what is restored is still on its way."""

    @property
    def reads_while_restoring(self) -> bool:
        """Whether that gains anything where this engine runs."""

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        """`restore`, then `extend` by `token_ids`, which hold no picture and fit the context, whatever the batch size.

        As with `restore`, the position is committed only once every checksum was compared: of damaged rows, and of what
        was read behind them, nothing is left. Raises RestoreFailed and EngineFailure, each after a reset.
        """


@runtime_checkable
class RemoteEngine(Protocol):
    """What an engine that is another process does besides: it may go away, and it decides itself what it reuses."""

    def awake(self) -> None:
        """To be called before a turn decides how to start: what was live is gone if the process is another one.

        Raises EngineFailure; EngineLost if it serves another model now.
        """

    def begin_prompt(
        self, token_ids: TokenIds, sampling: SamplingParams, mask: TokenMask | None, limit: int | None
    ) -> int:
        """Sends the whole prompt ahead; `extend` and `generate` then follow the answer to it. `limit` is the longest.

        Returns the position at which the engine really starts, which is `position` then: less than before if the
        process did not hold what it was believed to. Raises EngineFailure, InvalidRequest; then nothing is live.
        """


@runtime_checkable
class DraftingEngine(Protocol):
    """What an engine may offer besides: it guesses tokens ahead, and says how well it did."""

    @property
    def drafts(self) -> DraftCounts:
        """Of the answer generated last."""
