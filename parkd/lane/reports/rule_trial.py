"""How many tokens a rewrite rule would have saved: pure, over what a key's last requests said.

The text of two prompts is compared part by part, with the rule and without. What is equal only with it would have been
reused. Control marks and images stay as they are, and tokens at the edge are estimated by tokenising the text anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import path

from parkd.identity.normalise import Normaliser, NormaliserConfig, RewriteRule
from parkd.identity.units import IMAGE_BIT
from parkd.types import PromptIdentity, Units

TRIALS_LIMIT = 16
"""Requests that a rule is tried on, the latest."""
OLDER_LIMIT = 4
"""Requests before each that it is compared with."""
LEAST_SAVED = 32
"""Fewer tokens may come from the edges alone."""

Decode = Callable[[Units], str]
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Trial:
    request_id: str
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    rewritten: str
    tokens: int


def tried(
    rule: RewriteRule,
    requests: Sequence[tuple[str, PromptIdentity]],
    decode: Decode,
    count_tokens: CountTokens,
) -> list[Trial]:
    """For each of the latest requests the tokens that the rule would have saved. `requests` are ids and prompts of one
    key, the newest first. Raises ConfigError for a rule that is not valid, RenderingTooLong if it takes too long."""
    normaliser = Normaliser(NormaliserConfig(drop_billing_header=False, rules=(rule,)))
    chosen = requests[: TRIALS_LIMIT + OLDER_LIMIT]
    parts = [_parts(prompt, normaliser, decode) for _, prompt in chosen]
    found = []
    for at, (name, prompt) in enumerate(chosen[:TRIALS_LIMIT]):
        older = [
            other
            for other in range(at + 1, min(len(chosen), at + 1 + OLDER_LIMIT))
            if chosen[other][1].key == prompt.key
        ]
        known = max((_equal(parts[at], parts[other], count_tokens, is_rewritten=False) for other in older), default=0)
        then = max((_equal(parts[at], parts[other], count_tokens, is_rewritten=True) for other in older), default=0)
        saved = min(then, len(prompt) - 1) - known
        found.append(Trial(name, saved if saved >= LEAST_SAVED else 0))
    return found


def _parts(prompt: PromptIdentity, normaliser: Normaliser, decode: Decode) -> list[_Part]:
    parts = []
    for span in prompt.segments:
        units = prompt.units[span.start : span.stop]
        # An image is told by its units, which no rule changes.
        text = f"{units.tobytes().hex()}" if (units & IMAGE_BIT).any() else decode(units)
        named = re.search(r"\((\w+)\)", span.label)
        messages, _ = normaliser.apply([{"role": named[1] if named else "system", "content": text}])
        parts.append(_Part(text, str(messages[0]["content"]), len(units)))
    return parts


def _equal(parts: Sequence[_Part], others: Sequence[_Part], count_tokens: CountTokens, *, is_rewritten: bool) -> int:
    """Tokens of `parts` up to the first difference from the others."""
    tokens = 0
    for part, other in zip(parts, others, strict=False):
        text, known = (part.rewritten, other.rewritten) if is_rewritten else (part.text, other.text)
        if text != known:
            return tokens + min(part.tokens, count_tokens(path.commonprefix([text, known])))  # noqa: RUF071 - texts
        tokens += part.tokens
    return tokens
