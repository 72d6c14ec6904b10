"""A request on its way: what the HTTP side and the lane share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parkd.engine_adapter.base import Engine
from parkd.errors import ParkdError
from parkd.lane.answer import Answer
from parkd.lane.events import EventChannel
from parkd.lane.reports.explain import Explained, OwnNearest
from parkd.lane.reports.roster import FirstWords
from parkd.types import CacheReport, PromptIdentity, Timings, TokenMask, TurnClass, TurnRequest, Units

TAIL_TOKENS = 64
"""Tokens at the end of a prompt that show whether thinking is open."""


@dataclass(eq=False)
class Pauses:
    """What is known of a turn's pauses."""

    key_digest: bytes
    """Under which its state is parked meanwhile."""
    positions: list[int] = field(default_factory=list)
    """Where it was paused, as far as nothing else asked for a checkpoint there."""


@dataclass(eq=False)
class Turn:
    """A request from its arrival to its last event."""

    request_id: str
    caller: str
    """For the log line's `key=`."""
    request: TurnRequest
    prompt: PromptIdentity
    arrived_s: float
    queued_s: float
    """When the turn was ready for the queue: `arrived_s` plus the time to parse, render and tokenise."""
    mask: TokenMask | None = None
    tail: str = ""
    """The end of the rendered prompt, as `prompt_tail` gives it."""
    channel: EventChannel = field(default_factory=EventChannel)
    kind: TurnClass = TurnClass.INTERACTIVE
    start_cost_s: float | None = None
    """Expected seconds until its prompt is read, if that was asked while it waited."""
    pause: threading.Event = field(default_factory=threading.Event)
    """Set when it is to give way. The engine looks at it between chunks and tokens."""
    is_aside: bool = False
    """It is paused, so the engine and its live state are another's."""
    pauses: Pauses | None = None
    """None: it was never paused."""
    row_tokens: int = 0
    """The rows that it has for sure, where all seats have theirs together; 0: those with which it begins."""
    live_tokens: int = 0
    """Tokens of its prompt whose state is in its seat: others may have it copied. 0 while it is paused."""
    places: tuple[int, ...] | None = None
    """Positions in its prompt where a model with fixed state can be resumed, once it is read; None: not known yet."""
    common: dict[Turn, int] = field(default_factory=dict, repr=False)
    """While it waits: how many tokens it has in common with turns that have begun (`joining.common_tokens`)."""
    submitted: bool = False
    """Whether the turn was submitted to the lane."""
    began_s: float | None = None
    """When the lane began to run it."""
    report: CacheReport | None = None
    timings: Timings = field(default_factory=Timings)
    explained: Explained | None = None
    """Its entry for `/parkd/explain`."""
    earlier: Explained | None = None
    """The request that the client wants it compared with, if that is remembered."""
    own_nearest: Callable[[], OwnNearest] | None = None
    """What the caller's key itself sent and got. The turn is told of parked state only as far as this goes. None: all
    state in the namespace is the caller's own."""
    answer: Answer | None = None
    """What is generated so far; filled on the engine's thread, and only its numbers may be read elsewhere."""
    note_answer: Callable[[Units], None] = lambda _units: None
    """Called with the units of prompt and answer."""
    note_kept: Callable[[int], None] = lambda _tokens: None
    """Called with how many of these have state that is kept."""
    own_earlier: Callable[[], Sequence[Explained]] = tuple
    """What the caller's key sent before, the newest first: for the ledger."""
    client: str = ""
    """The family of the client's user agent."""
    key_name: str = ""
    api: str = ""
    """The path that it came by."""
    is_billed: bool = False
    """Whether it was noted in the ledger."""
    words: FirstWords | None = None
    """The first words of its messages, for its owner; None unless --page-text allows it."""
    release_awaited: Callable[[], None] = lambda: None
    """Releases the state that the store keeps for the turn while it waits. Idempotent."""
    release_body: Callable[[], None] = lambda: None
    """Releases its body's charge in `BodyRoom`. Idempotent."""

    def fail(self, error: ParkdError) -> None:
        self.release_awaited()
        self.channel.fail(error)

    def stop(self) -> None:
        self.channel.cancel.set()

    def ask_to_pause(self) -> None:
        self.pause.set()


def output_limit(asked: int | None, server_limit: int | None) -> int | None:
    """The longest answer in tokens; None: up to the end of the context."""
    limits = [limit for limit in (asked, server_limit) if limit is not None]
    return min(limits, default=None)


def prompt_tail(engine: Engine, prompt: PromptIdentity) -> str:
    """The end of the rendered prompt. Thread-safe, as the tokenizer is, but it may wait for another process."""
    return engine.tokenizer.decode(prompt.token_ids[-TAIL_TOKENS:].tolist())
