"""The file of rewrite rules: text that an operator wants to have replaced in prompts before they are read.

[[rule]]
name = "clock"                                       # for reports; the pattern if left out
pattern = "Current time: [0-9:]+"                    # a regular expression, as Python's `re` has them
replacement = "Current time: unknown"                # empty if left out; \\1 is the first group
roles = ["system"]                                   # whose messages; system and developer if left out
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parkd.config.toml_files import read_toml
from parkd.errors import ConfigError
from parkd.identity.normalise import RULES_LIMIT, Normaliser, NormaliserConfig, RewriteRule

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("name", "pattern", "replacement", "roles")


def read_rules(path: Path) -> tuple[RewriteRule, ...]:
    """The rules in a file. Raises ConfigError, whose message names the rule."""
    where = f"--rewrite-rules {path}"
    document = read_toml(path, where)
    entries = document.get("rule")
    if set(document) != {"rule"} or not isinstance(entries, list) or not 0 < len(entries) <= RULES_LIMIT:
        raise ConfigError(f"{where}: expected 1 to {RULES_LIMIT} tables [[rule]], each with a `pattern`")
    rules = tuple(rule_of(entry, f"{where}, rule {number}") for number, entry in enumerate(entries, 1))
    Normaliser(NormaliserConfig(rules=rules))  # reports an invalid pattern before the model is loaded
    return rules


def rule_of(entry: Mapping[str, Any], where: str) -> RewriteRule:
    """One rule, as a table of the file has it. Raises ConfigError, whose message begins with `where`."""
    unknown = set(entry) - set(_KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r} (there are {', '.join(_KEYS)})")
    texts = {name: entry.get(name, "") for name in ("name", "pattern", "replacement")}
    roles = entry.get("roles", ["system", "developer"])
    if not all(isinstance(text, str) for text in texts.values()) or not texts["pattern"]:
        raise ConfigError(f"{where}: `pattern` must be a text that is not empty, `replacement` and `name` texts")
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise ConfigError(f"{where}: `roles` must be a list out of {', '.join(ROLES)}")
    return RewriteRule(texts["pattern"], texts["replacement"], tuple(roles), texts["name"])
