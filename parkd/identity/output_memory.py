"""What the model generated, kept so that an answer sent back is the very tokens it was.

Clients send an answer back as text and calls. Rendered again, its tokens are rarely the generated ones: calls come back
with other spacing and key order, and text may be cut into tokens in more ways than one. So for each answer this holds
the hash of what stood before it, its ids, its text and its calls:

    then    |== prefix ==|generation prompt|ids ...............|end|
    now     |== prefix ==|the answer, rendered again           |end| ...
                         |-- replaced by the tokens of then ---|

Only where the prefix is equal, the text byte-equal and the calls equal as JSON values; everything else is rendered.
Hashes are keyed, so one caller's answers are found under that caller's key only.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.identity.canonical import CanonicalMessage
from parkd.identity.tokens import TokenisedText
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
        hasher = blake2b(_int32(prompt.token_ids[: last.start]).data, key=prompt.key.digest, digest_size=HASH_BYTES)
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

    def splice(
        self,
        turns: Sequence[CanonicalMessage],
        starts: Mapping[int, int],
        tokenised: TokenisedText,
        key_digest: bytes,
    ) -> TokenisedText:
        """The same text with the ids of remembered answers. `starts` gives the character at which turns begin."""
        if not self._answers:
            return tokenised
        text, cuts, positions, ids = tokenised.text, tokenised.cuts, tokenised.positions, _int32(tokenised.ids)
        hasher = blake2b(key=key_digest, digest_size=HASH_BYTES)
        replaced: list[tuple[int, int, npt.NDArray[np.int32]]] = []
        done = 0
        for index in sorted(starts):
            turn = turns[index]
            first = bisect_left(cuts, starts[index])
            if turn.role != "assistant" or cuts[first] != starts[index] or first < done:
                continue
            hasher.update(ids[positions[done] : positions[first]].data)
            done = first
            answers = self._found(hasher.digest())
            if not answers:
                continue
            end = next((place for place in range(first + 1, len(cuts) - 1) if self._ends(text, cuts[place])), first)
            rendered = text[cuts[first] : cuts[end]]
            answer = next((one for one in reversed(answers) if _is_said(turn.message, rendered, one.said)), None)
            if end == first or answer is None:
                continue
            hasher.update(_int32(answer.ids).data)
            replaced.append((first, end, answer.ids))
            done = end
        if not replaced:
            return tokenised
        self.spliced += len(replaced)
        return _with(tokenised, replaced)

    def _ends(self, text: str, char: int) -> bool:
        return text.startswith(self._end_texts, char)

    def _found(self, prefix: bytes) -> tuple[RememberedAnswer, ...]:
        with self._lock:
            answers = self._answers.get(prefix, ())
            if answers:
                self._answers.move_to_end(prefix)
        return answers


def _is_said(message: Mapping[str, Any], rendered: str, said: Said) -> bool:
    """Whether a message is this answer, and the template shows all of it.

    A template that drops earlier thinking must not get it back: then the answer is rendered.
    """
    content = message.get("content") or ""
    if content not in ("".join(said.runs), "\n".join(said.runs)):
        return False
    calls = message.get("tool_calls") or ()
    if len(calls) != len(said.calls) or any(map(_differs, calls, said.calls)):
        return False
    thought = message.get("reasoning_content") or ""
    if thought and thought != said.reasoning:
        return False
    shown = (*said.runs, said.reasoning, *(name for name, _ in said.calls))
    return all(part.strip() in rendered for part in shown)


def _differs(call: Any, said: tuple[str, str]) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != said[0]:
        return True
    arguments = function.get("arguments")
    try:
        return json_key(json.loads(arguments) if isinstance(arguments, str) else arguments) != said[1]
    except (ValueError, TypeError, RecursionError):
        return True


def _with(tokenised: TokenisedText, replaced: Sequence[tuple[int, int, npt.NDArray[np.int32]]]) -> TokenisedText:
    """Pieces `[first, end)` become one piece with other ids, for each of `replaced`."""
    cuts: list[int] = []
    positions: list[int] = []
    parts: list[npt.NDArray[Any]] = []
    place = shift = 0
    for first, end, ids in (*replaced, (len(tokenised.cuts) - 1, None, None)):
        parts.append(tokenised.ids[tokenised.positions[place] : tokenised.positions[first]])
        cuts += tokenised.cuts[place : first + 1]
        positions += [position + shift for position in tokenised.positions[place : first + 1]]
        if end is not None and ids is not None:
            parts.append(ids)
            shift += len(ids) - (tokenised.positions[end] - tokenised.positions[first])
            place = end
    whole = np.concatenate(parts, dtype=np.int64)
    whole.flags.writeable = False
    return TokenisedText(tokenised.text, whole, cuts, positions)


def _int32(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(ids, dtype="<i4")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < SAFE_INTEGER:
        return int(value)
    return value
