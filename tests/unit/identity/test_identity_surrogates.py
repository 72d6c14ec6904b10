"""Surrogates without a partner become U+FFFD; everything else in a JSON text stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.identity.canonical import canonical_arguments
from parkd.identity.output_memory import json_key
from parkd.identity.surrogates import mended, mended_bytes
from tests.unit.identity.identity_fakes import SEEDED

HALVES = st.sampled_from(
    ["\ud83d", "\udbff", "\ude00", "\udc00", "a", "\\", "\\u", "ud83d", '"', "é", "😀", "\n", "日"]
)


def expected(text: str) -> str:
    """A model: a high half joins the low half behind it, and any other half is replaced."""
    result, place = "", 0
    while place < len(text):
        one, two = ord(text[place]), ord(text[place + 1]) if place + 1 < len(text) else 0
        if 0xD800 <= one < 0xDC00 <= two < 0xE000:
            result += chr(0x10000 + ((one - 0xD800) << 10) + two - 0xDC00)
            place += 2
        else:
            result += "\ufffd" if 0xD800 <= one < 0xE000 else chr(one)
            place += 1
    return result


@SEEDED
@given(st.lists(HALVES, max_size=12).map("".join))
def test_documents_hold_what_can_be_encoded(text: str) -> None:
    """Found by use 11."""
    for document in (json.dumps({text: [text]}), json.dumps({text: [text]}, ensure_ascii=False)):
        wanted = {expected(text): [expected(text)]}
        assert json.loads(mended(document)) == wanted
        assert json.loads(mended_bytes(document.encode("utf-8", "surrogatepass"))) == wanted


def test_what_needs_no_mending_stays_the_same() -> None:
    for document in ('{"a": "\\ud83d\\ude00 é \\\\ud83d"}', '{"a": "plain"}', '{"a": "日本"}'):
        assert mended(document) == document


@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_that_a_model_wrote_with_half_an_escape_can_be_rendered(as_text: bool) -> None:
    """Found by use 11: such a call came back as JSON inside of JSON, past the parser of the body."""
    found: Any = canonical_arguments(r'{"path": "ab\ud83d", "\ude00": 1}', as_text=as_text)
    assert (json.loads(found) if as_text else found) == {"path": "ab\ufffd", "\ufffd": 1}
    str(found).encode()


def test_a_call_is_known_again_when_its_half_escape_was_mended() -> None:
    assert json_key({"a": "b\ud83d"}) == json_key({"a": "b\ufffd"}) != json_key({"a": "b\\ud83d"})
