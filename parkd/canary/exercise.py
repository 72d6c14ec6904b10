"""Reads two conversations, parks, overwrites and restores them, and compares with what was never parked.

    A   read [0, cut) | read [cut, end) | parked here | answered      what must come back
    A   cut back to the cut, live  -> state, read to the end, answer
    B   read, parked, answered                                        overwrites A's state
    A   restored at its end        -> state, answer
    A   restored at the cut        -> state, read to the end, answer
    B   restored at its end        -> state, answer

State is compared part by part, as far as the engine tells its parts (`Seat.state_parts`), and answers by the ids and
logprobs of each token, bit for bit. The same calls of the engine make the same shapes, so nothing may differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from threading import Event

import numpy as np

from parkd.canary.talks import Talk, talks_of
from parkd.engine_adapter.base import Engine, Seat
from parkd.errors import EngineLost, ParkdError
from parkd.identity.chain import prefix_hashes
from parkd.state import Grain, Resume, StateSizes
from parkd.store.records import CaptureRequest, Parked, Refused, StoreConfig
from parkd.store.slabs import SlabHooks
from parkd.store.store import ConversationStore
from parkd.types import ConversationKey, SamplingParams

SHORTEST_TOKENS = 12
LONGEST_TOKENS = 320
"""More than a block, so that a whole one and a part of one are moved."""
READ_S = 2.0
"""About the longest that reading both conversations may take; slower models get shorter ones."""
ANSWER_TOKENS = 3
SLOW_S = 0.25
"""If `SHORTEST_TOKENS` take longer to read, answers have one token, which shows a wrong state as well."""
GREEDY = SamplingParams(temperature=0.0, top_logprobs=16)
LEAST_BUDGET_BYTES = 1 << 32
NAMESPACE = "canary"
THE_ANSWER = "the answer"
MOST_NAMED = 8
"""Parts that a sentence names."""
NEVER = Event()

Parts = Mapping[str, bytes]
Answer = tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]
"""Of each token its id, its logprob and the most probable ids with theirs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What was not as it should be after one step."""

    step: str
    parts: tuple[str, ...]
    """The names of state that differed, `THE_ANSWER`, or what the engine said when it failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a canary found."""

    differences: tuple[Difference, ...] = ()
    steps: int = 0
    """Comparisons made."""
    tokens: int = 0
    """Length of the conversations."""
    took_s: float = 0.0
    skipped: str = ""
    """Why nothing was tried; empty if it was."""

    @property
    def has_failed(self) -> bool:
        return bool(self.differences)


def examine(
    engine: Engine, clock: Callable[[], float] = time.monotonic, slab_hooks: SlabHooks | None = None
) -> Verdict:
    """Tries the engine's first seat, which must be empty and is empty afterwards. `slab_hooks` are those of the store
    that is used later. Raises EngineLost, and EngineFailure if the model cannot read at all."""
    layout, began_s = engine.info.layout, clock()
    if layout.grain is Grain.FILE:
        return Verdict(skipped="the state is in a llama-server's own files, which that server writes and reads")
    seat = engine.seats[0]
    most = engine.info.context_tokens
    if most < 2 * SHORTEST_TOKENS:
        return Verdict(skipped=f"the context of {most} tokens is too short for it")
    took_s = _seconds(seat, clock)
    tokens = min(_length(took_s), most * 2 // 3 - ANSWER_TOKENS)
    talks = talks_of(engine, tokens)
    if max(len(talk.ids) for talk in talks) + ANSWER_TOKENS > most:
        return Verdict(skipped=f"the context of {most} tokens is too short for an image in it")
    size = layout.block_tokens
    blocks = 4 * -(-max(len(talk.ids) for talk in talks) // size)
    slab_bytes = max(1 << 20, layout.block_bytes(blocks * size, blocks))
    budget = max(LEAST_BUDGET_BYTES, 4 * slab_bytes + 64 * layout.fixed_bytes)
    store = ConversationStore(StoreConfig(budget, size, slab_bytes=slab_bytes), layout, clock, slab_hooks=slab_hooks)
    try:
        trial = _Trial(engine, seat, store, 1 if took_s > SLOW_S else ANSWER_TOKENS)
        trial.run(*talks)
    finally:
        seat.reset()
        store.close()
    return Verdict(tuple(trial.differences), trial.steps, tokens, clock() - began_s)


def _seconds(seat: Seat, clock: Callable[[], float]) -> float:
    """How long a few tokens take to read: the second time, since the first may compile kernels."""
    ids = np.random.default_rng(0).integers(0, seat.info.vocab_size, SHORTEST_TOKENS)
    took_s = 0.0
    for _ in range(2):
        seat.reset()
        began_s = clock()
        seat.begin(ids, GREEDY)
        seat.extend(ids[:-1], cancel=NEVER)
        took_s = clock() - began_s
    seat.reset()
    return took_s


def _length(took_s: float) -> int:
    """How many tokens a conversation may have if `SHORTEST_TOKENS` take so long."""
    return min(LONGEST_TOKENS, max(SHORTEST_TOKENS, int(READ_S / 2 / max(took_s, 1e-6) * SHORTEST_TOKENS)))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A conversation that was parked, and what was seen of it before."""

    parked: Parked
    at_cut: Parts
    at_end: Parts
    answer: Answer


class _Trial:
    def __init__(self, engine: Engine, seat: Seat, store: ConversationStore, answer_tokens: int) -> None:
        self._engine, self._seat, self._store = engine, seat, store
        self._answer_tokens = answer_tokens
        self.differences: list[Difference] = []
        self.steps = 0

    def run(self, first: Talk, second: Talk) -> None:
        kept = self._park(first)
        if kept is not None and (first.cut in self._seat.checkpoints or self._seat.rewind_floor <= first.cut):
            self._compare("cut back to an earlier position", first, kept, first.cut, self._seat.truncate, first.cut)
        self._seat.reset()
        other = self._park(second)
        if kept is None or other is None:
            return
        self._restored("restored at its end", first, kept, first.end)
        places = {checkpoint.position for checkpoint in kept.parked.checkpoints}
        if first.cut in places or not self._engine.info.layout.resume.needs_checkpoints:
            self._restored("restored at an earlier position", first, kept, first.cut)
        self._restored("another conversation, restored at its end", second, other, second.end)

    def _park(self, talk: Talk) -> _Kept | None:
        """Reads and parks a conversation, then answers. None if it could not be parked, which is noted."""
        seat, layout = self._seat, self._engine.info.layout
        seat.begin(talk.ids, GREEDY, images=talk.images)
        seat.extend(talk.ids[: talk.cut], cancel=NEVER, checkpoint_at=(talk.cut,))
        at_cut = seat.state_parts()
        seat.extend(talk.ids[talk.cut : talk.end], cancel=NEVER, checkpoint_at=(talk.end,))
        if layout.resume.needs_checkpoints:
            seat.checkpoint()
        at_end, units = seat.state_parts(), talk.units[: talk.end]
        key = ConversationKey(NAMESPACE, self._engine.info.fingerprint)
        checkpoints, sizes = self._checkpoints(talk.end)
        request = CaptureRequest(
            key.digest,
            units,
            prefix_hashes(units, key.digest, layout.block_tokens),
            (),
            layout.digest,
            checkpoints,
            NAMESPACE,
            sizes,
        )
        capture = self._store.begin_capture(request)
        if isinstance(capture, Refused):
            self._note("parked", (capture.message,))
            return None
        try:
            in_flight = seat.start_capture(capture.transfer)
            sums = seat.capture(capture.transfer) if in_flight is None else in_flight.wait()
        except BaseException:
            self._store.abort(capture)
            raise
        parked = self._store.commit(capture, sums)
        return _Kept(parked, at_cut, at_end, self._answer(talk))

    def _checkpoints(self, end: int) -> tuple[tuple[int, ...], StateSizes | None]:
        seat, layout = self._seat, self._engine.info.layout
        places = tuple(place for place in seat.checkpoints if place <= end)
        if not layout.is_opaque:
            return places, None
        inner = tuple(place for place in places if place < end) if layout.resume is Resume.AT_CHECKPOINTS else ()
        sizes = seat.state_sizes(inner)
        if not layout.resume.needs_checkpoints:
            return (), sizes
        return (*inner, end), StateSizes(sizes.whole, (*sizes.checkpoints, 0))

    def _restored(self, step: str, talk: Talk, kept: _Kept, position: int) -> None:
        def restore() -> None:
            with self._store.lease(kept.parked.id, position) as lease:
                self._seat.restore(lease.transfer)

        self._compare(step, talk, kept, position, restore)

    def _compare(
        self, step: str, talk: Talk, kept: _Kept, position: int, move: Callable[..., None], *args: int
    ) -> None:
        """Makes `move`, which should leave the engine at `position`, reads on to the end, and compares."""
        self.steps += 1
        seat, differing = self._seat, []
        try:
            move(*args)
            if seat.position != position:
                differing.append(f"the position, {seat.position} instead of {position}")
            else:
                differing += differing_parts(seat.state_parts(), kept.at_cut if position == talk.cut else kept.at_end)
                seat.begin(talk.ids, GREEDY, images=talk.images)
                if position < talk.end:
                    seat.extend(talk.ids[position : talk.end], cancel=NEVER, checkpoint_at=(talk.end,))
                if self._answer(talk) != kept.answer:
                    differing.append(THE_ANSWER)
        except EngineLost:
            raise
        except (ParkdError, ValueError) as error:
            differing.append(f"an error: {error}")
        if differing:
            self._note(step, tuple(differing))

    def _note(self, step: str, parts: tuple[str, ...]) -> None:
        self.differences.append(Difference(step, parts))

    def _answer(self, talk: Talk) -> Answer:
        """Answers from the talk's end. Of what a step yields beyond the first tokens, nothing counts."""
        self._seat.begin(talk.ids, GREEDY, images=talk.images)
        count = 0
        steps = self._seat.generate()
        with closing(steps):  # type: ignore[type-var]
            for ids in steps:
                count += len(ids)
                if count >= self._answer_tokens:
                    break
        scored = self._seat.logprobs[: self._answer_tokens]
        return tuple((token.token_id, token.logprob, tuple(token.top)) for token in scored)


def differing_parts(mine: Parts, expected: Parts) -> list[str]:
    """The names of parts that differ or are missing on one side, in the engine's order."""
    return [name for name in {**expected, **mine} if mine.get(name) != expected.get(name)]


def sentences(verdict: Verdict) -> list[str]:
    """What a person should know of a verdict, line by line."""
    if verdict.skipped:
        return [f"not tried: {verdict.skipped}"]
    if not verdict.has_failed:
        return [
            f"state came back bit for bit in {verdict.steps} trials of conversations of {verdict.tokens} tokens "
            f"({verdict.took_s:.1f} s)"
        ]
    return [f"{each.step}: {_listed(each.parts)}" for each in verdict.differences]


def _listed(parts: tuple[str, ...]) -> str:
    shown = ", ".join(parts[:MOST_NAMED])
    more = len(parts) - MOST_NAMED
    unknown = "; no part of the state that the engine names did" if parts == (THE_ANSWER,) else ""
    return f"{shown}{f' and {more} more' if more > 0 else ''} differed{unknown}"
