"""From a turn to the client that reads it: one bounded channel a request.

    engine thread --call_soon_threadsafe--> push ... [unread] ... next --> client

The writer never waits. Adjacent unread texts are joined and only the newest Progress is kept, so the unread events are
bounded by their characters: a client that falls `UNREAD_LIMIT_CHARACTERS` behind is disconnected.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, MutableMapping

from parkd.errors import Cancelled, ParkdError
from parkd.types import Event, Finished, Progress, ReasoningDelta, TextDelta, ToolCallDelta

UNREAD_LIMIT_CHARACTERS = 256 * 1024
EVENT_CHARACTERS = 64
"""What an unread event counts besides its text."""
LOGPROB_CHARACTERS = 16
"""What a token with its logprob counts in an unread event."""
HISTORY_CHARACTERS = 16
"""What an event in the history counts besides its text."""


class EventChannel:
    """Lives on the event loop; only `cancel` is touched by other threads."""

    def __init__(self, beside: EventChannel | None = None) -> None:
        """`beside` is a channel that the same client reads, as `next_of` does."""
        self.cancel = threading.Event()
        """Set when nobody reads any more. The engine looks at it between chunks and tokens."""
        self.on_overflow: Callable[[], None] = lambda: None
        """Called when the reader has fallen too far behind; it may be stuck in a write to its client."""
        self.overflowed = False
        self._unread: deque[Event] = deque()
        self._history: list[Event] | None = []
        """All events so far, for a reader that starts again; None once they are too long to keep."""
        self._history_characters = 0
        self._characters = 0
        self._error: ParkdError | None = None
        self._closed = False
        self._arrived: asyncio.Event = asyncio.Event() if beside is None else beside._arrived

    @property
    def closed(self) -> bool:
        """True once nothing more will be pushed."""
        return self._closed

    def push(self, event: Event) -> None:
        """Never waits. Events after the end or after an overflow are dropped."""
        if self._closed:
            return
        self._characters += _characters(event)
        if self._characters > UNREAD_LIMIT_CHARACTERS:
            self.overflowed = True
            self.cancel.set()
            self.fail(Cancelled("The client reads too slowly; the answer was given up."))
            self.on_overflow()
            return
        self._record(event)
        joined = joined_events(self._unread[-1] if self._unread else None, event)
        if joined is not None:
            self._join(joined)
        else:
            self._unread.append(event)
        self._closed = isinstance(event, Finished)
        self._arrived.set()

    def fail(self, error: ParkdError) -> None:
        """Ends the channel with an error. What is unread is still read first, except after an overflow."""
        if self._closed:
            return
        if self.overflowed:
            self._unread.clear()
        self._error = error
        self._closed = True
        self._arrived.set()

    async def next(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s` without one. Raises what the turn failed with."""
        found = await next_of({0: self}, timeout_s)
        return None if found is None else found[1]

    def _take(self) -> Event | None:
        """The next event if it is there. Raises what the turn failed with."""
        if self._unread:
            event = self._unread.popleft()
            self._characters = sum(map(_characters, self._unread)) if self._unread else 0
            return event
        if not self._closed:
            return None
        assert self._error is not None, "read past the end"
        raise self._error

    @property
    def can_rewind(self) -> bool:
        return self._history is not None

    def rewind(self) -> bool:
        """Starts again at the first event, for another reader. False if that is no longer possible."""
        if self._history is None or self.cancel.is_set() or self._error is not None:
            return False
        self._unread = deque(self._history)
        self._characters = self._history_characters
        self._arrived.set()
        self.on_overflow = lambda: None
        return True

    def _record(self, event: Event) -> None:
        if self._history is None:
            return
        if isinstance(event, Progress) and self._history and isinstance(self._history[-1], Progress):
            self._history.pop()
        self._history.append(event)
        self._history_characters += _characters(event) - EVENT_CHARACTERS + HISTORY_CHARACTERS
        if self._history_characters > UNREAD_LIMIT_CHARACTERS:
            self._history = None

    def _join(self, event: Event) -> None:
        self._characters -= EVENT_CHARACTERS
        self._unread[-1] = event


async def next_of(channels: MutableMapping[int, EventChannel], timeout_s: float) -> tuple[int, Event] | None:
    """The next event of one of several channels, which lie beside each other, and whose it is; None after `timeout_s`
    without one. Each has its turn. Raises what one of the turns failed with."""
    arrived = next(iter(channels.values()))._arrived
    until_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        arrived.clear()
        for number, channel in list(channels.items()):
            event = channel._take()
            if event is not None:
                channels[number] = channels.pop(number)
                return number, event
        try:
            async with asyncio.timeout_at(until_s):
                await arrived.wait()
        except TimeoutError:
            if not arrived.is_set():
                return None


def joined_events(last: Event | None, event: Event) -> Event | None:
    """One event that means the same as both; None if there is none."""
    if isinstance(last, TextDelta) and isinstance(event, TextDelta):
        return TextDelta(last.text + event.text, last.logprobs + event.logprobs, event.timings)
    if isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
        return ReasoningDelta(last.text + event.text, event.timings)
    if isinstance(last, Progress) and isinstance(event, Progress):
        return event
    return None


def _characters(event: Event) -> int:
    match event:
        case TextDelta(text, logprobs):
            scores = sum(1 + len(each.top) for each in logprobs)
            return EVENT_CHARACTERS + len(text) + LOGPROB_CHARACTERS * scores
        case ReasoningDelta(text):
            return EVENT_CHARACTERS + len(text)
        case ToolCallDelta(arguments=arguments):
            return EVENT_CHARACTERS + len(arguments)
        case _:
            return EVENT_CHARACTERS
