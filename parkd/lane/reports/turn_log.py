"""Records a turn that has ended: in counters, in the log, and in the trace if there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from parkd.errors import ParkdError
from parkd.lane.live_rows import LiveRows
from parkd.lane.metrics import Metrics
from parkd.lane.reports.ledger_rows import LedgerWriter
from parkd.lane.turn import Turn
from parkd.types import CacheMode, Progress, Units

requests_log = logging.getLogger("parkd.requests")

READING_LINE_S = 5.0
"""Time between two lines about the reading of one prompt."""
LONG_READING_TOKENS = 1024
"""A prompt of which at least this many tokens must be read has a line when its reading begins."""


class TurnTrace(Protocol):
    """Records a turn that has ended. Never waits, and records no text."""

    def __call__(
        self,
        *,
        at_s: float,
        key_digest: bytes,
        prompt_tokens: int,
        units: Units,
        end: str,
        extra: Mapping[str, Any],
    ) -> None: ...


class TurnLog:
    """Writes numbers and reasons, never text of prompts."""

    def __init__(
        self,
        metrics: Metrics,
        trace: TurnTrace | None,
        ledger: LedgerWriter | None = None,
        tokens_in: Callable[[int], int] = lambda units: units,
    ) -> None:
        """`tokens_in` says how many tokens so many units are, which may be characters."""
        self._tokens_in = tokens_in
        self._metrics = metrics
        self._trace = trace
        self._ledger = ledger
        self._line_due_s = READING_LINE_S
        """When the running turn's next line about its reading is due, in seconds since the reading began."""

    def record(self, turn: Turn, error: ParkdError | None) -> None:
        """Counts a turn that has ended, even if it never ran, and writes its log line."""
        turn.release_awaited()
        self._metrics.requests.labels("ok" if error is None else error.code).inc()
        self._metrics.finished(turn.timings)
        if turn.explained is not None:
            turn.explained.timings = turn.timings
            turn.explained.state = "done" if error is None else "failed"
            turn.explained.end = turn.explained.end if error is None else error.code
        requests_log.info(
            "key=%s prompt=%d reused=%d cache=%s wait=%.1fs ttft=%.1fs out=%d why=%s%s",
            turn.caller,
            turn.report.prompt_tokens if turn.report else self._tokens_in(len(turn.prompt)),
            turn.report.reused_tokens if turn.report else 0,
            turn.report.outcome.value if turn.report else "-",
            turn.timings.wait_s,
            turn.timings.first_token_s,
            turn.timings.output_tokens,
            (turn.report.why if turn.report else "") or "-",
            f" end={error.code}" if error is not None else "",
        )

        if turn.began_s is None:
            self.bill(turn)

    def bill(self, turn: Turn, conversation: str = "") -> None:
        """Notes a turn that was recorded in the ledger, once: when it is known as what conversation it is parked, or
        that it is not."""
        if self._ledger is not None:
            self._ledger.note(turn, conversation)

    def reading(self, turn: Turn, progress: Progress) -> None:
        """Tells how far a prompt is read: when that begins and its length promises a wait, then every few seconds."""
        if progress.read_tokens == 0:
            self._line_due_s = READING_LINE_S
            if progress.total_tokens < LONG_READING_TOKENS:
                return
        elif progress.elapsed_s < self._line_due_s or progress.read_tokens >= progress.total_tokens:
            return
        self._line_due_s = progress.elapsed_s + READING_LINE_S
        speed, left_s = progress.tokens_per_s, progress.left_s
        requests_log.info(
            "key=%s prompt=%d reused=%d reading=%d/%d%s",
            turn.caller,
            self._tokens_in(len(turn.prompt)),
            self._tokens_in(progress.reused_tokens),
            self._tokens_in(progress.read_tokens),
            self._tokens_in(progress.total_tokens),
            "" if left_s is None or speed is None else f" speed={speed:.0f}tok/s left={left_s:.0f}s",
        )

    def note(self, turn: Turn, live: LiveRows, error: ParkdError | None) -> None:
        """Adds the turn to the recorded trace, unless it asked not to be kept."""
        report, timings = turn.report, turn.timings
        if self._trace is None or report is None or live.key != turn.prompt.key:
            return
        if turn.request.cache.mode is not CacheMode.USE:
            return
        extra = {
            "cache": report.outcome.value,
            "reused": report.reused_tokens,
            "wait_s": round(timings.wait_s, 3),
            "restore_s": round(timings.restore_s, 3),
            "prefill_s": round(timings.prefill_s, 3),
            "decode_s": round(timings.decode_s, 3),
        }
        self._trace(
            at_s=turn.arrived_s,
            key_digest=turn.prompt.key.digest,
            prompt_tokens=len(turn.prompt),
            units=live.units,
            end="stop" if error is None else error.code,
            extra=extra,
        )
