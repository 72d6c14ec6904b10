"""Finds special tokens at which texts can be cut so that the pieces tokenise to the ids of the whole. Tested, not
assumed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from parkd.engine_adapter.base import Tokenizer

_CONTEXTS = ("x", " a ", "\n", "1", "\n\n b", "é", "\t", "'s", "\u0301", "  ", "。", "", "<", "a\r\n", "▁z")
"""Texts between special tokens at which a tokenizer might merge across the cut: spaces, line ends, digits,
contractions, a combining accent, half a special token, nothing. Their number and the shift between rounds are
coprime."""

_ROUNDS = 3

_SINGLE_PROBES_LIMIT = 1024
"""Most tokens that are tested one by one if all together fail. With more, texts are tokenised whole."""


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the tokens leftmost-longest, as tokenizers do. A trie, so that thousands of tokens are as
    fast as a few."""
    trie: dict[str, Any] = {}
    for token in tokens:
        node = trie
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branch(trie))


def _branch(node: dict[str, Any]) -> str:
    """The pattern of a trie's node. Branches differ in their first character, and the end comes last, so the first
    match is the longest."""
    ends = "" in node
    if len(node) > 1 and all(char and set(child) == {""} for char, child in node.items()):
        return f"[{''.join(map(re.escape, node))}]"  # single characters: many times as fast as alternatives
    branches = []
    for char, child in node.items():
        if not char:
            continue
        text = re.escape(char)
        while len(child) == 1 and "" not in child:  # a run without forks stays flat, for the regex's sake
            ((char, child),) = child.items()
            text += re.escape(char)
        branches.append(text + _branch(child))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return joined + ("?" if ends else "")


def cuttable_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The special tokens at which a cut gives the ids of the whole text; empty if none is safe.

    Tokens of white space are left out: pieces cut at every line end are too small to be worth remembering.
    """
    tokens = [token for token in dict.fromkeys(tokenizer.special_tokens) if token.strip(" \t\r\n▁")]
    if not tokens:
        return frozenset()
    pattern = token_pattern(tokenizer.special_tokens)
    if _cuts_agree(tokenizer, pattern, tokens, frozenset(tokens)):
        return frozenset(tokens)
    if len(tokens) > _SINGLE_PROBES_LIMIT:
        return frozenset()
    safe = [token for token in tokens if _cuts_agree(tokenizer, pattern, [token], frozenset((token,)))]
    if safe and _cuts_agree(tokenizer, pattern, tokens, frozenset(safe)):
        return frozenset(safe)
    return frozenset()


def cut_pieces(text: str, pattern: re.Pattern[str], cuttable: frozenset[str]) -> list[str]:
    """The pieces of a text: each but the first starts with a cuttable token."""
    cuts = [match.start() for match in pattern.finditer(text) if match.start() and match[0] in cuttable]
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _cuts_agree(
    tokenizer: Tokenizer, pattern: re.Pattern[str], tokens: Sequence[str], cuttable: frozenset[str]
) -> bool:
    """Whether the pieces give the ids of the whole, for every token in several contexts."""
    repeats = -(-len(_CONTEXTS) // len(tokens))
    for shift in range(_ROUNDS):
        contexts = _CONTEXTS[shift * 4 :] + _CONTEXTS[: shift * 4]
        parts = [
            token + contexts[index % len(contexts)]
            for index, token in enumerate([token for token in tokens for _ in range(repeats)])
        ]
        text = contexts[0] + "".join(parts)
        ids = [token_id for piece in cut_pieces(text, pattern, cuttable) for token_id in tokenizer.encode(piece)]
        if ids != list(tokenizer.encode(text)):
            return False
    return True
