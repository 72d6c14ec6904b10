"""A bounded memory of recent requests, for `/parkd/explain` and for comparing later requests with.

It holds the units of prompts, so only the key that sent a request may ask about it. The oldest requests make room.

It also knows what each key itself sent and got. Keys that share a namespace share parked conversations, and are told of
these only as far as their own requests and answers went.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias

import orjson

from parkd.identity.matcher import common_prefix
from parkd.lane.groups import HASH_BYTES
from parkd.lane.live_rows import no_units
from parkd.types import (
    CacheReport,
    ConversationKey,
    Diagnosis,
    DiagnosisKind,
    Progress,
    PromptIdentity,
    Timings,
    TurnRequest,
    Units,
)

EXPLAINED_LIMIT = 512
EXPLAINED_BYTES = 32 * 1024 * 1024
"""Most bytes of tokens, prefix hashes and segments over all remembered requests."""
SEGMENT_BYTES = 250
"""Bytes of a prompt's segment with its label and of the boundary after it, about."""
NEAR_LIMIT = 64
"""Earlier requests with which the ledger compares one."""
ID_PREFIXES = ("msg_", "resp_", "chatcmpl-", "cmpl-")
"""Prefixes that dialects put before a request's id to make the id of its answer."""
SYSTEM_ROLES = ("system", "developer")
Digest: TypeAlias = bytes


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Digests that tell which part of a prompt changed."""

    model: str
    system: bytes
    tools: bytes

    @classmethod
    def of(cls, request: TurnRequest) -> PromptParts:
        lead = [message for message in request.messages if message.get("role") in SYSTEM_ROLES]
        return cls(request.model, _digest(lead), _digest(list(request.tools)))


@dataclass(frozen=True, slots=True)
class OwnNearest:
    """What a key itself has said of a prompt before."""

    units: Units
    """What it sent, and got, that shares most with the prompt; empty if there is nothing."""
    kept_tokens: int
    """Tokens of the prompt whose state one of its requests left here."""


@dataclass(slots=True)
class Explained:
    """One request. Made when it arrives, and filled in by its turn."""

    request_id: str
    owner: str
    prompt: PromptIdentity
    parts: PromptParts | None
    """None if the client did not ask for diagnoses."""
    began_s: float
    """Unix time."""
    state: str = "waiting"
    report: CacheReport | None = None
    timings: Timings = Timings()  # noqa: RUF009 - frozen
    progress: Progress | None = None
    """How far the reading of its prompt is; None before it begins."""
    end: str | None = None
    """The finish reason, or the error's code."""
    answered: Units | None = None
    """Prompt and answer; None if there is no answer yet, or if no other key shares the namespace."""
    kept_tokens: int = 0
    """Tokens of these whose state its turn left to be kept: not an answer's last, which is only read by the next turn,
    and none if its client asked to keep nothing."""
    arrived_s: float = 0.0
    """By the server's own clock, which nobody sets: for ages."""

    @property
    def bytes(self) -> int:
        prompt, answered_bytes = self.prompt, 0 if self.answered is None else self.answered.nbytes
        described = len(prompt.prefix_hashes) * HASH_BYTES + len(prompt.segments) * SEGMENT_BYTES
        return prompt.units.nbytes + prompt.token_ids.nbytes + described + answered_bytes

    @property
    def said(self) -> Units:
        """What the key sent, and got as the answer."""
        return self.prompt.units[: lasting_tokens(self.prompt)] if self.answered is None else self.answered

    @property
    def kept(self) -> Units:
        """As much of what was said as its own turn left to be kept."""
        return self.said[: self.kept_tokens]


class RequestMemory:
    """Lives on the event loop."""

    def __init__(self, limit: int = EXPLAINED_LIMIT, limit_bytes: int = EXPLAINED_BYTES) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._requests: OrderedDict[tuple[str, str], Explained] = OrderedDict()
        """Requests by (owner, id), since clients choose ids and must not replace each other's requests."""
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def add(self, explained: Explained) -> None:
        """Adds a request. If its owner uses an id again, the newer request replaces the older."""
        key = (explained.owner, explained.request_id)
        self._drop(key)
        self._requests[key] = explained
        self._bytes += explained.bytes
        self._make_room()

    def note_answer(self, explained: Explained, units: Units) -> None:
        """Keeps the units of a request and its answer, if the request is still remembered."""
        if self._requests.get((explained.owner, explained.request_id)) is explained:
            self._bytes -= explained.bytes
            explained.answered = units
            self._bytes += explained.bytes
            self._make_room()

    def note_kept(self, explained: Explained, tokens: int) -> None:
        """So many tokens of a request and its answer are left to be kept."""
        explained.kept_tokens = tokens

    def own_nearest(self, now: Explained) -> OwnNearest:
        """What the same key said before of a request's prompt, under the same conversation key."""
        earlier, units = [one for one in self._own(now.owner, now.prompt.key) if one is not now], now.prompt.units
        best, nearest, kept = 0, None, 0
        for one in reversed(earlier):  # the newest of a conversation is the longest: no older one is compared
            if len(one.said) > best:
                common = common_prefix(one.said, units)
                best, nearest = (common, one) if common > best else (best, nearest)
            if len(one.kept) > kept:
                kept = max(kept, common_prefix(one.kept, units))
        return OwnNearest(no_units() if nearest is None else nearest.said, kept)

    def own_parts(self, owner: str, key: ConversationKey, parked: Iterable[Units]) -> list[tuple[int, Explained]]:
        """How much of what is parked the key's own turns left there: tokens, and its latest request that went so far.
        What goes no further than a prompt of another key, such as a common system prompt, is not its own."""
        parts: dict[str, tuple[int, Explained]] = {}
        for units in parked:
            best: tuple[int, Explained] | None = None
            for one in self._own(owner, key):
                common = common_prefix(one.kept, units)
                if common >= lasting_tokens(one.prompt) and (best is None or common >= best[0]):
                    best = common, one
            if best is not None:
                known = parts.get(best[1].request_id)
                parts[best[1].request_id] = best if known is None else max(known, best, key=lambda part: part[0])
        return list(parts.values())

    def latest_of(self, owner: str) -> list[Explained]:
        """The latest requests of a key, at most NEAR_LIMIT, the newest first."""
        own = (one for one in reversed(self._requests.values()) if one.owner == owner)
        return list(islice(own, NEAR_LIMIT))

    def own_before(self, now: Explained) -> list[Explained]:
        """The latest requests of the same key before `now`, at most NEAR_LIMIT, the newest first."""
        found: list[Explained] = []
        is_before = False
        for one in reversed(self._requests.values()):
            is_before = is_before or one is now
            if is_before and one is not now and one.owner == now.owner:
                found.append(one)
                if len(found) == NEAR_LIMIT:
                    break
        return found

    def said_whole(self, owner: str, key_digest: Digest, units: Units) -> bool:
        """Whether one request of the key and its answer go at least as far as these units, which are then its own."""
        end = len(units) - 1
        for one in self._requests.values():
            said = one.said
            if one.owner != owner or len(said) <= end or said[end] != units[end]:
                continue
            if one.prompt.key.digest == key_digest and common_prefix(said, units) == len(units):
                return True
        return False

    def left_whole(self, owner: str, key_digest: Digest, units: Units) -> bool:
        """Whether the turn of one request of the key left exactly these units to be kept."""
        return owner in self._left_by(key_digest, units)

    def is_left_by_another(self, owner: str, key_digest: Digest, units: Units) -> bool:
        """Whether the turn of a request of another key did."""
        return any(one != owner for one in self._left_by(key_digest, units))

    def _left_by(self, key_digest: Digest, units: Units) -> Iterator[str]:
        for one in self._requests.values():
            is_as_long = one.kept_tokens == len(units) and one.prompt.key.digest == key_digest
            if is_as_long and common_prefix(one.kept, units) == len(units):
                yield one.owner

    def forget(self, key_digest: Digest, units: Units, owner: str | None = None) -> None:
        """Drops the requests of a conversation: those of one key, or, if it is None, of all. A request that only begins
        so, and left state beyond it, is another conversation's."""
        for key, one in list(self._requests.items()):
            shorter = min(len(one.said), len(units))
            is_asked = one.prompt.key.digest == key_digest and owner in (None, one.owner)
            goes_on = one.kept_tokens > len(units)
            if is_asked and shorter and not goes_on and common_prefix(one.said, units) == shorter:
                self._drop(key)

    def _own(self, owner: str, key: ConversationKey) -> Iterator[Explained]:
        return (one for one in self._requests.values() if one.owner == owner and one.prompt.key == key)

    def _make_room(self) -> None:
        while len(self._requests) > self._limit or (self._bytes > self._limit_bytes and len(self._requests) > 1):
            self._drop(next(iter(self._requests)))

    def get(self, request_id: str, owner: str) -> Explained | None:
        """Finds a request by its id or that of its answer. None also if another key sent it."""
        for prefix in ("", *ID_PREFIXES):
            bare = request_id.removeprefix(prefix)
            for name in (bare, f"req_{bare}"):
                found = self._requests.get((owner, name))
                if found is not None:
                    return found
        return None

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._requests.pop(key, None)
        if gone is not None:
            self._bytes -= gone.bytes


def diagnose(now: Explained, earlier: Explained | None, reused_tokens: int) -> Diagnosis:
    """Why the earlier request's prompt was not reused whole."""
    if earlier is None:
        return Diagnosis(DiagnosisKind.NOT_FOUND)
    known = earlier.prompt.units[: lasting_tokens(earlier.prompt)]
    common = common_prefix(now.prompt.units, known)
    if common < len(known):
        return Diagnosis(DiagnosisKind.CHANGED, _changed(now, earlier), common, len(known) - common)
    if reused_tokens < min(common, len(now.prompt) - 1):
        return Diagnosis(DiagnosisKind.UNAVAILABLE, common_tokens=common)
    return Diagnosis(DiagnosisKind.HIT, common_tokens=common)


def summary(explained: Explained) -> Mapping[str, Any]:
    """The short form, for `/slots`."""
    report = explained.report
    return {
        "request_id": explained.request_id,
        "state": explained.state,
        "cache": None if report is None else report.outcome.value,
        "prompt_tokens": len(explained.prompt) if report is None else report.prompt_tokens,
        "reused_tokens": 0 if report is None else report.reused_tokens if report.is_known else None,
        "prompt_progress": None if explained.progress is None else explained.progress.shown,
    }


def document(explained: Explained) -> Mapping[str, Any]:
    """What `/parkd/explain/{request_id}` answers."""
    report, timings = explained.report, explained.timings
    divergence = None if report is None else report.divergence
    return {
        **summary(explained),
        "began": explained.began_s,
        "held_tokens": None if report is None else report.held_tokens,
        "read_tokens": timings.prefill_tokens,
        "why": "" if report is None else report.why,
        "divergence": None
        if divergence is None
        else {
            "token": divergence.position,
            "segment": divergence.label,
            "text": divergence.text,
            "known_text": divergence.known_text,
        },
        "end": explained.end,
        "output_tokens": timings.output_tokens,
        "seconds": {
            "wait": timings.wait_s,
            "restore": timings.restore_s,
            "read": timings.prefill_s,
            "first_token": timings.first_token_s,
            "decode": timings.decode_s,
        },
        "segments": [
            {"start": span.start, "stop": span.stop, "label": span.label} for span in explained.prompt.segments
        ],
        "boundaries": list(explained.prompt.boundaries),
        "rewrites": [{"rule": rewrite.rule, "places": rewrite.places} for rewrite in explained.prompt.rewrites],
    }


def lasting_tokens(prompt: PromptIdentity) -> int:
    """Tokens of a prompt without the generation prompt, which need not be part of the next turn's prompt."""
    last = prompt.segments[-1] if prompt.segments else None
    return last.start if last is not None and last.label == "generation prompt" else len(prompt)


def _changed(now: Explained, earlier: Explained) -> str:
    if now.parts is None or earlier.parts is None:
        return "messages"
    for name in ("model", "tools", "system"):
        if getattr(now.parts, name) != getattr(earlier.parts, name):
            return name
    return "messages"


def _digest(value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # values that JSON cannot express: compared by their repr
        data = repr(value).encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16).digest()
