"""Records a turn that has ended: in counters, in the log, and in the trace if there is one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from parkd.errors import ParkdError
from parkd.lane.live_rows import LiveRows
from parkd.lane.metrics import Metrics
from parkd.lane.turn import Turn
from parkd.types import CacheMode, Units

requests_log = logging.getLogger("parkd.requests")


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

    def __init__(self, metrics: Metrics, trace: TurnTrace | None) -> None:
        self._metrics = metrics
        self._trace = trace

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
            len(turn.prompt),
            turn.report.reused_tokens if turn.report else 0,
            turn.report.outcome.value if turn.report else "-",
            turn.timings.wait_s,
            turn.timings.first_token_s,
            turn.timings.output_tokens,
            (turn.report.why if turn.report else "") or "-",
            f" end={error.code}" if error is not None else "",
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
