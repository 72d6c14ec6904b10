"""What a turn yields: the events that every dialect writes in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from parkd.types.report import CacheReport, Timings


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    """Another server withheld the rest."""
    CANCELLED = "cancelled"

    @property
    def is_cut(self) -> bool:
        """The model would have gone on, or has, and the client does not get it."""
        return self in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's start is settled: restored, live or cold. Comes before any text."""

    report: CacheReport


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens read so far, of all that must be read; keeps a waiting client alive."""

    read_tokens: int
    total_tokens: int
    reused_tokens: int = 0
    """Tokens of the prompt before them, which need not be read."""
    elapsed_s: float = 0.0
    """Since the reading began."""

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first tokens are read."""
        return self.read_tokens / self.elapsed_s if self.elapsed_s and self.read_tokens else None

    @property
    def left_s(self) -> float | None:
        """Expected seconds until the prompt is read, at the speed so far."""
        speed = self.tokens_per_s
        return None if speed is None else (self.total_tokens - self.read_tokens) / speed

    @property
    def shown(self) -> Mapping[str, int]:
        """In llama-server's fields: `processed` counts from the prompt's start, as `total` does. The prompt's last
        token, which is read with the answer, is left out of both."""
        return {
            "total": self.reused_tokens + self.total_tokens,
            "cache": self.reused_tokens,
            "processed": self.reused_tokens + self.read_tokens,
            "time_ms": round(self.elapsed_s * 1000),
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer's text with the logarithm of its probability, and the most probable ones in its place."""

    piece: bytes
    """What it writes; part of a character, if the character takes several tokens."""
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    """Most probable first."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that begin in this text; empty unless the request asked for them."""
    timings: Timings | None = None
    """Up to this piece, as in the other pieces of an answer; None unless the request asked for it."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking, apart from its answer."""

    text: str
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call carries its id and name; `arguments` pieces concatenate to JSON."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    timings: Timings | None = None


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
