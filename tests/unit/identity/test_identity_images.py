"""Pictures between messages and units: where they end up, and that their places are known exactly or not used."""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from parkd.errors import ContextOverflow, InvalidRequest
from parkd.identity.builder import IdentityBuilder
from parkd.identity.images import MAX_IMAGES, MOST_PIXELS, PromptImages, take_out
from parkd.identity.matcher import divergence_of, outside_images, resumable_position
from parkd.identity.output_memory import OutputMemory, Said
from parkd.identity.units import IMAGE_BIT, image_units
from parkd.state import ImageFacts, ImageSize
from parkd.types import ImageData, ImageSpan, TurnRequest
from tests.fakes.images import IMAGE_TOKEN, FakeImages
from tests.fakes.text import END_TOKEN_ID, FIRST_SPECIAL_ID, SPECIAL_TOKENS, FakeTemplate, FakeTokenizer

TOKENIZER = FakeTokenizer((*SPECIAL_TOKENS, IMAGE_TOKEN))
IMAGE_ID = FIRST_SPECIAL_ID + len(SPECIAL_TOKENS)
ONE, TWO = b"PIC one", b"PIC and two"


def picture(data: bytes, where: str = "there") -> dict[str, Any]:
    return {"type": "image", "image": ImageData(base64.b64encode(data).decode(), where)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def builder(answers: OutputMemory | None = None, *, reads_images: bool = True) -> IdentityBuilder:
    images = FakeImages(IMAGE_ID) if reads_images else None
    return IdentityBuilder(TOKENIZER, FakeTemplate(), b"f" * 16, 8, 1 << 20, answers=answers, images=images)


def test_each_position_of_a_picture_has_the_models_id_and_a_unit_of_its_own() -> None:
    identity = builder().build(TurnRequest([user(text("a"), picture(ONE), text("b"), picture(TWO), text("c"))]))
    head = len(TOKENIZER.encode("<|im_start|>user\na"))
    first, second = identity.images
    assert (first.start, first.stop) == (head, head + len(ONE))
    assert (second.start, second.stop) == (first.stop + 1, first.stop + 1 + len(TWO))
    for span, data in ((first, ONE), (second, TWO)):
        assert (span.data, span.digest, span.sees_itself) == (data, sha256(data).digest(), True)
        assert (identity.token_ids[span.start : span.stop] == IMAGE_ID).all()
        assert np.array_equal(identity.units[span.start : span.stop], image_units(span.digest, len(data)))
    between = TOKENIZER.decode(identity.token_ids[first.stop : second.start].tolist())
    assert between == "b"
    assert identity.segments[-1].stop == len(identity)
    assert identity.units[identity.segments[-1].start] & IMAGE_BIT == 0
    tail = identity.token_ids[identity.segments[-1].start :]
    assert TOKENIZER.decode(tail.tolist()) == "<|im_start|>assistant\n"


def test_text_alone_is_what_it_was() -> None:
    request = TurnRequest([user(text("a <|image|> b"))])
    mine, other = builder().build(request), builder(reads_images=False).build(request)
    assert np.array_equal(mine.units, other.units)
    assert mine.images == ()


def test_answers_that_are_put_in_place_move_the_pictures_behind_them() -> None:
    answers = OutputMemory(1 << 20, [TOKENIZER.decode([END_TOKEN_ID])])
    made = builder(answers)
    asked = user(text("x"), picture(ONE), text("?"))
    said = {"role": "assistant", "content": "fine"}
    request = TurnRequest([asked, said, user(text("and"), picture(TWO), text("?"))])
    plain = made.build(request)
    generated = [*b"fi", IMAGE_ID, *b"ne"]  # a model may sample any id
    answers.remember(made.build(TurnRequest([asked])), generated, Said(("fine",)))
    moved = made.build(request)
    assert answers.spliced == 1
    assert len(moved) == len(plain) + 1
    assert moved.images[0] == plain.images[0]
    assert moved.images[1].start == plain.images[1].start + 1
    assert (moved.units & IMAGE_BIT != 0).sum() == len(ONE) + len(TWO)
    span = moved.images[1]
    assert np.array_equal(moved.units[span.start : span.stop], image_units(span.digest, len(TWO)))


def test_the_template_sees_no_bytes() -> None:
    messages, pictures = take_out([user(text("a"), picture(ONE, "here")), {"role": "assistant", "content": "b"}])
    assert messages == [user(text("a"), {"type": "image"}), {"role": "assistant", "content": "b"}]
    assert [each.where for each in pictures] == ["here"]
    request = TurnRequest([user(text("a"), picture(ONE))])
    assert builder().render(request).startswith("<|im_start|>user\na<|image|><|im_end|>")


def test_a_picture_that_is_first_to_differ_is_named() -> None:
    made = builder()
    mine, other = (made.build(TurnRequest([user(text("a"), picture(data), text("b"))])) for data in (ONE, b"PIC two"))
    divergence = divergence_of(mine, other.units, TOKENIZER)
    assert divergence is not None
    assert (divergence.position, divergence.text, divergence.known_text) == (
        mine.images[0].start,
        "image 1",
        "another image",
    )
    words = made.build(TurnRequest([user(text("a and so on"))]))
    divergence = divergence_of(words, mine.units, TOKENIZER)
    assert divergence is not None
    assert divergence.known_text == "an image"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"type": "image", "image": ImageData("a", "p")}], "not valid base64"),
        ([{"type": "image", "image": ImageData("", "p", "is elsewhere.")}], "`p` is elsewhere"),
        ([picture(b"not one", "p")], "`p`: The image cannot be read"),
    ],
)
def test_what_cannot_be_placed_is_refused(parts: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        builder().build(TurnRequest([user(*parts)]))
    for role in ("assistant", "system"):
        with pytest.raises(InvalidRequest, match=f"role '{role}'"):
            builder().build(TurnRequest([{"role": role, "content": [picture(ONE)]}]))
    with pytest.raises(InvalidRequest, match="reads text only"):
        builder(reads_images=False).build(TurnRequest([user(picture(ONE))]))


def test_line_breaks_in_base64_mean_nothing() -> None:
    wrapped = "\r\n".join(base64.b64encode(ONE).decode())
    identity = builder().build(TurnRequest([user({"type": "image", "image": ImageData(wrapped, "p")}, text("x"))]))
    assert identity.images[0].data == ONE


def test_nothing_goes_on_from_inside_a_picture_that_sees_itself() -> None:
    whole, causal = (ImageSpan(10, 20, b"d", sees_itself=sees) for sees in (True, False))
    assert [outside_images(place, [whole]) for place in (9, 10, 11, 19, 20, 21)] == [9, 10, 10, 10, 20, 21]
    assert outside_images(15, [causal]) == 15
    assert resumable_position(15, 100, 0, (), [whole]) == 10
    assert resumable_position(100, 16, 0, (), [whole]) == 10
    assert resumable_position(15, 100, None, (4, 10, 12), [whole]) == 10
    assert resumable_position(15, 100, 0, (), [causal]) == 15


class Counting(FakeImages):
    """Says how large pictures are, and counts those that are decoded."""

    def __init__(self, pixels: int, tokens: int) -> None:
        super().__init__(IMAGE_ID)
        self.decoded = 0
        self._size = ImageSize(pixels, tokens)

    def size(self, data: bytes) -> ImageSize:
        return self._size

    def facts(self, data: bytes) -> ImageFacts:
        self.decoded += 1
        return super().facts(data)


def test_pictures_are_measured_before_any_is_decoded() -> None:
    """Found by use 4: a hundred files of 6 kB decoded for 110 s before anyone asked whether they fit."""
    pictures = [ImageData(base64.b64encode(b"PIC%d" % number).decode(), "there") for number in range(MAX_IMAGES)]
    reader = Counting(49_000_000, 100)
    with pytest.raises(InvalidRequest, match="4900000000 pixels together"):
        PromptImages(pictures, reader, context_tokens=1 << 20)
    with pytest.raises(ContextOverflow, match="10000"):
        PromptImages(pictures, reader, context_tokens=9_999)
    assert reader.decoded == 0
    small = Counting(MOST_PIXELS // MAX_IMAGES, 100)
    PromptImages(pictures, small, context_tokens=10_000)
    assert small.decoded == MAX_IMAGES
