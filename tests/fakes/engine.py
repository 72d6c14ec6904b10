"""A deterministic engine with known state, for tests that are not about a model.

Row t of every stage is a function of all tokens up to t (`rows.py`), and each next token is a function of all rows
of all stages. So state that is wrong anywhere gives wrong text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from parkd.engine_adapter.base import AdapterInfo, Cancel, EngineInfo, ImageReader, OneSeatEngine, Seat, check_adapters
from parkd.errors import InvalidRequest, RestoreFailed
from parkd.state import BLOCK_TOKENS, Checksums, StateLayout, Transfer, chunk_end
from parkd.types import SamplingParams, TokenIds, TokenMask
from tests.fakes.fixed import FakeFixedState
from tests.fakes.images import IMAGE_TOKEN, FakeImages, whole_end, with_images
from tests.fakes.rows import FakeRows, chain_of, mix, row_words
from tests.fakes.text import (
    END_TOKEN_ID,
    FIRST_SPECIAL_ID,
    SPECIAL_TOKENS,
    FakeTemplate,
    FakeTextStream,
    FakeTokenizer,
)

Hook = Callable[[str, int], None]
Script = Callable[[str], str | None]

LETTERS = b"abcdefghijklmnopqrstuvwxyz      "
END_ODDS = 97
"""One in so many next tokens is the end token."""


def _allowed(mask: TokenMask, token_id: int) -> int:
    """The token if the mask allows it; else the end if that is allowed, else the last that is."""
    allowed = mask.allowed()
    if allowed[token_id]:
        return token_id
    return END_TOKEN_ID if allowed[END_TOKEN_ID] else int(np.flatnonzero(allowed)[-1])


@dataclass(frozen=True)
class FakeScored:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class FakeAnswer:
    """An answer under way, which goes on in another seat if it is put there."""

    seat: FakeEngine
    token_id: int
    """The last token, which is not read yet."""
    written: deque[int] | None
    logprobs: list[FakeScored] = field(default_factory=list)

    def steps(self) -> Iterator[Sequence[int]]:
        while self.seat.position < self.seat.info.context_tokens:
            self.token_id = self.seat.decode(self)
            yield [self.token_id]


class FakeEngine(OneSeatEngine):
    """An engine of rows whose state is arithmetic.

    `hook(name, number)` is called on the engine's thread before each step: `chunk` and `token` with the position,
    `capture`, `restore` and `restored` (after the copy, before the comparison) with the transfer's stop. It may sleep,
    raise what an engine may raise, or wait for an event, which is how tests slow and break the engine.
    """

    def __init__(
        self,
        *,
        stages: int = 2,
        context_tokens: int = 8192,
        batch_tokens: int = 512,
        hook: Hook | None = None,
        end_odds: int = END_ODDS,
        script: Script | None = None,
        steering: Mapping[str, float] | None = None,
        adapters: Sequence[float] = (),
        fixed_bytes: int = 0,
        ctx_checkpoints: int = 8,
        reads_images: bool = False,
    ) -> None:
        """`steering` are the known control vectors, each with the scale it has by default, and
        `adapters` the default scales of the adapters. With `fixed_bytes` a stage
        (a multiple of 8) rows are computed from fixed state, and the engine resumes at checkpoints only."""
        self.tokenizer = FakeTokenizer((*SPECIAL_TOKENS, IMAGE_TOKEN) if reads_images else SPECIAL_TOKENS)
        self.template = FakeTemplate()
        self.images: ImageReader | None = FakeImages(FIRST_SPECIAL_ID + len(SPECIAL_TOKENS)) if reads_images else None
        self.images_read: list[bytes] = []
        """Digests of the pictures that were read, over the engine's life."""
        self.hook: Hook = hook or (lambda _name, _number: None)
        self.script = script
        """What is answered to a prompt's text; None, or a script that gives None, lets the state decide."""
        self.transfers: list[tuple[str, int, int]] = []
        """Each finished move as (`capture` | `restore`, start, stop)."""
        self.read_tokens = 0
        """Tokens read by `extend`, over the engine's life."""
        self._answer: FakeAnswer | None = None
        self._batch = batch_tokens
        self._end_odds = end_odds
        self._default_steering = dict(steering or {})
        self.adapters = tuple(AdapterInfo(f"{place}.gguf", scale) for place, scale in enumerate(adapters))
        self._steering = self.steering_digest(None)
        self._position = 0
        self.rows = FakeRows(stages, context_tokens)
        self.fixed = FakeFixedState(stages, fixed_bytes // 8, ctx_checkpoints)
        self.info = EngineInfo(
            model_name="fake",
            architecture="FakeForCausalLM",
            fingerprint=b"fake-fingerprint",
            context_tokens=context_tokens,
            vocab_size=FIRST_SPECIAL_ID + len(self.tokenizer.special_tokens),
            end_token_ids=frozenset({END_TOKEN_ID}),
            layout=StateLayout(self.rows.layouts(fixed_bytes), "xxh3-64"),
            devices=("cpu",) * stages,
            weights_bytes=0,
            arena_bytes=self.rows.bytes,
            ctx_checkpoints=ctx_checkpoints if fixed_bytes else 0,
            can_pause=True,
        )

    @property
    def position(self) -> int:
        return self._position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self.fixed.positions

    @property
    def rewind_floor(self) -> int:
        return self._position if self.fixed.exists else 0

    def checkpoint(self) -> None:
        self.fixed.keep(self._position)

    def reset(self) -> None:
        self._position = 0
        self.fixed.go_back(0)

    def truncate(self, position: int) -> None:
        exact = position in (0, *self.checkpoints) or position >= self.rewind_floor
        if not 0 <= position <= self._position or not exact:
            raise ValueError(f"cannot truncate {self._position} tokens to {position}")
        if position < self._position:
            self.fixed.go_back(position)
        self._position = position

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
    ) -> int:
        images, stop = self.begun_images, self._position + len(token_ids)
        places = sorted(checkpoint_at) if self.fixed.exists else []
        base = self._position
        while self._position < stop and not cancel.is_set():
            self.hook("chunk", self._position)
            end = whole_end(self._position, chunk_end(self._position, stop, self._batch, places), images)
            ids, read = with_images(token_ids[self._position - base : end - base], self._position, images)
            self.images_read += read
            self._read(ids)
            if end in places:
                self.checkpoint()
            if on_chunk is not None:
                on_chunk(self._position)
        return self._position

    def generate(self) -> Iterator[Sequence[int]]:
        begun, text = self.begun, None
        if self.script is not None:
            text = self.script(self.tokenizer.decode(begun.token_ids.tolist()))
        written = None if text is None else deque([*self.tokenizer.encode(text), END_TOKEN_ID])
        self._answer = answer = FakeAnswer(self, int(begun.token_ids[-1]), written)
        return answer.steps()

    def decode(self, answer: FakeAnswer) -> int:
        """Reads the answer's last token, and returns the next."""
        begun, mask = self.begun, self.begun.mask
        self.hook("token", self._position)
        self._read(np.array([answer.token_id], dtype=np.int64), decode=True)
        token_id = answer.written.popleft() if answer.written else self._next_token(begun.sampling)
        if mask is not None:
            token_id = _allowed(mask, token_id)
            mask.accept(token_id)
        if begun.sampling.top_logprobs is not None:
            answer.logprobs.append(self._scored(token_id, begun.sampling.top_logprobs))
        return token_id

    def set_aside(self) -> Callable[[Seat], None]:
        put_prompt_back, answer = super().set_aside(), self._answer
        self._answer = None

        def put_back(seat: Seat) -> None:
            assert isinstance(seat, FakeEngine)
            put_prompt_back(seat)
            seat._answer = answer
            if answer is not None:
                answer.seat = seat

        return put_back

    @property
    def logprobs(self) -> Sequence[FakeScored]:
        return () if self._answer is None else self._answer.logprobs

    def piece(self, token_id: int) -> bytes:
        if token_id < FIRST_SPECIAL_ID:
            return bytes([token_id])
        return self.tokenizer.special_tokens[token_id - FIRST_SPECIAL_ID].encode()

    def _scored(self, token_id: int, top: int) -> FakeScored:
        """Logprobs that follow from the state, as tokens do; none of them is a probability's."""
        seen = int(self.rows.mixed(self._position)[0])
        return FakeScored(token_id, -(seen % 997) / 64, tuple((seen % 89 + n, -n / 4) for n in range(top)))

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        check_adapters(self.adapters, adapters)
        chosen = self._default_steering if scales is None else scales
        for name in chosen:
            if name not in self._default_steering:
                known = ", ".join(self._default_steering) or "none"
                raise InvalidRequest(f"There is no control vector {name!r}; known: {known}.", param="steering")
        used = sorted((name, float(scale)) for name, scale in chosen.items() if scale)
        applied = {place: info.scale for place, info in enumerate(self.adapters)} if adapters is None else adapters
        used += sorted((str(place), float(scale)) for place, scale in applied.items() if scale)
        return blake2b(repr(used).encode(), digest_size=16).digest() if used else b""

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        self._steering = self.steering_digest(scales, adapters)
        return self._steering

    def text_stream(self) -> FakeTextStream:
        return FakeTextStream()

    def capture(self, transfer: Transfer) -> Checksums:
        assert transfer.layout_digest == self.info.layout.digest
        assert transfer.stop <= self._position
        assert transfer.start % BLOCK_TOKENS == 0 or transfer.start == transfer.stop
        self.hook("capture", transfer.stop)
        self.rows.copy_out(transfer.stages)
        fixed = self.fixed.copy_out(transfer.stages, self._position)
        self.transfers.append(("capture", transfer.start, transfer.stop))
        return Checksums(self.rows.checksums(transfer.start, transfer.stop), fixed)

    def restore(self, transfer: Transfer) -> None:
        try:
            self._check(transfer)
            self.hook("restore", transfer.stop)
            self.rows.copy_in(transfer.stages)
            fixed = self.fixed.copy_in(transfer.stages)
            self.hook("restored", transfer.stop)
            expected = transfer.checksums
            if expected is None or not np.array_equal(self.rows.checksums(transfer.start, transfer.stop), expected):
                raise RestoreFailed("A block's checksum does not match its bytes.")
            expected = transfer.fixed_checksums
            if self.fixed.exists and (expected is None or not np.array_equal(fixed, expected)):
                raise RestoreFailed("The fixed state's checksum does not match its bytes.")
        except Exception:
            self.reset()
            raise
        self.fixed.forget_beyond(min(transfer.start, transfer.position - 1))
        self._position = transfer.position
        self.checkpoint()
        self.transfers.append(("restore", transfer.start, transfer.position))

    def close(self) -> None:
        self.reset()

    def _check(self, transfer: Transfer) -> None:
        """Raises RestoreFailed before anything is written."""
        if transfer.layout_digest != self.info.layout.digest or len(transfer.stages) != len(self.info.layout.stages):
            raise RestoreFailed("The parked state has another layout than this engine.")
        if transfer.start > self._position or transfer.stop > self.info.context_tokens:
            raise RestoreFailed("The parked rows do not join the live ones.")
        self.rows.check(transfer.stages, transfer.start, transfer.stop)
        for part in transfer.stages:
            places = [fixed.position for fixed in part.fixed]
            if places != ([transfer.position] if self.fixed.exists else []):
                raise RestoreFailed("The parked fixed state is of another position.")

    def _read(self, token_ids: TokenIds, *, decode: bool = False) -> None:
        """Computes rows behind the position from the tokens and the last row of every stage."""
        start, stop = self._position, self._position + len(token_ids)
        places = np.arange(start, stop, dtype=np.uint64)
        steered = np.uint64(int.from_bytes(self._steering[:8], "little"))
        words = token_ids.astype(np.uint64) * np.uint64(1_000_003) + places
        chain = np.cumsum(mix(words + steered), dtype=np.uint64)
        chain += self._last_chain()
        self.rows.write(start, chain)
        if self.fixed.exists:
            for stage, live in enumerate(self.fixed.live):
                live[:] = row_words(chain[-1:], stage, self.fixed.words)[0]
        self._position = stop
        if not decode:
            self.read_tokens += len(token_ids)

    def _last_chain(self) -> np.uint64:
        """The chain at `position - 1`, as the state holds it."""
        if self._position == 0:
            return np.uint64(0)
        return chain_of(self.fixed.live if self.fixed.exists else self.rows.last(self._position))

    def _next_token(self, sampling: SamplingParams) -> int:
        seen = self.rows.mixed(self._position)
        if sampling.temperature > 0 and sampling.seed is not None:
            seen = mix(seen + np.uint64(sampling.seed % 2**32))
        value = int(seen[0])
        return END_TOKEN_ID if value % self._end_odds == 0 else LETTERS[(value >> 8) % len(LETTERS)]
