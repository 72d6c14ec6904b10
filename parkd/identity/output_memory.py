"""Remembers the tokens that the model generated, so that an answer that is sent back has the same tokens again.

Clients send answers back as text and tool calls. Rendered again, these rarely give the generated tokens: calls come
back with other spacing and key order, and a text can be tokenised in more than one way. So for each answer this keeps
the hash of everything before it, its ids, its text and its calls:

    then    |== prefix ==|generation prompt|ids ...............|end|
    now     |== prefix ==|the answer, rendered again           |end| ...
                         |-- replaced by the tokens of then ---|

The tokens are used only if the prefix is equal, the text is equal byte for byte and the calls are equal as JSON values
(`splice`); everything else is rendered. The hashes are keyed, so a caller's answers are found only under its own key.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.identity.surrogates import mended
from parkd.identity.units import IMAGE_BIT
from parkd.types import HASH_BYTES, PromptIdentity, Units

ANSWERS_A_PREFIX = 4
"""Answers that are kept for one prompt, since the same prompt can be answered again and differently."""
SAFE_INTEGER = 2**53
_ENTRY_BYTES = 400
"""Bytes of an answer besides its ids and texts: objects and dictionary slots."""

GENERATION = "generation prompt"
"""Label of a prompt's last segment."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as its client saw it."""

    runs: tuple[str, ...] = ()
    """Its text, in several pieces if there are calls in between."""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names, and arguments as `json_key` writes them."""


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    prefix: bytes
    """Keyed hash of the ids before the generation prompt."""
    ids: npt.NDArray[np.int32]
    """Generation prompt and answer, without the end token."""
    said: Said
    namespace: str | None = None
    """The cache namespace of the key that asked; None: read from a file of an earlier version, which did not say."""

    @property
    def bytes(self) -> int:
        texts = (*self.said.runs, self.said.reasoning, *(part for call in self.said.calls for part in call))
        return self.ids.nbytes + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + _ENTRY_BYTES


def json_key(value: Any) -> str:
    """A text that is the same for equal JSON values, whatever their spacing and key order. `1.0` is `1`, as for most
    clients, and a surrogate without a partner is U+FFFD, as in what clients send."""
    return mended(json.dumps(_plain(value), sort_keys=True, separators=(",", ":")))


class OutputMemory:
    """Bounded in bytes; the least recently used answers make room. Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        end_texts: Sequence[str],
        *,
        on_new: Callable[[RememberedAnswer], None] = lambda _answer: None,
        on_forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        """`end_texts` are the texts of the model's end tokens. `on_new` is called with each new answer that is kept,
        `on_forgotten` after answers were forgotten because someone asked for it."""
        self._limit_bytes = limit_bytes
        self._end_texts = tuple(text for text in end_texts if text)
        self._on_new = on_new
        self._on_forgotten = on_forgotten
        self._answers: OrderedDict[bytes, tuple[RememberedAnswer, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.spliced = 0
        """How often an answer was used in place of a rendered one."""

    def __len__(self) -> int:
        """Prompts with remembered answers."""
        return len(self._answers)

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def remember(self, prompt: PromptIdentity, answer_ids: Sequence[int], said: Said) -> None:
        """Keeps the answer to a prompt. `answer_ids` exclude the end token. Does nothing if the prompt's generation
        prompt is not known, because the answer could not be located in the next prompt."""
        last = prompt.segments[-1] if prompt.segments else None
        if last is None or last.label != GENERATION or not len(answer_ids):
            return
        prefix = _hasher(prompt.token_ids[: last.start], prompt.key.digest).digest()
        ids = np.concatenate([prompt.token_ids[last.start :], np.asarray(answer_ids)]).astype(np.int32)
        answer = RememberedAnswer(prefix, ids, said, prompt.key.namespace)
        if self.keep(answer):
            self._on_new(answer)

    def keep(self, answer: RememberedAnswer) -> bool:
        """Keeps an answer. False if it is larger than the limit, or known already."""
        if answer.bytes > self._limit_bytes:
            return False
        with self._lock:
            known = self._answers.pop(answer.prefix, ())
            same = [one for one in known if one.said == answer.said and np.array_equal(one.ids, answer.ids)]
            kept = (*(one for one in known if not any(one is twin for twin in same)), answer)[-ANSWERS_A_PREFIX:]
            self._answers[answer.prefix] = kept
            self._bytes += sum(one.bytes for one in kept) - sum(one.bytes for one in known)
            while self._bytes > self._limit_bytes:
                _, gone = self._answers.popitem(last=False)
                self._bytes -= sum(one.bytes for one in gone)
        return not same

    def forget(self, chosen: Callable[[RememberedAnswer], bool]) -> int:
        """Removes the `chosen` answers. Returns their number."""
        going = {id(answer): answer for answer in self.all() if chosen(answer)}
        with self._lock:
            for prefix in {answer.prefix for answer in going.values()}:
                known = self._answers.get(prefix, ())
                kept = tuple(answer for answer in known if id(answer) not in going)
                self._bytes -= sum(answer.bytes for answer in known) - sum(answer.bytes for answer in kept)
                if kept:
                    self._answers[prefix] = kept
                elif known:
                    del self._answers[prefix]
        if going:
            self._on_forgotten()
        return len(going)

    def all(self) -> list[RememberedAnswer]:
        """All answers, the least recently used first."""
        with self._lock:
            return [answer for answers in self._answers.values() for answer in answers]

    def found(self, prefix: bytes) -> tuple[RememberedAnswer, ...]:
        """The answers to a prompt, oldest first. Returns the same object as long as none is added."""
        with self._lock:
            answers = self._answers.get(prefix, ())
            if answers:
                self._answers.move_to_end(prefix)
        return answers

    def ends(self, text: str, char: int) -> bool:
        """Whether one of the end texts is at `char`."""
        return text.startswith(self._end_texts, char)


def is_within(units: Units, key_digest: bytes, namespace: str) -> Callable[[RememberedAnswer], bool]:
    """A function that tells whether an answer was given within a conversation: to a prompt that is a prefix of it.

    `units` are the conversation's, `[n]`, and `key_digest` and `namespace` those of its key. Units of an image do not
    tell the ids in their place, so beyond the first image an answer is known by its own ids.
    """
    images = np.flatnonzero(units & IMAGE_BIT)
    known = int(images[0]) if len(images) else len(units)
    hasher = _hasher(np.zeros(0, np.int32), key_digest)
    prefixes = {hasher.digest()}
    stream = int32(units[:known]).tobytes()
    for at in range(0, len(stream), 4):
        hasher.update(stream[at : at + 4])
        prefixes.add(hasher.digest())
    rest = units[known:].astype("<u8").tobytes()

    def test(answer: RememberedAnswer) -> bool:
        if answer.prefix in prefixes:
            return True
        wanted, place = answer.ids.astype("<u8").tobytes(), -1
        while answer.namespace in (namespace, None) and (place := rest.find(wanted, place + 1)) >= 0:
            if place % 8 == 0:
                return True
        return False

    return test


def _hasher(ids: npt.NDArray[Any], key_digest: bytes) -> blake2b:
    """The hash of everything before an answer, over its ids."""
    return blake2b(int32(ids).data, key=key_digest, digest_size=HASH_BYTES)


def int32(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Ids in the form in which they are hashed: little-endian and contiguous."""
    return np.ascontiguousarray(ids, dtype="<i4")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < SAFE_INTEGER:
        return int(value)
    return value
