"""What another server tells of a turn, in place of what is counted here. Pure."""

from __future__ import annotations

from dataclasses import replace

from parkd.types import CacheOutcome, CacheReport, Timings, Told


def told_report(report: CacheReport, told: Told | None, *, is_over: bool) -> CacheReport:
    """The report with the server's counts. Nothing is claimed of its state that it does not say; until the turn
    `is_over` it may still say it."""
    if told is None:
        return report
    missing = told.why if is_over and told.cached_tokens is None else ""
    return replace(
        report,
        outcome=CacheOutcome.UPSTREAM,
        prompt_tokens=told.prompt_tokens,
        reused_tokens=told.cached_tokens or 0,
        is_known=told.cached_tokens is not None,
        written_tokens=0,
        why="; ".join(filter(None, (report.why, missing))),
    )


def told_timings(timings: Timings, told: Told | None) -> Timings:
    if told is None:
        return timings
    return replace(
        timings,
        prefill_tokens=max(0, told.prompt_tokens - (told.cached_tokens or 0)),
        output_tokens=timings.output_tokens if told.output_tokens is None else told.output_tokens,
    )
