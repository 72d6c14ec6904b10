"""An engine that is another server: it computes, and keeps what state it likes.

    prompt ---- POST /v1/chat/completions, or /v1/completions (ids), streamed ----> Piece ... Piece ... usage

Several turns run at once, one in each seat, each on a thread of its own that waits for the server. Nothing of a turn is
taken for live when it has ended, and nothing is parked: how much of a prompt was not computed again is what the server
says.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from parkd.engine_adapter.base import Cancel, Engine, EngineInfo, ImageReader, Seat, TextStream, check_adapters
from parkd.engine_adapter.http.client import UpstreamRefused
from parkd.engine_adapter.http.lines import EventLines
from parkd.engine_adapter.http.wire import Hold
from parkd.engine_adapter.remote.bodies import check_taken, common_fields
from parkd.engine_adapter.remote.client import RemoteClient, meaning_of
from parkd.engine_adapter.remote.events import Piece, Score, Usage, parse_line
from parkd.engine_adapter.remote.finding import Found
from parkd.engine_adapter.remote.held import HeldBlocks, HeldPrefix
from parkd.engine_adapter.remote.length import AnswerLength
from parkd.engine_adapter.remote.listening import KvListener
from parkd.engine_adapter.remote.watching import LeaveWatcher
from parkd.engine_adapter.remote.words import AnswerIds, Words
from parkd.errors import Cancelled, EngineFailure, InvalidRequest, ParkdError, UpstreamFailed
from parkd.state import Checksums, Transfer
from parkd.types import (
    CacheMode,
    FinishReason,
    ImageSpan,
    SamplingParams,
    TextForm,
    TokenIds,
    TokenMask,
    Told,
    TurnRequest,
)

log = logging.getLogger(__name__)

SALT_BYTES = 32
UNSAID = "the server does not say how much of the prompt it reused"
CUT = "the answer was cut off before the server counted it"
AT_LIMIT = frozenset({"length", "model_length"})
FILTERED = frozenset({"content_filter", "refusal", "safety", "sensitive"})
"""Reasons for an end that say that the rest is withheld."""
BROKEN_OFF = frozenset({"abort", "error", "insufficient_system_resource", "network_error"})
"""Reasons for an end that are none."""
COUNT_WAIT_S = 10.0
"""Longest wait for what follows an answer: the server's counts."""


@dataclass
class _Turn:
    """One request under way in a seat."""

    prompt: TokenIds
    lines: EventLines
    hold: Hold
    answer: AnswerIds
    limit: int | None
    """Most tokens that its client wants."""
    length: AnswerLength
    top: int | None
    """Most probable tokens that its client wants with each; None: no logprobs."""
    waiting: list[Piece] = field(default_factory=list)
    """Read, and not yielded yet."""
    is_over: bool = False
    """The server has ended the answer itself, or was to have."""


@dataclass(frozen=True, slots=True)
class _Late:
    """A `Cancel` that is set by time."""

    monotonic: Callable[[], float]
    until_s: float

    def is_set(self) -> bool:
        return self.monotonic() >= self.until_s


class RemoteSeat(Seat):
    """The place of one turn."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.info = engine.info
        self._engine = engine
        self._turn: _Turn | None = None
        self._position = 0
        self._usage = Usage()
        self._ended = FinishReason.LENGTH
        self._units = 0
        """Of the prompt."""
        self._written_tokens = 0
        """Of the last answer, as far as it was read."""
        self._is_counted = False
        """The server has ended the last answer itself, so it has counted it if it ever does."""
        self._scores: list[Score] = []
        """Of the ids that `generate` yielded, if they were asked for."""
        self._held: HeldPrefix | None = None
        """What the server held of the prompt when it was sent; None: it does not tell."""

    @property
    def position(self) -> int:
        return self._position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return ()

    @property
    def rewind_floor(self) -> int:
        return 0

    def checkpoint(self) -> None:
        """Does nothing: what state there is, is the server's."""

    def reset(self) -> None:
        self._drop()
        self._position = 0

    def truncate(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot truncate {self._position} units to {position}")
        self._drop()
        self._position = position

    @property
    def told(self) -> Told:
        usage, words = self._usage, self._engine.words
        prompt = words.tokens_in(self._units) if usage.prompt_tokens is None else usage.prompt_tokens
        output = usage.output_tokens if self._is_counted else None
        if output is None and self._written_tokens:
            output = self._written_tokens
        why = "" if usage.cached_tokens is not None else UNSAID if self._is_counted else CUT
        held, gone, gone_from = self._held, "", 0
        if held is not None:  # what it gave up is known even if it does not count what it reused
            gone_from = max(held.held_tokens, usage.cached_tokens or 0)
            gone = gone_of(held, gone_from, self._units)
        return Told(
            prompt,
            usage.cached_tokens,
            output,
            usage.reasoning_tokens,
            why,
            None if held is None else held.held_tokens,
            gone,
            gone_from,
        )

    @property
    def logprobs(self) -> Sequence[Score]:
        return self._scores

    @property
    def ended(self) -> FinishReason:
        return self._ended

    def begin(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        images: Sequence[ImageSpan] = (),
        mask: TokenMask | None = None,
        schema: Mapping[str, Any] | None = None,
        form: TextForm | None = None,
        limit: int | None = None,
        request: TurnRequest | None = None,
        cancel: Cancel | None = None,
    ) -> int:
        """Sends the prompt, and returns 0 as soon as the server begins to answer: it has taken the request then."""
        assert mask is None, "the server enforces forms itself"
        assert not images, "`RemoteEngine.images` is None"
        self._drop()
        ids = np.asarray(token_ids, dtype=np.int64)
        self._position, self._usage, self._units, self._written_tokens = 0, Usage(), len(ids), 0
        self._is_counted, self._ended = False, FinishReason.LENGTH
        self._scores = []
        engine, hold = self._engine, Hold()
        salt = engine.salt_of(request)
        self._held = None if engine.held is None else engine.held.of(ids, salt if engine.found.flavour.salts else "")
        common = common_fields(
            sampling,
            schema,
            form,
            engine.found.flavour,
            unit=self.info.unit,
            model=engine.found.model,
            salt=salt,
        )

        def sent(path: str, fields: Mapping[str, Any]) -> EventLines:
            try:
                return engine.client.events(path, {**common, **fields}, hold)
            except UpstreamFailed as error:
                raise self._meaning(error, hold) from error

        if cancel is not None:
            engine.watcher.follow(hold, cancel)
        try:
            try:
                lines = sent(*engine.words.request(ids, request, limit))
            except InvalidRequest:
                other = engine.words.said_otherwise(ids, request, limit)
                if other is None:
                    raise
                lines = sent(*other)
                engine.words.taken_otherwise()
        except BaseException:
            engine.watcher.leave(hold)
            raise
        length = AnswerLength(limit, engine.words.tokens_in, token_events=engine.found.flavour.token_events)
        self._turn = _Turn(ids, lines, hold, engine.words.answer(request), limit, length, sampling.top_logprobs)
        return 0

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),  # noqa: ARG002 - the state is the server's
    ) -> int:
        """Waits until the server has read the prompt, which its first event says."""
        turn = self._turn
        if turn is None:
            raise EngineFailure("A prompt can only be read as a whole: `begin` comes first.")
        try:
            piece = turn.waiting[-1] if turn.waiting else self._next(turn)
            if turn.limit == 0:  # nothing is generated: the counts are all that is wanted
                while piece is not None and piece.finish is None:
                    piece = self._next(turn)
                if piece is not None:
                    self._finish(turn)
            elif piece is not None and not turn.waiting:
                turn.waiting.append(piece)
        except Cancelled:
            self._drop()
            return self._position
        if not cancel.is_set():
            self._position += len(token_ids)
            if on_chunk is not None:
                on_chunk(self._position)
        return self._position

    def generate(self) -> Iterator[Sequence[int]]:
        turn = self._turn
        assert turn is not None, "`begin` comes before `generate`"
        [end_id] = self._engine.end_ids_for_stop
        try:
            while turn.waiting or not turn.is_over:
                ids, failed = list[int](), None
                try:
                    for piece in self._arrived(turn):
                        said = turn.answer.ids(piece)
                        if turn.top is not None:
                            self._scores += self._scores_of(piece, said, turn.top)
                        ids += said
                        if piece.finish is not None and self._ended_by(turn, piece.finish.lower()):
                            ids.append(end_id)
                except ParkdError as error:  # what came before it is the client's
                    failed = error
                if ids:
                    self._position += len(ids)
                    yield ids
                if failed is not None:
                    raise failed
        finally:
            if self._turn is turn:
                self._drop()

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        return self._engine.steering_digest(scales, adapters)

    def capture(self, transfer: Transfer) -> Checksums:  # noqa: ARG002
        raise EngineFailure("This server's state cannot be parked.")

    def restore(self, transfer: Transfer) -> None:  # noqa: ARG002
        raise EngineFailure("This server's state cannot be restored.")

    def _scores_of(self, piece: Piece, ids: Sequence[int], top: int) -> list[Score]:
        """The logprobs of the ids that a piece has; an end that is no part of the answer may have one more. Raises
        UpstreamFailed."""
        scores = piece.scores[: len(ids)]
        if [each.token_id for each in scores] != list(ids):
            raise UpstreamFailed(
                "The upstream server does not return the logprobs of its answer by ids. Leave `logprobs` out, or use a "
                "newer server."
            )
        return [replace(each, top=each.top[:top]) for each in scores]

    def _ended_by(self, turn: _Turn, why: str) -> bool:
        """Notes that the server has ended the answer. Whether the model did."""
        self._finish(turn)
        if why in FILTERED:
            self._ended = FinishReason.CONTENT_FILTER
        return why not in FILTERED | AT_LIMIT

    def _arrived(self, turn: _Turn) -> Iterator[Piece]:
        """The next piece of the answer, and those that came together with it, up to its end: where a server is faster
        than this process, that takes more at a time. Raises as `_next`."""
        piece = turn.waiting.pop(0) if turn.waiting else self._next(turn)
        while piece is not None:
            yield piece
            if turn.is_over or piece.finish is not None:
                return
            piece = turn.lines.arrived(self._parse)
            while piece is not None and not self._says_something(turn, piece):
                piece = turn.lines.arrived(self._parse)
            piece = None if piece is None else self._within_limit(turn, piece)

    def _next(self, turn: _Turn) -> Piece | None:
        """The next piece of the answer; None if the answer is as long as it may be, and the server goes on. Raises
        Cancelled, UpstreamFailed."""
        while True:
            try:
                piece = turn.lines.next(self._parse)
            except UpstreamFailed as error:
                raise self._meaning(error, turn.hold) from error
            if self._says_something(turn, piece):
                return self._within_limit(turn, piece)

    def _parse(self, line: bytes) -> Piece | None:
        return parse_line(line, self._engine.client.called)

    def _says_something(self, turn: _Turn, piece: Piece) -> bool:
        """Whether an event has a part of the answer, or its end. Notes what else it says. Raises UpstreamFailed."""
        self._count(piece)
        if piece.is_last:
            raise UpstreamFailed("The upstream server ended its answer without an end. Send the request again.")
        if piece.finish is not None and piece.finish.lower() in BROKEN_OFF:
            raise UpstreamFailed("The upstream server broke off its answer. Send the request again.")
        if piece.prompt_ids is not None and not np.array_equal(piece.prompt_ids, turn.prompt):
            raise UpstreamFailed(
                "The upstream server has read another prompt than it was sent. Check what lies between parkd and "
                "it, and that --tokenizer is that of its model."
            )
        return bool(piece.thinking or piece.text or piece.calls or piece.token_ids or piece.finish is not None)

    def _within_limit(self, turn: _Turn, piece: Piece) -> Piece | None:
        """The piece; None if the answer is as long as it may be without it."""
        turn.is_over = turn.length.passes_limit(piece)
        self._written_tokens = turn.length.tokens
        return None if turn.is_over else piece

    def _finish(self, turn: _Turn) -> None:
        """Reads what follows the answer: how the server counts it."""
        turn.is_over = self._is_counted = True
        self._engine.watcher.follow(turn.hold, self._engine.late_in(COUNT_WAIT_S))
        try:
            while True:
                piece = turn.lines.next(self._parse)
                self._count(piece)
                if piece.is_last:
                    break
            turn.lines.drain()
        except ParkdError as error:  # the answer is whole
            log.info("the upstream server did not count its answer: %s", error.message)
        finally:
            self._engine.watcher.leave(turn.hold)
        if self._usage.prompt_tokens is not None:
            self._engine.words.counted(self._units, self._usage.prompt_tokens)

    def _count(self, piece: Piece) -> None:
        if piece.usage is not None:
            self._usage = self._usage.then(piece.usage)

    def _meaning(self, error: UpstreamFailed, hold: Hold) -> ParkdError:
        """What the server's failure or refusal is to the client: Cancelled if its own leaving cut the request off."""
        if isinstance(error, UpstreamRefused):
            tokens = self._engine.words.tokens_in(self._units)
            return meaning_of(error, tokens, self._engine.found.context_tokens)
        if hold.is_cut:
            return Cancelled("The client left; its request to the upstream server was cut off.")
        return error

    def _drop(self) -> None:
        """Lets the answer go: one that has not ended is cut off, which tells the server to stop."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._engine.watcher.leave(turn.hold)
            turn.lines.close()


def gone_of(held: HeldPrefix, start: int, prompt_tokens: int) -> str:
    """What the server gave up of a prompt, of which it reused those before `start`."""
    stop = min(held.known_tokens, prompt_tokens)
    if stop <= start or not held.medium:
        return ""
    return f"evicted by the upstream server: tokens {start} to {stop}, from {held.medium} {held.gone_s:.0f} s before"


class RemoteEngine(Engine):
    """Before one server."""

    def __init__(
        self,
        client: RemoteClient,
        found: Found,
        words: Words,
        info: EngineInfo,
        *,
        seats: int,
        notes: Sequence[str] = (),
        held: HeldBlocks | None = None,
        listener: KvListener | None = None,
        fresh_salt: Callable[[], str] = lambda: secrets.token_hex(SALT_BYTES),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held` is what the server tells that it holds, which the `listener` fills; None: it does not tell."""
        self.client = client
        self.held = held
        self._listener = listener
        self.found = found
        self.words = words
        self.info = info
        self.notes = tuple(notes)
        """Shown to the operator at start."""
        self.tokenizer = words.tokenizer
        self.template = words.template
        self.template_source = words.template_source
        self.parser = words.parser
        self.response_reader = words.response_reader
        self.images: ImageReader | None = None
        self.watcher = LeaveWatcher()
        self._fresh_salt = fresh_salt
        self._monotonic = monotonic
        self._seats = tuple(RemoteSeat(self) for _ in range(seats))

    @property
    def seats(self) -> Sequence[Seat]:
        return self._seats

    @property
    def turns_at_once(self) -> int:
        """As many as there are seats."""
        return len(self._seats)

    @property
    def has_own_threads(self) -> bool:
        """Each turn waits for the server on a thread of its own."""
        return True

    @property
    def end_ids_for_stop(self) -> tuple[int]:
        """The id that stands for all ends."""
        return (min(self.info.end_token_ids),)

    @property
    def stats(self) -> Mapping[str, Callable[[], object]]:
        return {} if self.held is None else {"parkd_upstream_kv": self.held.stats}

    def late_in(self, seconds: float) -> Cancel:
        """Set once so many seconds have passed."""
        return _Late(self._monotonic, self._monotonic() + seconds)

    def host_memory_hooks(self) -> None:
        """None: no state passes through parkd's memory."""

    def salt_of(self, request: TurnRequest | None) -> str:
        """What keeps a request's state from those of other namespaces; empty where there is only one. A request that
        wants no cache has one of its own."""
        if request is None:
            return ""
        if request.cache.mode is CacheMode.OFF:
            return self._fresh_salt()
        if not request.namespace:
            return ""
        return blake2b(request.namespace.encode(), digest_size=SALT_BYTES, person=b"parkd-upsalt").hexdigest()

    def tokens_in(self, units: int) -> int:
        return self.words.tokens_in(units)

    def check(self, request: TurnRequest, *, thinks: bool) -> None:
        check_taken(request, self.found.flavour, self.info.unit, thinks=thinks)

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        check_adapters(self.adapters, adapters)
        if scales:
            raise InvalidRequest("This server has no control vectors that a request can name.", param="steering")
        return b""

    def piece(self, token_id: int) -> bytes:
        return self.words.piece(token_id)

    def text_stream(self) -> TextStream:
        return self.words.text_stream()

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def close(self) -> None:
        for seat in self._seats:
            seat.reset()
        self.watcher.close()
        if self._listener is not None:
            self._listener.close()
        self.client.close()
