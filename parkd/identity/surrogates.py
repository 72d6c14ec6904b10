"""Surrogates without a partner in JSON, which are no characters and have no UTF-8.

JavaScript cuts strings between the two halves of a character, and models write half an escape. JSON may contain both,
and a client that has such a text in its history cannot repair it. So each becomes U+FFFD, the replacement character.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.")
"""A pair, a surrogate alone, or any other escape, so that the backslash of none begins another."""
_ALONE_CHARS = len(r"\ud800")


def mended(document: str) -> str:
    """JSON text in which every surrogate without a partner, as an escape or as a character, is U+FFFD."""
    if not document.isascii():
        document = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _ESCAPES.sub(_mended, document) if r"\ud" in document or r"\uD" in document else document


def mended_bytes(document: bytes) -> bytes:
    """As `mended`, for UTF-8 that may contain surrogates. Raises UnicodeDecodeError for any other fault."""
    return mended(document.decode("utf-8", "surrogatepass")).encode()


def _mended(escape: re.Match[str]) -> str:
    text = escape[0]
    return r"\ufffd" if len(text) == _ALONE_CHARS and text[2] in "dD" else text
