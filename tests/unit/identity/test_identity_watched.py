"""Work for a prompt that is given up: when the client has left, and when a program over its text takes too long."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from parkd.engine_adapter.llama_server.template import HereTemplate
from parkd.errors import Cancelled, RenderingTooLong
from parkd.identity import normalise, watched
from parkd.identity.builder import IdentityBuilder
from parkd.identity.images import PromptImages
from parkd.identity.normalise import Normaliser, NormaliserConfig, RewriteRule
from parkd.identity.watched import WatchedTemplate
from parkd.state import ImageFacts, ImageSize
from parkd.types import ImageData, always_wanted
from tests.fakes.images import FakeImages
from tests.unit.identity.identity_fakes import BLOCK, FINGERPRINT, ChatMl, WordTokenizer, say, talk

EVERY_PAIR = (
    "{% for a in messages %}{% for b in messages %}{% if b.role == a.role %}{% endif %}{% endfor %}{% endfor %}"
)
"""Writes nothing, and takes a time that grows with the square of the messages."""


class Here:
    """A template of jinja2's as a `ChatTemplate`."""

    def __init__(self, source: str) -> None:
        template = HereTemplate.of(source, {})
        assert template is not None
        self._template = template

    def render(self, messages: Any, tools: Any, kwargs: Any, *, add_generation_prompt: bool = True) -> Any:
        return self._template.render({"messages": messages, "add_generation_prompt": add_generation_prompt})


def leaves_after(calls: int) -> tuple[Callable[[], None], list[int]]:
    """A client that leaves when it was asked for so many times, and how often it was."""
    asked: list[int] = []

    def still_wanted() -> None:
        asked.append(len(asked))
        if len(asked) > calls:
            raise Cancelled("The client left.")

    return still_wanted, asked


def test_found_by_use_4_rendering_ends_when_its_client_leaves() -> None:
    messages = [say("user", f"{number}") for number in range(2000)]
    still_wanted, asked = leaves_after(3)
    with pytest.raises(Cancelled):
        WatchedTemplate(Here(EVERY_PAIR), still_wanted).render(messages, (), {})  # type: ignore[arg-type]
    assert len(asked) == 4, "it was not asked for again"


def test_found_by_use_4_rendering_has_a_bound_over_all_renderings_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "RENDER_CPU_S", 0.2)
    template = WatchedTemplate(Here(EVERY_PAIR), always_wanted)  # type: ignore[arg-type]
    began_s = time.thread_time()
    with pytest.raises(RenderingTooLong, match="Send fewer or shorter messages"):
        template.render([say("user", f"{number}") for number in range(3000)], (), {})
    assert time.thread_time() - began_s < 2, "nine million pairs take far longer"
    with pytest.raises(RenderingTooLong):
        template.render([say("user", "x")], (), {})


def test_found_by_use_4_too_long_a_rendering_is_refused_and_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A renderer that tries a prompt with stand-ins again and again does not fall back to the plain text."""
    template = ChatMl()
    builder = IdentityBuilder(WordTokenizer(), template, FINGERPRINT, BLOCK, 1 << 20)
    monkeypatch.setattr(watched, "RENDER_CPU_S", -1.0)
    template.seen.clear()
    with pytest.raises(RenderingTooLong):
        builder.build(talk(say("user", "a <|end|> b")))
    assert template.seen == []


def test_found_by_use_4_images_are_decoded_no_longer_than_their_client_waits() -> None:
    decoded: list[bytes] = []

    class Reader(FakeImages):
        def size(self, data: bytes) -> ImageSize:
            return ImageSize(1, 1)

        def facts(self, data: bytes) -> ImageFacts:
            decoded.append(data)
            return super().facts(data)

    pictures = [ImageData(base64.b64encode(b"PIC%d" % number).decode(), "there") for number in range(9)]
    still_wanted, _ = leaves_after(4)
    with pytest.raises(Cancelled):
        PromptImages(pictures, Reader(5), None, still_wanted)
    assert len(decoded) == 4


def test_found_by_use_4_text_is_tokenised_no_longer_than_its_client_waits() -> None:
    words = WordTokenizer()
    builder = IdentityBuilder(words, ChatMl(), FINGERPRINT, BLOCK, 1 << 20)
    request = talk(*[say("user", f"number {number}") for number in range(40)])
    words.texts_encoded.clear()
    still_wanted, asked = leaves_after(10)
    with pytest.raises(Cancelled):
        builder.build(request, still_wanted=still_wanted)
    assert 0 < len(words.texts_encoded) < 11
    assert len(asked) == 11
    words.texts_encoded.clear()
    builder.build(request)
    assert len(words.texts_encoded) > 30


CATASTROPHE = RewriteRule("(a|aa)+$", "", ("user",), "words")
LONG = "a" * 60 + "!"


def test_found_by_use_4_an_operators_pattern_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` takes a time that doubles with every other letter of this text, and holds up the whole process meanwhile."""
    monkeypatch.setattr(normalise, "RULES_S", 0.3)
    rules = Normaliser(NormaliserConfig(rules=(CATASTROPHE,)))
    began_s = time.monotonic()
    for content in (LONG, [{"type": "text", "text": LONG}]):
        with pytest.raises(RenderingTooLong, match="rule 'words'"):
            rules.apply([say("user", content)])
    assert time.monotonic() - began_s < 20
    messages, _ = rules.apply([say("user", "aaaa"), say("system", LONG)])
    assert [message["content"] for message in messages] == ["", LONG]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a{i}", "a{i} a"),
        (r"a\{e}b{2}", "a{e}bb"),
        ("[{]d}x{s<=1}", "{d}x{s<=1}"),
        ("Time: [0-9:]+", "Time: 12:30 sharp"),
        (r"(?i)\bTODAY\b", "is today"),
        ("x{2,}", "axxxa"),
        ("", "ab"),
    ],
)
def test_patterns_mean_what_they_mean_in_python(pattern: str, text: str) -> None:
    """`regex` would take `{i}` for a number of errors that it may overlook."""

    (message,), _ = Normaliser(NormaliserConfig(rules=(RewriteRule(pattern, "-", ("user",)),))).apply(
        [say("user", text)]
    )
    assert message["content"] == re.sub(pattern, "-", text)
