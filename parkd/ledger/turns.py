"""One turn as the ledger keeps it: numbers and reasons. Text of prompts only if the operator allows it."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_CHARACTERS = 400
"""Most characters of each text that is kept."""


@dataclass(frozen=True, slots=True)
class LedgerTurn:
    """A row. The fields are its columns, in this order."""

    at_s: float
    """Arrival, Unix time."""
    request_id: str
    owner: str
    """Derived from the key, empty without one: who may ask for the row."""
    conversation: str
    """Its name; empty if nothing of it was parked."""
    client: str
    """The family of its user agent."""
    key_name: str
    api: str
    """The path it came by."""
    cache: str
    """Where the reused state came from; empty if it never began."""
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    needless_tokens: int
    """Of `read_tokens`: known before, and read again."""
    output_tokens: int
    wait_s: float
    restore_s: float
    read_s: float
    needless_s: float
    """The part of `read_s` for `needless_tokens`."""
    decode_s: float
    end: str
    """The finish reason, or the error's code."""
    cause: str
    why: str
    place: int | None
    """The first token that differs from what was known."""
    segment: str
    """The part of the prompt that it is in."""
    text: str
    """What is there, with what is around it; empty unless text may be kept."""
    known_text: str
    rule: str
    """A rewrite rule that would prevent it, as JSON; empty if none is known."""
