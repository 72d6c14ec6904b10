"""Images in a prompt: taken out of the messages, and put into the ids.

messages   [ text, image, text ]                        the template sees that there is an image, never its bytes
text       ... <placeholder> ...                        as the template writes it
ids        ... i ...      -> ... i i i i i ...          one for every position of the image
units      ... i ...      -> ... h0 h1 h2 h3 h4 ...     from the image's digest and the position inside it
"""

from __future__ import annotations

import base64
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from parkd.engine_adapter.base import ImageReader
from parkd.errors import ContextOverflow, InvalidRequest
from parkd.identity.tokens import TokenisedText
from parkd.state import ImageFacts, ImageSize
from parkd.types import ImageData, ImageSpan, Message, StillWanted, TokenIds, always_wanted

MAX_IMAGES = 100
"""Most images in one request."""
MOST_PIXELS = 1 << 28
"""Most pixels that are decoded for one request: about six seconds of CPU. A hundred screenshots have fewer."""
IMAGE_ROLES = ("user", "tool", "function")
FACTS_KEPT = 1024
"""Images whose facts are remembered in a namespace of keys, since an agent sends its whole history with every turn."""
_FACTS_BYTES = 400
"""Bytes of one of them: two digests, two objects and a slot."""


class ImageMemo:
    """The facts about files that were decoded. Each is found only for the namespace that sent it. Thread-safe."""

    LIMIT_BYTES = FACTS_KEPT * _FACTS_BYTES

    def __init__(self) -> None:
        self._facts: OrderedDict[bytes, ImageFacts] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Bytes remembered now."""
        return len(self._facts) * _FACTS_BYTES

    def get(self, name: bytes) -> ImageFacts | None:
        with self._lock:
            known = self._facts.get(name)
            if known is not None:
                self._facts.move_to_end(name)
            return known

    def keep(self, name: bytes, facts: ImageFacts) -> None:
        with self._lock:
            self._facts[name] = facts
            while len(self._facts) > FACTS_KEPT:
                self._facts.popitem(last=False)


class RememberingReader:
    """An `ImageReader` that asks another one only for files that this namespace has not sent lately."""

    def __init__(self, reader: ImageReader, memo: ImageMemo, namespace: str) -> None:
        self.tokens = reader.tokens
        self.sees_itself = reader.sees_itself
        self._reader = reader
        self._memo = memo
        self._namespace = namespace.encode()

    def size(self, data: bytes) -> ImageSize:
        known = self._memo.get(self._name(data))
        return self._reader.size(data) if known is None else ImageSize(0, known.tokens)

    def facts(self, data: bytes) -> ImageFacts:
        name = self._name(data)
        known = self._memo.get(name)
        if known is None:
            known = self._reader.facts(data)
            self._memo.keep(name, known)
        return known

    def _name(self, data: bytes) -> bytes:
        hasher = sha256(self._namespace + b"/")
        hasher.update(data)
        return hasher.digest()


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """An image whose position is not known yet."""

    data: bytes
    digest: bytes
    tokens: int


class PromptImages:
    """The images of one prompt. Call `wrapped`, then `expanded`, then `spans`. Without images they change nothing."""

    def __init__(
        self,
        pictures: Sequence[ImageData],
        reader: ImageReader | None,
        context_tokens: int | None = None,
        still_wanted: StillWanted = always_wanted,
    ) -> None:
        """Decodes and measures the images, which is slow, unless their headers show that they are too many. Raises
        InvalidRequest, which names the image, and ContextOverflow."""
        self._reader = reader
        self._images: list[_Read] = []
        self._expanded: TokenisedText | None = None
        self._starts: list[int] = []
        if not pictures:
            return
        if reader is None:
            where = pictures[0].where
            raise InvalidRequest(
                f"`{where}` is an image; this server's model reads text only. Describe the image in words instead, or "
                f"start parkd with a model that reads images.",
                param=where,
            )
        if len(pictures) > MAX_IMAGES:
            raise InvalidRequest(
                f"The request has {len(pictures)} images; at most {MAX_IMAGES} are allowed. Leave older ones out.",
                param="messages",
            )
        files = [_file(picture) for picture in pictures]
        _check_sizes(pictures, files, reader, context_tokens)
        for picture, data in zip(pictures, files, strict=True):
            still_wanted()
            self._images.append(_read(picture, data, reader))

    def wrapped(self, text: str) -> str:
        """The rendered text, with each placeholder as the model expects it. Raises InvalidRequest if the numbers of
        images and of placeholders differ."""
        if self._reader is None or not self._images:
            return text
        tokens = self._reader.tokens
        places = text.count(tokens.placeholder)
        if places != len(self._images):
            raise InvalidRequest(
                f"The request has {len(self._images)} images and its prompt {places} places for them "
                f"({tokens.placeholder!r}). Leave that word out of the texts, and put images only where the model's "
                f"chat template shows them.",
                param="messages",
            )
        return text.replace(tokens.placeholder, tokens.wrapped)

    def expanded(self, tokenised: TokenisedText) -> TokenisedText:
        """Repeats the id of each image for all its positions. Raises InvalidRequest."""
        if self._reader is None or not self._images:
            return tokenised
        places = np.flatnonzero(tokenised.ids == self._reader.tokens.token_id)
        if len(places) != len(self._images):
            raise InvalidRequest(
                "A text contains the model's placeholder for an image, besides real images. Remove it from the texts.",
                param="messages",
            )
        counts = np.array([image.tokens for image in self._images])
        before = np.concatenate([[0], np.cumsum(counts - 1)])
        repeats = np.ones(len(tokenised.ids), dtype=np.int64)
        repeats[places] = counts
        ids: TokenIds = np.repeat(tokenised.ids, repeats)
        ids.flags.writeable = False
        at = np.asarray(tokenised.positions)
        positions = (at + before[np.searchsorted(places, at)]).tolist()
        self._starts = (places + before[:-1]).tolist()
        self._expanded = TokenisedText(tokenised.text, ids, tokenised.cuts, positions, tokenised.marks)
        return self._expanded

    def spans(self, spliced: TokenisedText) -> tuple[ImageSpan, ...]:
        """The positions of the images after remembered answers were spliced in, which moves later text. Raises
        InvalidRequest if the prompt ends with an image."""
        before, reader = self._expanded, self._reader
        if before is None or reader is None:
            return ()
        spans = []
        for start, image in zip(self._starts, self._images, strict=True):
            piece = bisect_right(before.positions, start) - 1
            # A piece with an image is never part of an answer, so its cut still exists.
            kept = bisect_left(spliced.cuts, before.cuts[piece])
            first = start + spliced.positions[kept] - before.positions[piece]
            spans.append(ImageSpan(first, first + image.tokens, image.digest, image.data, reader.sees_itself))
        if spans[-1].stop == len(spliced.ids):
            raise InvalidRequest("The prompt ends with an image. Put some text after it.", param="messages")
        return tuple(spans)


def take_out(messages: Sequence[Message]) -> tuple[list[Message], list[ImageData]]:
    """The messages with each image replaced by `{"type": "image"}`, and the images in order.

    Raises InvalidRequest for an image in a message that cannot contain one.
    """
    pictures: list[ImageData] = []
    result: list[Message] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found = [part["image"] for part in parts if _holds_image(part)]
        if not found:
            result.append(message)
            continue
        if message.get("role") not in IMAGE_ROLES:
            raise InvalidRequest(
                f"`{found[0].where}` is an image in a message of role {message.get('role')!r}. Put it in a user's "
                f"message or in a tool's result.",
                param=found[0].where,
            )
        pictures += found
        shown = [{"type": "image"} if _holds_image(part) else part for part in parts]
        result.append({**message, "content": shown})
    return result, pictures


def _file(picture: ImageData) -> bytes:
    if picture.refusal:
        raise InvalidRequest(f"`{picture.where}` {picture.refusal}", param=picture.where)
    try:
        return base64.b64decode("".join(picture.base64.split()), validate=True)
    except ValueError as error:
        raise InvalidRequest(f"`{picture.where}` is not valid base64 ({error}).", param=picture.where) from error


def _check_sizes(
    pictures: Sequence[ImageData], files: Sequence[bytes], reader: ImageReader, context_tokens: int | None
) -> None:
    """Raises InvalidRequest for images that have too many pixels together, and ContextOverflow for images that do not
    fit. None is decoded for that."""
    pixels = tokens = 0
    for picture, data in zip(pictures, files, strict=True):
        with _naming(picture):
            size = reader.size(data)
        pixels, tokens = pixels + size.pixels, tokens + size.tokens
    if context_tokens is not None and tokens > context_tokens:
        raise ContextOverflow(tokens, 0, context_tokens)
    if pixels > MOST_PIXELS:
        raise InvalidRequest(
            f"The images have {pixels} pixels together; at most {MOST_PIXELS} are decoded for one request. Send "
            "smaller ones, or leave older ones out.",
            param="messages",
        )


def _read(picture: ImageData, data: bytes, reader: ImageReader) -> _Read:
    with _naming(picture):
        facts = reader.facts(data)
    return _Read(data, facts.digest, facts.tokens)


@contextmanager
def _naming(picture: ImageData) -> Iterator[None]:
    """Errors in the context name the image."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"`{picture.where}`: {error.message}", param=picture.where) from error


def _holds_image(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("image"), ImageData)
