"""What another server tells of a turn, in place of what is counted here. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parkd.types import CacheOutcome, CacheReport, Timings, Told


def told_report(
    report: CacheReport, told: Told | None, *, is_over: bool, own_tokens: Callable[[], int] | None = None
) -> CacheReport:
    """The report with the server's counts. Nothing is claimed of its state that it does not say; until the turn
    `is_over` it may still say it. `own_tokens` says how much of the prompt the same key sent before: of what the server
    gave up, it is told no more (None: all)."""
    if told is None:
        return report
    gone = told.gone if is_over else ""
    if gone and own_tokens is not None and own_tokens() <= told.gone_from:
        gone = ""
    missing = told.why if is_over and told.cached_tokens is None else ""
    return replace(
        report,
        outcome=CacheOutcome.UPSTREAM,
        prompt_tokens=told.prompt_tokens,
        reused_tokens=told.cached_tokens or 0,
        is_known=told.cached_tokens is not None,
        written_tokens=0,
        why="; ".join(filter(None, (gone, report.why, missing))),
        held_tokens=told.held_tokens,
    )


def told_timings(timings: Timings, told: Told | None) -> Timings:
    if told is None:
        return timings
    return replace(
        timings,
        prefill_tokens=max(0, told.prompt_tokens - (told.cached_tokens or 0)),
        output_tokens=timings.output_tokens if told.output_tokens is None else told.output_tokens,
    )
