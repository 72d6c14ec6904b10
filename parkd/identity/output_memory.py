"""What the model generated, kept so that an answer sent back is the very tokens it was.

Clients send an answer back as text and calls. Rendered again, its tokens are rarely the generated ones: calls come back
with other spacing and key order, and text may be cut into tokens in more ways than one. So for each answer this holds
the hash of what stood before it, its ids, its text and its calls:

    then    |== prefix ==|generation prompt|ids ...............|end|
    now     |== prefix ==|the answer, rendered again           |end| ...
                         |-- replaced by the tokens of then ---|

Only where the prefix is equal, the text byte-equal and the calls equal as JSON values (`splice`); everything else is
rendered.
Hashes are keyed, so one caller's answers are found under that caller's key only.
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

from parkd.types import HASH_BYTES, PromptIdentity

ANSWERS_A_PREFIX = 4
"""An answer asked for again gives another; so many are kept of one prompt."""
SAFE_INTEGER = 2**53
_ENTRY_BYTES = 400
"""Of an answer besides its ids and texts: objects, dictionary seats."""

GENERATION = "generation prompt"
"""Label of a prompt's last segment."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as its client saw it."""

    runs: tuple[str, ...] = ()
    """Its text; more than one piece where calls stand between."""
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

    @property
    def bytes(self) -> int:
        texts = (*self.said.runs, self.said.reasoning, *(part for call in self.said.calls for part in call))
        return self.ids.nbytes + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + _ENTRY_BYTES


def json_key(value: Any) -> str:
    """Equal for equal JSON values, whatever their spacing and key order; `1.0` is `1`, as it is for most clients."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


class OutputMemory:
    """Bounded by bytes; the answer used longest ago makes room. Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        end_texts: Sequence[str],
        *,
        on_new: Callable[[RememberedAnswer], None] = lambda _answer: None,
    ) -> None:
        """`end_texts` are the texts of the model's end tokens; `on_new` is told of each answer that is kept."""
        self._limit_bytes = limit_bytes
        self._end_texts = tuple(text for text in end_texts if text)
        self._on_new = on_new
        self._answers: OrderedDict[bytes, tuple[RememberedAnswer, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.spliced = 0
        """Answers that were put in place of a rendered one, over its life."""

    def __len__(self) -> int:
        """Prompts of which answers are held."""
        return len(self._answers)

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def remember(self, prompt: PromptIdentity, answer_ids: Sequence[int], said: Said) -> None:
        """Keeps the answer to a prompt. `answer_ids` end before the end token. A prompt whose generation prompt is not
        known leaves nothing: where its answer stands in the next one could not be told."""
        last = prompt.segments[-1] if prompt.segments else None
        if last is None or last.label != GENERATION or not len(answer_ids):
            return
        hasher = blake2b(int32(prompt.token_ids[: last.start]).data, key=prompt.key.digest, digest_size=HASH_BYTES)
        ids = np.concatenate([prompt.token_ids[last.start :], np.asarray(answer_ids)]).astype(np.int32)
        answer = RememberedAnswer(hasher.digest(), ids, said)
        if self.keep(answer):
            self._on_new(answer)

    def keep(self, answer: RememberedAnswer) -> bool:
        """False if it is larger than the whole bound, or known."""
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

    def all(self) -> list[RememberedAnswer]:
        """Oldest first."""
        with self._lock:
            return [answer for answers in self._answers.values() for answer in answers]

    def found(self, prefix: bytes) -> tuple[RememberedAnswer, ...]:
        """The answers to a prompt, oldest first; the same object as long as nothing was added."""
        with self._lock:
            answers = self._answers.get(prefix, ())
            if answers:
                self._answers.move_to_end(prefix)
        return answers

    def ends(self, text: str, char: int) -> bool:
        """Whether an answer's end stands there."""
        return text.startswith(self._end_texts, char)


def int32(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """As they are hashed: little-endian, contiguous."""
    return np.ascontiguousarray(ids, dtype="<i4")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < SAFE_INTEGER:
        return int(value)
    return value
