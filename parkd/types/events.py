"""What a turn yields: the events that every dialect writes in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parkd.types.report import CacheReport, Timings


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's start is settled: restored, live or cold. Comes before any text."""

    report: CacheReport


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens read so far, of all that must be read; keeps a waiting client alive."""

    read_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking, apart from its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call carries its id and name; `arguments` pieces concatenate to JSON."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a turn that went well."""

    reason: FinishReason
    report: CacheReport
    timings: Timings
    reasoning_tokens: int = 0
    stop_string: str | None = None


Event = Started | Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished
"""A failed turn raises a `ParkdError` instead of yielding an event."""
