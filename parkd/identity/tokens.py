"""From text to ids, a segment at a time, so that a conversation that grows tokenises only its new text.

    text   |<|im_start|>system\\n...|<|im_end|>\\n|<|im_start|>user\\n...|<|im_end|>\\n|
           ^ piece               ^ piece       ^ piece              ^ piece

A tokenizer splits a text at its special tokens before anything else, so no other token crosses one. A piece is a
special token and the text up to the next, and the pieces tokenised one by one give the ids of the whole. (The special
token is at the beginning of its piece because some tokenizers treat the beginning of a text differently.)
`cuttable_tokens` tests this at start with adversarial texts; where it fails, texts are tokenised whole.
"""

from __future__ import annotations

import copy
import sys
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.base import Tokenizer
from parkd.identity.cuts import cuttable_tokens, token_pattern
from parkd.identity.stand_ins import StandIns
from parkd.types import StillWanted, TokenIds, always_wanted

TEXTS_KEPT = 256
"""Most whole prompts that are remembered in a namespace, to find the known part of the next one."""
COMPARED = 8
"""Of those, as many of the newest are compared with a new prompt if it continues none of them."""
TAIL_CHARS = 64
"""Characters by which is seen that a prompt may continue a remembered one."""

MARK_CHARS = 64
"""Characters after a cut that its mark may depend on."""

_NOTHING: frozenset[str] = frozenset()
_COMPARE_CHARS = 16384
_PIECE_OVERHEAD_BYTES = 300
"""Bytes of a remembered piece besides text and ids: dictionary slot, its key and array header."""
_CUT_BYTES = 88
"""Bytes of one cut, in two lists of Python integers and one of shared marks."""

_PieceIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TokenisedText:
    """A text, its ids, and where both were cut: piece i is `text[cuts[i]:cuts[i+1]]`, with the ids
    `[positions[i], positions[i+1])`. Both lists begin with 0 and end with the length."""

    text: str
    ids: TokenIds
    """`[n]`, read-only."""
    cuts: list[int]
    positions: list[int]
    marks: list[frozenset[str]] = field(default_factory=list)
    """What `SegmentTokenizer`'s `mark` returned for each cut but the last."""

    def may_go_on(self, text: str) -> bool:
        """Whether another text has the same characters where this one's last piece begins: a prompt ends with a piece
        that the next one of its conversation need not have."""
        end = self.cuts[-2] if len(self.cuts) > 1 else 0
        start = max(0, end - TAIL_CHARS)
        return text.startswith(self.text[start:end], start)

    @property
    def bytes(self) -> int:
        return sys.getsizeof(self.text) + self.ids.nbytes + len(self.cuts) * _CUT_BYTES


class TextMemo:
    """Pieces and whole prompts of one namespace of keys. Each is found only for the namespace that it was kept for,
    which may be a part of that one. Thread-safe. `limit_bytes`: two thirds for pieces, the rest for whole prompts."""

    def __init__(self, limit_bytes: int) -> None:
        self._piece_limit_bytes = limit_bytes * 2 // 3
        self._text_limit_bytes = limit_bytes - self._piece_limit_bytes
        self._pieces: OrderedDict[tuple[str, str], _PieceIds] = OrderedDict()
        self._piece_bytes = 0
        self._texts: deque[tuple[str, TokenisedText]] = deque()
        self._text_bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes remembered now."""
        return self._piece_bytes + self._text_bytes

    def piece(self, namespace: str, text: str) -> _PieceIds | None:
        with self._lock:
            known = self._pieces.get((namespace, text))
            if known is not None:
                self._pieces.move_to_end((namespace, text))
            return known

    def keep_piece(self, namespace: str, text: str, ids: _PieceIds) -> None:
        cost = sys.getsizeof(text) + ids.nbytes + _PIECE_OVERHEAD_BYTES
        with self._lock:
            if cost > self._piece_limit_bytes or (namespace, text) in self._pieces:
                return
            self._pieces[namespace, text] = ids
            self._piece_bytes += cost
            while self._piece_bytes > self._piece_limit_bytes:
                (_, old), old_ids = self._pieces.popitem(last=False)
                self._piece_bytes -= sys.getsizeof(old) + old_ids.nbytes + _PIECE_OVERHEAD_BYTES

    def texts(self, namespace: str) -> list[TokenisedText]:
        """The whole prompts, the newest last."""
        with self._lock:
            return [known for of, known in self._texts if of == namespace]

    def keep_text(self, namespace: str, tokenised: TokenisedText, *, replaces: TokenisedText | None) -> None:
        with self._lock:
            kept = [
                (of, known)
                for of, known in self._texts
                if known is not replaces and (of != namespace or known.text != tokenised.text)
            ]
            if tokenised.bytes <= self._text_limit_bytes:
                kept.append((namespace, tokenised))
            size_bytes = sum(known.bytes for _, known in kept)
            while size_bytes > self._text_limit_bytes or len(kept) > TEXTS_KEPT:
                size_bytes -= kept.pop(0)[1].bytes
            self._texts = deque(kept)
            self._text_bytes = size_bytes


class SegmentTokenizer:
    """Thread-safe. `within` gives the one of a namespace."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        memo_bytes: int,
        mark: Callable[[str, int], frozenset[str]] | None = None,
        stand_ins: StandIns | None = None,
    ) -> None:
        """Texts may have `stand_ins`. `mark(text, cut)` returns what begins at a cut. It must look at no more than the
        longest special token plus `MARK_CHARS` characters after the cut, because its result is used for all texts that
        are equal there."""
        self._tokenizer = tokenizer
        self._stand_ins = stand_ins or StandIns()
        self._mark = mark or (lambda _text, _cut: _NOTHING)
        self._cuttable = cuttable_tokens(tokenizer)
        self._pattern = token_pattern(tokenizer.special_tokens) if self._cuttable else None
        self._reach = max((len(token) for token in tokenizer.special_tokens), default=0) + MARK_CHARS
        self._memo = TextMemo(memo_bytes)
        self._namespace = ""
        self._still_wanted: StillWanted = always_wanted

    def within(self, memo: TextMemo, namespace: str, still_wanted: StillWanted = always_wanted) -> SegmentTokenizer:
        """The same, which remembers in `memo` what is said in `namespace`, and raises what `still_wanted` raises before
        it tokenises a piece."""
        other = copy.copy(self)
        other._memo, other._namespace, other._still_wanted = memo, namespace, still_wanted
        return other

    @property
    def by_segment(self) -> bool:
        """False if texts of this tokenizer can only be tokenised whole."""
        return self._pattern is not None

    @property
    def memo_bytes(self) -> int:
        """Bytes remembered now."""
        return self._memo.bytes

    def tokenise(self, text: str) -> TokenisedText:
        return self.tokenised_on(text)[0]

    def tokenised_on(self, text: str) -> tuple[TokenisedText, TokenisedText | None]:
        """The tokens of a text, and the remembered one whose beginning it has; None: there is none."""
        base, shared = self._base_of(text)
        if base is not None and base.text == text:
            self._memo.keep_text(self._namespace, base, replaces=base)
            return base, base
        cuts, positions = (base.cuts[:shared], base.positions[:shared]) if base is not None else ([], [])
        marks = base.marks[:shared] if base is not None else []
        start, position = (base.cuts[shared], base.positions[shared]) if base is not None else (0, 0)
        arrays: list[npt.NDArray[Any]] = [base.ids[:position]] if base is not None else []
        for stop in self._cuts_of(text, start):
            ids = self._piece(text[start:stop])
            arrays.append(ids)
            cuts.append(start)
            positions.append(position)
            marks.append(self._mark(text, start))
            start, position = stop, position + len(ids)
        cuts.append(len(text))
        positions.append(position)
        whole = np.concatenate(arrays, dtype=np.int64) if arrays else np.empty(0, np.int64)
        whole.flags.writeable = False
        result = TokenisedText(text, whole, cuts, positions, marks)
        # A text of which all but its tail (a generation prompt) is in the new one will not be needed again.
        grown = base if base is not None and shared >= len(base.cuts) - 3 else None
        self._memo.keep_text(self._namespace, result, replaces=grown)
        return result, base

    def expect(self, text: str) -> None:
        """Tokenises the pieces of a text that is likely to be part of a prompt soon, so that they are known then. Its
        last piece counts as whole."""
        start = 0
        for stop in self._cuts_of(text, 0):
            self._piece(text[start:stop])
            start = stop

    def position_of(self, tokenised: TokenisedText, char: int) -> int:
        """The last token position that lies wholly before `char`, for any later text that agrees up to there.

        Exact at a cut; inside a piece, the head is tokenised alone and counts as far as its ids are the same.
        """
        piece = bisect_right(tokenised.cuts, char) - 1
        position = tokenised.positions[piece]
        if tokenised.cuts[piece] == char:
            return position
        head = self._piece(tokenised.text[tokenised.cuts[piece] : char])
        known = tokenised.ids[position : tokenised.positions[piece + 1]]
        count = min(len(head), len(known))
        differs = head[:count] != known[:count]
        return position + (int(differs.argmax()) if differs.any() else count)

    def _cuts_of(self, text: str, start: int) -> list[int]:
        """Ends of the pieces of `text[start:]`, in order."""
        stops = []
        if self._pattern is not None:
            cuttable = self._cuttable
            stops = [m.start() for m in self._pattern.finditer(text, start) if m.start() > start and m[0] in cuttable]
        if start < len(text):
            stops.append(len(text))
        return stops

    def _piece(self, text: str) -> _PieceIds:
        known = self._memo.piece(self._namespace, text)
        if known is not None:
            return known
        self._still_wanted()
        parts = self._stand_ins.split(text)
        if parts is None:
            ids = np.asarray(self._tokenizer.encode(self._stand_ins.undo(text)), dtype=np.int32)
        else:
            ids = np.asarray(self._tokenizer.encode_parts(parts, self._stand_ins.control), dtype=np.int32)
        self._memo.keep_piece(self._namespace, text, ids)
        return ids

    def _base_of(self, text: str) -> tuple[TokenisedText | None, int]:
        """The remembered text that shares the most pieces, and the index of the first cut that is not shared.

        A special token is found by the characters from its start on, so cuts are the same only as long as both texts
        agree for the longest token's length beyond them.
        """
        best, best_chars, best_shared = None, 0, 0
        texts = self._memo.texts(self._namespace)[::-1]
        for known in [known for known in texts if known.may_go_on(text)] or texts[:COMPARED]:
            same = common_chars(known.text, text)
            if same == len(text) == len(known.text):
                return known, len(known.cuts) - 1
            shared = bisect_right(known.cuts, same - self._reach, hi=len(known.cuts) - 1) - 1
            if shared > 0 and known.cuts[shared] > best_chars:
                best, best_chars, best_shared = known, known.cuts[shared], shared
        return best, best_shared


def common_chars(a: str, b: str) -> int:
    """Leading characters that are equal; compares slices, so the cost is that of the equal part."""
    stop = min(len(a), len(b))
    start = 0
    while start < stop and a[start : start + _COMPARE_CHARS] == b[start : start + _COMPARE_CHARS]:
        start += _COMPARE_CHARS
    if start >= stop:
        return stop
    low, high = start, min(start + _COMPARE_CHARS, stop)
    while low < high:
        middle = (low + high + 1) // 2
        if a[start:middle] == b[start:middle]:
            low = middle
        else:
            high = middle - 1
    return low
