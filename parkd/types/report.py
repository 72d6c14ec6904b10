"""What is reported about a turn: where its state came from, where the prompt diverged, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from parkd.state import DraftCounts


class CacheOutcome(StrEnum):
    """Where the reused state of a turn came from."""

    LIVE = "live"
    RESTORED_RAM = "restored-ram"
    RESTORED_DISK = "restored-disk"
    COLD = "cold"
    UPSTREAM = "upstream"
    """Another server computes, and keeps what state it likes. What it reused is as it says, when the answer has
    ended."""


class Unit(StrEnum):
    """What an element of a prompt's identity is."""

    TOKEN = "token"  # noqa: S105
    CHARACTER = "character"
    """Of a server whose tokens are not known here."""


@dataclass(frozen=True, slots=True)
class Told:
    """A turn's tokens as another server counts them, so far."""

    prompt_tokens: int
    """An estimate until the server has said it."""
    cached_tokens: int | None = None
    """Of the prompt, those that it did not compute again; None: it does not say."""
    output_tokens: int | None = None
    """None: it has not said."""
    reasoning_tokens: int | None = None
    why: str = ""
    """What is known about its saying nothing."""
    held_tokens: int | None = None
    """Of the prompt, those that it held when the prompt was sent, as it had told before; None: it does not tell."""
    gone: str = ""
    """What it had of the prompt and gave up; empty: nothing that is known."""
    gone_from: int = 0
    """The first token of that."""


class Cause(StrEnum):
    """Why tokens of a prompt were read."""

    NONE = ""
    """All that was known was reused."""
    FIRST_TIME = "first_time"
    CLOCK = "clock"
    """A time, an id, a path of temporary files or a counter in the prompt."""
    TOOLS_REORDERED = "tools_reordered"
    TOOLS = "tools"
    SYSTEM_MOVED = "system_moved"
    SYSTEM = "system"
    MODEL = "model"
    """Another model name, which the template writes into the prompt."""
    KEY = "key"
    """The same prompt under another salt or steering."""
    HISTORY_EDITED = "history_edited"
    TEMPLATE = "template"
    """The model's own answer came back in other tokens."""
    EVICTED = "evicted"
    REFUSED = "refused"
    """There was no room to park it."""
    FORGOTTEN = "forgotten"
    """Someone asked for that."""
    DAMAGE = "damage"
    NO_CHECKPOINT = "no_checkpoint"
    """The model's state could be resumed only before the place."""
    CHEAPER = "cheaper"
    """Reading takes less time than restoring."""
    NOT_ASKED = "not_asked"
    """The request wanted no cache."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from what was known. The texts quote a few tokens of both, so they are for their
    owner, never for a log."""

    position: int
    """The first token, or other unit, that differs."""
    label: str
    """The segment it is in."""
    text: str
    known_text: str
    unit: Unit = Unit.TOKEN

    def __str__(self) -> str:
        where = f" in {self.label}" if self.label else ""
        place = f"{self.unit} {self.position}{where}"
        return f"{place} is the first that differs: {self.text} where {self.known_text} was known"


class DiagnosisKind(StrEnum):
    HIT = "hit"
    CHANGED = "changed"
    NOT_FOUND = "not_found"
    """The request to compare with is not remembered, or belongs to another caller."""
    UNAVAILABLE = "unavailable"
    """The prompts agree, but tokens were read again, because the parked state was gone."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A prompt compared with that of an earlier request, which the client named."""

    kind: DiagnosisKind
    changed: str = ""
    """The first part that differs: `model`, `system`, `tools` or `messages`."""
    common_tokens: int = 0
    missed_tokens: int = 0
    """Tokens of the earlier prompt after the common ones."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What client and operator are told about the start of a turn."""

    outcome: CacheOutcome
    prompt_tokens: int
    reused_tokens: int
    why: str = ""
    """Why tokens were read although they were known once; empty if there is nothing to explain."""
    divergence: Divergence | None = None
    """Where the prompt diverges from the conversation that it shares most with."""
    diagnosis: Diagnosis | None = None
    """None if the client did not ask."""
    written_tokens: int = 0
    """Tokens of the prompt that this turn adds to what is kept."""
    is_damaged: bool = False
    """Parked state was there and could not be used."""
    is_known: bool = True
    """False: another server computes, and has not said how many tokens it reused. Then `reused_tokens` is 0."""
    held_tokens: int | None = None
    """What another server was known to hold of the prompt before it was sent; None: it does not tell."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts of one turn, measured by the turn itself."""

    wait_s: float = 0.0
    """In the queue, before the lane took it."""
    restore_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the arrival of the request to its first token."""
    decode_s: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    paused_s: float = 0.0
    """While others ran after it had begun, with what it took to go on; in none of the times above but `first_token_s`,
    which counts pauses before the first token."""
    pauses: int = 0
