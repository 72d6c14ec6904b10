"""The generation loop. Runs on the engine's thread from the prompt's last token to the answer's end, or to a pause.
Other turns may compute between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Event as Flag

from parkd.answers.base import Parser
from parkd.answers.stops import StopStrings
from parkd.answers.token_trail import TokenTrail
from parkd.engine_adapter.base import Cancel, Engine, Seat
from parkd.lane.events import joined_events
from parkd.lane.seating import AHEAD_TOKENS
from parkd.lane.thread.work import NextStep, Work, finished
from parkd.state import DraftCounts
from parkd.types import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    TurnRequest,
    Unit,
)

Emit = Callable[[Event], None]


@dataclass
class Answer:
    """An answer, filled while it is generated, so that its known part survives a failure.

    rows    | prompt [0, n) | token_ids[:-1] |        the last sampled id has no row yet
    """

    token_ids: list[int] = field(default_factory=list)
    """All ids that the engine yielded, including those after the answer's end: they may be in the state."""
    output_tokens: int = 0
    """Ids that belong to the answer, including its end token."""
    reasoning_tokens: int = 0
    reason: FinishReason = FinishReason.LENGTH
    """Why it ended."""
    stop_string: str | None = None
    first_token_at_s: float | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)


@dataclass
class AnswerLoop:
    """Generates one answer, emitting events as they become visible."""

    engine: Engine
    seat: Seat
    """Of the engine; it holds the prompt, which was begun. Another one if the answer goes on there."""
    request: TurnRequest
    limit: int | None
    """Most tokens of the answer; None: up to the end of the context."""
    parser: Parser
    cancel: Cancel
    emit: Emit
    """Thread-safe; never waits."""
    monotonic: Callable[[], float]
    pause: Cancel = field(default_factory=Flag)
    """Set when the answer is to rest after the present step."""
    bound: int | None = None
    """Rows of the seat at which the answer rests too, before a step may need more; None: it has all that it needs."""
    answer: Answer = field(default_factory=Answer)
    timings: Callable[[Answer], Timings] | None = None
    """What the turn took so far, if each piece of the answer is to say it."""

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.request.stop)
        self._trail = None if self.request.sampling.top_logprobs is None else TokenTrail()
        self._stream = self.engine.text_stream()
        self._steps: Iterator[Sequence[int]] | None = None
        self._first_position = 0
        """The seat's position before the first step."""

    def run(self) -> bool:
        """`work`, with nothing between the steps."""
        return finished(self.work())

    def work(self) -> Work[bool]:
        """Says before each step that it comes. Ends at an end token, a stop string in the answer's text, the limit, the
        context's end, or when `cancel` is set. False if the answer only rests, because `pause` is set or it is at its
        `bound`: call it again once the seat holds the same state.

        Raises EngineFailure; `answer` then holds what was generated.
        """
        answer = self.answer
        try:
            if not (yield from self._generate()):
                return False
        except BaseException:
            self.close()
            raise
        self.close()
        last = self._stream.flush()
        if self._trail is not None:
            self._trail.ended(last)
        self._take(last)
        if answer.reason is FinishReason.CANCELLED:
            return True
        if self._stops.met is not None:
            _, answer.reason = self.parser.finish(FinishReason.STOP)
        else:
            rest, answer.reason = self.parser.finish(answer.reason)
            if self._trail is not None:
                self._trail.parsed(rest, in_reasoning=self.parser.in_reasoning, fed=0)
            self._emit_all(self._stops.over(rest))
            self._emit_all(self._stops.flush())
            if self._stops.met is not None and answer.reason.is_cut:
                answer.reason = FinishReason.STOP
        answer.stop_string = self._stops.met
        return True

    def close(self) -> None:
        """Gives up what is not generated yet. Idempotent. For an answer that rests, from any thread. Does nothing
        while a step is computed, which is so only if the process ends without waiting for it."""
        close = getattr(self._steps, "close", None)
        if close is not None and not getattr(self._steps, "gi_running", False):
            close()

    def _generate(self) -> Work[bool]:
        """Makes steps until the answer ends. False if it rests before that."""
        answer, engine = self.answer, self.engine
        if self._steps is None:
            self._first_position = self.seat.position
            self._steps = iter(self.seat.generate())
        try:
            while True:
                yield NextStep(self.seat)
                step = next(self._steps, None)
                if step is None:
                    answer.reason = self.seat.ended
                    break
                if answer.first_token_at_s is None:
                    answer.first_token_at_s = self.monotonic()
                known = len(answer.token_ids)
                answer.token_ids.extend(step)
                answer.drafts = self.seat.drafts
                left = None if self.limit is None else self.limit - answer.output_tokens
                visible, ended = visible_ids(step, engine.info.end_token_ids, left)
                answer.output_tokens += len(visible) + (ended is FinishReason.STOP)
                self._take_step(visible, known)
                if ended is not None or self.parser.satisfied or self._stops.met is not None:
                    answer.reason = ended or FinishReason.STOP
                    break
                if self.cancel.is_set():
                    answer.reason = FinishReason.CANCELLED
                    break
                if (self.pause.is_set() or self._is_at_bound) and self._may_rest:
                    return False
        finally:
            answer.drafts = self.seat.drafts
        return True

    @property
    def _may_rest(self) -> bool:
        """Whether the state is that of the ids so far: a step that guessed several has read those yet to come."""
        return self.seat.position == self._first_position + len(self.answer.token_ids)

    def _take_step(self, ids: Sequence[int], known: int) -> None:
        """Takes the ids of one step: at once, but token by token while the model thinks, since any may end that."""
        taken = 0
        while taken < len(ids):
            thinks = self.parser.in_reasoning
            stop = taken + 1 if thinks and self.engine.info.unit is Unit.TOKEN else len(ids)
            self.answer.reasoning_tokens += stop - taken if thinks else 0
            self._take(self._text_of(ids[taken:stop], known + taken))
            taken = stop

    @property
    def _is_at_bound(self) -> bool:
        """A step less than it has room for: another one may come before the answer can rest."""
        return self.bound is not None and self.seat.position + 2 * (AHEAD_TOKENS + 1) > self.bound

    def _text_of(self, ids: Sequence[int], known: int) -> str:
        """The text of the ids, of which the first is the answer's token number `known`."""
        if self._trail is None:
            return self._stream.push(ids)
        whole = ""
        for number, token_id in enumerate(ids, known):
            text = self._stream.push([token_id])
            self._trail.wrote(number, text, mid_character=self._stream.mid_character)
            whole += text
        return whole

    def _take(self, text: str) -> None:
        """Parses a piece of text and emits what can be sent of it, unless a stop string came before."""
        if self._stops.met is not None:
            return
        if self._trail is None:
            self._emit_all(self._stops.over(self.parser.push(text)))
            return
        ready: list[Event] = []
        for left, character in zip(range(len(text) - 1, -1, -1), text, strict=True):
            events = self.parser.push(character)
            self._trail.parsed(events, in_reasoning=self.parser.in_reasoning, fed=left)
            for event in self._stops.over(events):
                joined = joined_events(ready[-1] if ready else None, event)
                ready[-1 if joined is not None else len(ready) :] = [event if joined is None else joined]
            if self._stops.met is not None:
                break
        self._emit_all(ready)

    def _emit_all(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._trail is not None and isinstance(event, TextDelta):
                event = TextDelta(event.text, tuple(map(self._scored, self._trail.sent(event.text))))
            if self.timings is not None and isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
                event = replace(event, timings=self.timings(self.answer))
            self.emit(event)

    def _scored(self, number: int) -> TokenLogprob:
        """The logprobs of a token of the answer."""
        scored, piece = self.seat.logprobs[number], self.engine.piece
        top = tuple((piece(token_id), logprob) for token_id, logprob in scored.top)
        return TokenLogprob(piece(scored.token_id), scored.logprob, top)


def visible_ids(
    step: Sequence[int], end_token_ids: frozenset[int], left: int | None
) -> tuple[Sequence[int], FinishReason | None]:
    """The ids of one step that belong to the text, and the reason if they end the answer.

    `left`: tokens that the answer may still have; None: no limit.
    """
    for index, token_id in enumerate(step):
        if token_id in end_token_ids:
            return step[:index], FinishReason.STOP
        if left is not None and index + 1 >= left:
            return step[: index + 1], FinishReason.LENGTH
    return step, None
