"""Text in prompts that changes with every request: what kind it is, and the rewrite rule that would hold it still.

now     Current time: 12:04:31. You are ...
known   Current time: 12:01:07. You are ...

Both pieces are clocks and all around them is the same, so a rule that replaces this kind of text would have kept the
prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parkd.identity.normalise import RewriteRule

_CLOCK = (
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm])?"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?(?:\d{1,2} )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*(?: \d{1,2})?(?:,? \d{4})?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
KINDS = {
    "clock": _CLOCK,
    "id": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}|\b[0-9a-f]{16,64}\b",
    "path": r"(?:/tmp|/var/tmp|/var/folders|/private/var/folders|/run/user)/[^\s\"'<>)]+",
    "counter": r"\d+",
}
"""Patterns by kind, the most telling first."""
_NAMED = {kind: re.compile(pattern, re.ASCII) for kind, pattern in KINDS.items()}
LEAD_CHARACTERS = 32
"""Most characters before it, of its line, that a rule names so that it hits nothing else."""
LEAST_LEAD = 3
"""A number alone is replaced only behind at least so many characters."""


@dataclass(frozen=True, slots=True)
class Volatile:
    """A piece of text that differs between two prompts and is of one kind in both."""

    kind: str
    lead: str
    """What stands before it in its line."""
    place: int
    """Where it begins, in characters of the later text."""


def volatile_of(text: str, known: str) -> Volatile | None:
    """The piece at the first difference of two texts, if it is of one kind in both and what is around it agrees."""
    at = next((at for at, (one, other) in enumerate(zip(text, known, strict=False)) if one != other), len(text))
    if at >= min(len(text), len(known)):
        return None
    for kind, pattern in _NAMED.items():
        here = next((m for m in pattern.finditer(text) if m.start() <= at < m.end()), None)
        there = next((m for m in pattern.finditer(known) if m.start() <= at < m.end()), None)
        if here is None or there is None or here.start() != there.start():
            continue
        behind, known_behind = text[here.end() :], known[there.end() :]
        if behind[:1] != known_behind[:1] and behind and known_behind:
            continue
        line = text.rfind("\n", 0, here.start()) + 1
        return Volatile(kind, text[max(line, here.start() - LEAD_CHARACTERS) : here.start()], here.start())
    return None


def rule_for(found: Volatile, roles: tuple[str, ...], *, shows_text: bool) -> RewriteRule | None:
    """The rule that replaces such a piece by the name of its kind. Without `shows_text` it names no text of the prompt,
    so for a number alone there is none."""
    lead = found.lead if shows_text else ""
    if found.kind == "counter" and len(lead.strip()) < LEAST_LEAD:
        return None
    pattern, name = KINDS[found.kind], f"{found.kind} held still"
    if not lead:
        return RewriteRule(pattern, f"({found.kind})", roles, name)
    return RewriteRule(f"({re.escape(lead)})(?:{pattern})", rf"\1({found.kind})", roles, name)
