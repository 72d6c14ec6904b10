"""Removes text from messages that changes with every request and means nothing, before they are rendered.

By default that is only the billing header that an agent puts in its first system block. Operators can add rules.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from parkd.errors import ConfigError, RenderingTooLong
from parkd.types import Message, Rewrite

_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")
"""Anchored: only the first line of the first system block."""

BILLING_HEADER = "billing header"
"""The name of its removal in reports."""

RULES_LIMIT = 64
"""Most rules, since each is applied to every message of every prompt."""
RULES_S = 2.0
"""Seconds that all rules may take on one request. A pattern that can match one text in many ways takes longer than
anyone would wait, on texts that a client can choose."""
_FUZZY = re.compile(r"(\\.)|\{(?=[idse])")
"""A brace that is a character for `re`, and begins a fuzzy match for `regex`."""
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """An operator's substitution, as in `re.sub`, over the text of messages of the given roles."""

    pattern: str
    replacement: str = ""
    roles: tuple[str, ...] = ("system", "developer")
    name: str = ""
    """For reports; empty: the pattern is shown."""


@dataclass(frozen=True, slots=True)
class NormaliserConfig:
    drop_billing_header: bool = True
    rules: tuple[RewriteRule, ...] = ()


class Normaliser:
    """Applies a configuration to messages. The result shares whatever is unchanged with its input.

    Patterns are those of `re`, which alone cannot be interrupted and holds up the whole process meanwhile, so `regex`
    runs them, with a deadline. Raises ConfigError if the pattern or the replacement of a rule is not valid.
    """

    def __init__(self, config: NormaliserConfig) -> None:
        self.config = config
        self._drop_billing_header = config.drop_billing_header
        self._rules: list[tuple[Any, RewriteRule]] = []
        for rule in config.rules:
            try:
                re.compile(rule.pattern).sub(rule.replacement, "")
                source = _FUZZY.sub(lambda found: found[1] or r"\{", rule.pattern)
                run_pattern = regex.compile(source, regex.V0)
                regex.compile(f"(?:{source})|", regex.V0).sub(rule.replacement, "")  # a bad group shows in a match
            except (re.error, regex.error, IndexError) as error:
                raise ConfigError(
                    f"The rewrite rule {rule.pattern!r} -> {rule.replacement!r} is not valid ({error}). "
                    "Correct it or remove it."
                ) from error
            self._rules.append((run_pattern, rule))

    def with_rule(self, rule: RewriteRule) -> Normaliser:
        """Another that also applies this rule, after its own. Raises ConfigError, also for more than RULES_LIMIT."""
        rules = (*self.config.rules, rule)
        if len(rules) > RULES_LIMIT:
            raise ConfigError(f"There are {RULES_LIMIT} rewrite rules, which is the most. Remove one from their file.")
        return Normaliser(replace(self.config, rules=rules))

    def apply(self, messages: Sequence[Message]) -> tuple[list[Message], tuple[Rewrite, ...]]:
        """The messages without what is to be dropped, and which rules changed something. A system message of which the
        billing header leaves nothing is dropped whole. Raises RenderingTooLong if the rules take more than RULES_S."""
        result = list(messages)
        rewrites: list[Rewrite] = []
        if self._drop_billing_header and result and result[0].get("role") in _SYSTEM_ROLES:
            content = _without_billing_header(result[0].get("content"))
            if content is not result[0].get("content"):
                result[:1] = [{**result[0], "content": content}] if content else []
                rewrites.append(Rewrite(BILLING_HEADER, 1))
        until_s = time.monotonic() + RULES_S
        for pattern, rule in self._rules:
            places = 0
            for index, message in enumerate(result):
                if message.get("role") in rule.roles:
                    try:
                        result[index], count = _rewritten(message, pattern, rule.replacement, until_s)
                    except TimeoutError as error:
                        what = (
                            f"this server's rewrite rule {rule.name or rule.pattern!r} needs more than {RULES_S:.0f} s"
                        )
                        raise RenderingTooLong(what) from error
                    places += count
            if places:
                rewrites.append(Rewrite(rule.name or rule.pattern, places))
        return result, tuple(rewrites)


def _without_billing_header(content: Any) -> Any:
    """The same object when there is no header."""
    if isinstance(content, str):
        return _BILLING_LINE.sub("", content, count=1) if _BILLING_LINE.match(content) else content
    if not isinstance(content, list) or not content:
        return content
    first = content[0]
    text = first.get("text") if isinstance(first, Mapping) else first
    if not isinstance(text, str) or not _BILLING_LINE.match(text):
        return content
    rest = _BILLING_LINE.sub("", text, count=1)
    kept = [{**first, "text": rest} if isinstance(first, Mapping) else rest] if rest else []
    return kept + content[1:]


def _rewritten(message: Message, pattern: Any, replacement: str, until_s: float) -> tuple[Message, int]:
    """The message, the same object if nothing matched, and the number of matches. Raises TimeoutError at `until_s` of
    the monotonic clock."""
    content = message.get("content")
    if isinstance(content, str):
        text, count = _substituted(pattern, replacement, content, until_s)
        return ({**message, "content": text} if count else message), count
    if not isinstance(content, list):
        return message, 0
    parts, total = list(content), 0
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text, count = _substituted(pattern, replacement, part["text"], until_s)
            parts[index] = {**part, "text": text} if count else part
            total += count
    return ({**message, "content": parts} if total else message), total


def _substituted(pattern: Any, replacement: str, text: str, until_s: float) -> tuple[str, int]:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    changed: tuple[str, int] = pattern.subn(replacement, text, timeout=left_s, concurrent=True)
    return changed
