"""The place of one live conversation in llama.cpp: a context of its own, so that it computes what it computes alone.

    model   weights, vocabulary, adapters            one
    seat    context: cells, buffers, steering        one for each live conversation

In one context that several sequences share, the cells of one lie among those of the others, and attention over them
rounds by where they lie: an answer would depend on who else is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from parkd.engine_adapter.base import BegunPrompt, Cancel, CaptureInFlight, EngineInfo, ScoredToken, Seat
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.ranges import CellRanges, RangeForm
from parkd.engine_adapter.llama_cpp.row_moves import RowMoves
from parkd.engine_adapter.llama_cpp.sequence import WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.engine_adapter.llama_cpp.timeline import Timeline
from parkd.engine_adapter.llama_cpp.whole_moves import WholeMoves
from parkd.errors import EngineFailure, LogitsNotFinite, RestoreFailed
from parkd.state import Checksums, StateSizes, Transfer, chunk_end
from parkd.types import TokenIds
from parkd.words.logprobs import TokenLogprobs, logprobs_of
from parkd.words.sampling import Sampler
from parkd.words.steering import SteeringBank


class LlamaAnswer:
    """An answer under way. It goes on in whichever seat it is put."""

    def __init__(self, seat: LlamaSeat, begun: BegunPrompt, sampler: Sampler) -> None:
        self.seat = seat
        self.logprobs: list[TokenLogprobs] = []
        self._begun = begun
        self._sampler = sampler

    def tokens(self) -> Iterator[Sequence[int]]:
        mask, top_logprobs = self._begun.mask, self._begun.sampling.top_logprobs
        token = int(self._begun.token_ids[-1])
        while self.seat.position < self.seat.info.context_tokens:
            self.seat.timeline.decode(np.array([token], dtype=np.int64), None)
            logits = self.seat.sequence.logits()
            try:
                token = self._sampler.pick_row(logits, None if mask is None else mask.allowed())
            except LogitsNotFinite:
                if not np.isfinite(logits).any():
                    # The state is not finite either, so nothing could be generated from it now or after a restore.
                    self.seat.reset()
                raise
            if mask is not None:
                mask.accept(token)
            if top_logprobs is not None:
                self.logprobs.append(logprobs_of(logits, token, top_logprobs))
            yield (token,)


class LlamaSeat(Seat):
    """One sequence through llama.cpp's low-level interface."""

    def __init__(self, model: LlamaModel, vectors: SteeringBank, fresh_seed: Callable[[], int]) -> None:
        """Raises ModelError. `open` comes before anything is moved."""
        self.model = model
        self.context = model.open_context()
        self.uses_cards = model.uses_cards
        """Some of the state may be on a card."""
        self.sequence = TokenSequence(self.context, model.batch_tokens)
        self.timeline = Timeline(model, self.sequence, model.config.layout.ctx_checkpoints)
        self._vectors = vectors
        self._fresh_seed = fresh_seed
        self._answer: LlamaAnswer | None = None
        """The last one."""
        self._steered: bytes | None = None
        """The digest of what steers; None: not that of any turn."""
        self.steer(None)

    def open(self, info: EngineInfo, form: RangeForm | None) -> None:
        """Tells how its rows are written; None: its state is moved whole."""
        self.info = info
        self._moves = self._moves_of(form)

    @property
    def position(self) -> int:
        return self.timeline.position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self.timeline.checkpoints

    @property
    def rewind_floor(self) -> int:
        return self.timeline.rewind_floor

    def checkpoint(self) -> None:
        self.timeline.checkpoint()

    def reset(self) -> None:
        self.timeline.reset()

    def truncate(self, position: int) -> None:
        """Raises RestoreFailed if the library refuses a cut that should be possible; the engine is then empty."""
        self.timeline.truncate(position)

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
    ) -> int:
        timeline, base = self.timeline, self.position
        stop = base + len(token_ids)
        if stop > self.info.context_tokens:
            raise EngineFailure(f"{stop} tokens do not fit the context of {self.info.context_tokens}.")
        places = sorted(checkpoint_at) if timeline.limit else []
        if timeline.window:  # where a restore would have begun
            timeline.checkpoint()
        while timeline.position < stop and not cancel.is_set():
            start = timeline.position
            end = chunk_end(start, stop, self.model.batch_tokens, places)
            if not timeline.decode(token_ids[start - base : end - base], cancel):
                break
            if end in places:
                timeline.checkpoint()
            if on_chunk is not None:
                on_chunk(timeline.position)
        return timeline.position

    def generate(self) -> Iterator[Sequence[int]]:
        begun = self.begun
        sampler = Sampler(begun.sampling, self.info.vocab_size, begun.token_ids, fresh_seed=self._fresh_seed())
        self._answer = LlamaAnswer(self, begun, sampler)
        return self._answer.tokens()

    def set_aside(self) -> Callable[[Seat], None]:
        put_prompt_back, answer = super().set_aside(), self._answer
        # It leaves with its turn: who is set aside here next, while it reads, has no answer to take along.
        self._answer = None

        def put_back(seat: Seat) -> None:
            assert isinstance(seat, LlamaSeat)
            put_prompt_back(seat)
            seat._answer = answer
            if answer is not None:
                answer.seat = seat

        return put_back

    @property
    def logprobs(self) -> Sequence[ScoredToken]:
        return () if self._answer is None else self._answer.logprobs

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        vectors, applied = self._vectors.digest(scales), self.model.adapters.digest(adapters)
        if not applied:
            return vectors
        return blake2b(vectors + applied, digest_size=16, person=b"parkd-steering").digest()

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        digest = self.steering_digest(scales, adapters)
        if digest != self._steered:
            self._steered = None  # until both are in effect
            self.context.steer(self._vectors.select(scales))
            self.context.adapt(adapters)
            self._steered = digest
        return digest

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        partial = tuple(self.timeline.held(place).nbytes for place in checkpoints)
        return StateSizes(self.sequence.state_size(WHOLE), partial)

    def capture(self, transfer: Transfer) -> Checksums:
        self._check_capture(transfer)
        if isinstance(self._moves, RowMoves):
            return self._moves.start_capture(transfer).wait()
        return self._moves.capture(transfer)

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:
        """On cards, whose link is faster than one thread sums: copies before it returns, since the library cannot copy
        while it computes, and the sums are made while it goes on."""
        if not isinstance(self._moves, RowMoves) or not self.uses_cards:
            return None
        self._check_capture(transfer)
        return self._moves.start_capture(transfer)

    def restore(self, transfer: Transfer) -> None:
        with self.emptied_by_failures():
            if transfer.layout_digest != self.info.layout.digest or len(transfer.stages) != 1:
                raise RestoreFailed("The parked state has another layout than this engine.")
            if transfer.stop > self.info.context_tokens:
                raise RestoreFailed(f"{transfer.stop} tokens do not fit the context of {self.info.context_tokens}.")
            self._moves.restore(transfer)
            self.checkpoint()

    def close_seat(self) -> None:
        """Frees its memory."""
        if isinstance(self._moves, RowMoves):
            self._moves.close()
        self.sequence.close()
        self.context.close()

    def _check_capture(self, transfer: Transfer) -> None:
        if transfer.layout_digest != self.info.layout.digest:
            raise EngineFailure("The parked state would have another layout than this engine.")

    def _moves_of(self, form: RangeForm | None) -> RowMoves | WholeMoves:
        if form is None:
            return WholeMoves(self.timeline)
        return RowMoves(self.timeline, CellRanges(self.sequence, form, self.model.copies), self.info.layout.stages[0])
