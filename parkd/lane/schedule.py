"""Who runs next, and until when: pure decisions over the turns that are there.

A turn that waits or is paused is a job. Between two decisions a job runs for a slice: at least so long that stopping it
and going on costs little beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """A turn, as far as its place in the order depends on it."""

    number: int
    """In the order of arrival."""


class Schedule(Protocol):
    """An order of jobs."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        """The job that runs now; there is at least one."""

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        """When the running job is to give way to others; None: it runs to its end unless another job comes."""


@dataclass(frozen=True)
class Fifo:
    """In the order of arrival, each to its end."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:  # noqa: ARG002
        return min(jobs, key=lambda job: job.number)

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:  # noqa: ARG002
        return None
