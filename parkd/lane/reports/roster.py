"""What is known of the turns of each conversation since the server started: who sent them, how many there were, and how
many found state again. Bounded; the conversation whose last turn is longest ago makes room."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parkd.lane.reports.explain import SYSTEM_ROLES, Explained
from parkd.store.records import Name
from parkd.types import CacheOutcome, TurnRequest

ROSTER_LIMIT = 4096
"""Conversations that are remembered."""
REQUESTS_LIMIT = 16
"""Requests that are remembered of each, the latest."""
OWNERS_LIMIT = 16
"""Keys whose turns are counted apart for one conversation."""
WORDS_CHARACTERS = 80
"""Most characters of a message that are shown as its first words."""


@dataclass(frozen=True, slots=True)
class FirstWords:
    """Text of a prompt: only kept if --page-text allows it, and only shown to the key that sent it."""

    system: str
    user: str

    @classmethod
    def of(cls, request: TurnRequest) -> FirstWords:
        if request.prompt is not None:
            return cls("", _words(request.prompt))
        system = next((m for m in request.messages if m.get("role") in SYSTEM_ROLES), {})
        user = next((m for m in reversed(request.messages) if m.get("role") == "user"), {})
        return cls(_words(system.get("content")), _words(user.get("content")))


@dataclass(slots=True)
class Counts:
    turns: int = 0
    hits: int = 0
    """Turns that did not begin cold."""
    began_s: float = 0.0
    """When the first arrived, by the server's own clock."""
    last_s: float = 0.0
    """The same of the latest."""
    words: FirstWords | None = None


@dataclass(slots=True)
class Activity:
    """The turns of one conversation."""

    began_s: float
    """By the server's own clock."""
    by_owner: OrderedDict[str, Counts] = field(default_factory=OrderedDict)
    requests: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=REQUESTS_LIMIT))
    """Owner and id of the latest."""

    def seen_by(self, owner: str | None) -> Counts:
        """The counts of one key's turns; None: of all keys, without any words."""
        if owner is not None:
            return self.by_owner.get(owner, Counts())
        each = self.by_owner.values()
        last_s = max((counts.last_s for counts in each), default=0.0)
        return Counts(sum(one.turns for one in each), sum(one.hits for one in each), self.began_s, last_s)


class Roster:
    """Lives on the event loop."""

    def __init__(self, limit: int = ROSTER_LIMIT) -> None:
        self._limit = limit
        self._known: OrderedDict[Name, Activity] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: Name, turn: Explained, words: FirstWords | None) -> None:
        """Counts a turn of a conversation."""
        activity = self._known.setdefault(name, Activity(turn.arrived_s))
        self._known.move_to_end(name)
        counts = activity.by_owner.setdefault(turn.owner, Counts(began_s=turn.arrived_s))
        activity.by_owner.move_to_end(turn.owner)
        counts.turns += 1
        counts.hits += turn.report is not None and turn.report.outcome is not CacheOutcome.COLD
        counts.last_s = turn.arrived_s
        counts.words = words
        activity.requests.append((turn.owner, turn.request_id))
        if len(activity.by_owner) > OWNERS_LIMIT:
            activity.by_owner.popitem(last=False)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def get(self, name: Name) -> Activity | None:
        return self._known.get(name)

    def forget(self, name: Name, owner: str | None = None) -> None:
        """Drops the turns of a conversation: those of one key, or, if it is None, of all."""
        activity = self._known.get(name)
        if activity is not None and owner is not None:
            activity.by_owner.pop(owner, None)
            kept = [request for request in activity.requests if request[0] != owner]
            activity.requests = deque(kept, maxlen=REQUESTS_LIMIT)
        if activity is None or owner is None or not activity.by_owner:
            self._known.pop(name, None)


def _words(content: Any) -> str:
    """The beginning of a message's text, on one line."""
    if isinstance(content, list):
        content = next((p.get("text") for p in content if isinstance(p, Mapping) and p.get("type") == "text"), "")
    if not isinstance(content, str):
        return ""
    words = " ".join(content[: 4 * WORDS_CHARACTERS].split())
    return words if len(words) <= WORDS_CHARACTERS else words[: WORDS_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
