"""llama.cpp in process: an `OpaqueEngine` over one context with one sequence.

    full attention     the memory can be cut at any position: no checkpoints
    sliding windows    cut as far back as the windows still reach, else at a checkpoint (partial state)
    recurrent layers   exact at the end, else at a checkpoint (partial state)

What the library refuses leaves an empty engine and is a miss; nothing is read from a state that it did not take whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import xxhash

from engine.errors import BadLogits, EngineError, UnknownVector
from engine.sampling import Sampler
from engine.steering import SteeringBank, load_vectors
from engine.text import TextAssembler
from parkd.engine_adapter.base import Cancel, ChatTemplate, EngineInfo, ImageReader, Tokenizer
from parkd.engine_adapter.llama_cpp.config import LlamaCppConfig
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.engine_adapter.llama_cpp.text import AnswerBytes, LlamaTokenizer, model_template
from parkd.engine_adapter.torch_words import TextStream
from parkd.errors import EngineFailure, InvalidRequest, ModelError, RestoreFailed
from parkd.types import (
    Bytes,
    Checksums,
    Grain,
    ImageSpan,
    SamplingParams,
    StageLayout,
    StateLayout,
    StateSizes,
    TokenIds,
    TokenMask,
    Transfer,
)

CHECKSUM = "xxh3-64"
_PROBE_TOKENS = 16
_NOWHERE = -1
"""In place of a position that nothing was noted at."""


class LlamaCppEngine:
    """An `OpaqueEngine` over llama.cpp's low-level interface."""

    response_reader = None
    """GGUF files do not say how answers are read."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        """Raises ModelError."""
        config = model.config
        self._model = model
        self._batch_tokens = config.batch_tokens
        self._sequence = TokenSequence(model, config.batch_tokens)
        self._window = model.window_tokens
        self._has_fixed_state = model.is_recurrent or self._window > 0
        self._limit = config.ctx_checkpoints if self._has_fixed_state else 0
        self._kept: dict[int, Bytes] = {}
        """Partial states by position; the least recently used first."""
        self._before_batch: tuple[int, Bytes] = (_NOWHERE, np.empty(0, dtype=np.uint8))
        """The partial state in front of the batch that runs, and its position."""
        self._fresh_seed = fresh_seed
        self._position = 0
        """As the memory last reported it; the tests of what moves it are in `_settle`."""
        self.images: ImageReader | None = None
        self._vocabulary = LlamaTokenizer(model)
        self.tokenizer: Tokenizer = self._vocabulary
        self.template: ChatTemplate = model_template(model, self._vocabulary)
        self.template_source = model.chat_template
        """The chat template's text."""
        self._answer_bytes = AnswerBytes(self._vocabulary, model.vocab)
        self._vectors = _vectors(model)
        self._steered = self._steer_by(None)
        self.info = self._describe()

    @classmethod
    def load(cls, config: LlamaCppConfig, progress: Callable[[str, float], None] | None = None) -> LlamaCppEngine:
        """Raises ModelError, whose message says what to do."""
        return cls(LlamaModel(config, progress))

    def tokenizer_json(self) -> Callable[[], Any]:
        """What structured output is compiled against: the vocabulary itself, since the file holds no tokenizer.json."""
        ends = sorted(self.info.end_token_ids)
        return lambda: self._vocabulary.grammar_tokenizer(self.info.vocab_size, ends)

    def host_memory_hooks(self) -> None:
        """The library copies by itself."""

    @property
    def position(self) -> int:
        return self._position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(self._kept))

    @property
    def rewind_floor(self) -> int:
        if self._model.is_recurrent:
            return self._position
        if not self._window:
            return 0
        first = self._sequence.first
        return 0 if first <= 0 else min(self._position, first + self._window)

    def checkpoint(self) -> None:
        if not self._limit or self._position == 0:
            return
        held = self._kept.pop(self._position, None)
        if held is None:
            while len(self._kept) >= self._limit:
                root = min(self._kept)
                del self._kept[next((place for place in self._kept if place != root), root)]
            held = np.empty(self._sequence.state_size(PARTIAL), dtype=np.uint8)
            if not self._sequence.read_state(held, PARTIAL):
                raise EngineFailure("llama.cpp did not give the partial state it announced.")
        self._kept[self._position] = held

    def reset(self) -> None:
        self._sequence.clear()
        self._kept.clear()
        self._position = 0

    def truncate(self, position: int) -> None:
        """Raises RestoreFailed, with the engine empty, if the library refuses what should be possible."""
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot keep {position} of {self._position} tokens")
        if position == self._position:
            return
        if position == 0:
            self.reset()
            return
        if position < self.rewind_floor:
            if position not in self._kept:
                raise ValueError(f"the state at {position} is not exact")
            self._kept[position] = held = self._kept.pop(position)
            self._set(held, PARTIAL, position)
        self._cut(position)

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),  # noqa: ARG002 - it has no reader for them, so there are none
    ) -> int:
        base, stop = self._position, self._position + len(token_ids)
        if stop > self.info.context_tokens:
            raise EngineFailure(f"{stop} tokens do not fit the context of {self.info.context_tokens}.")
        places = sorted(checkpoint_at) if self._limit else []
        while self._position < stop and not cancel.is_set():
            start = self._position
            end = min(stop, (start // self._batch_tokens + 1) * self._batch_tokens)
            end = min(end, next((place for place in places if place > start), end))
            if not self._decode(token_ids[start - base : end - base], cancel):
                break
            if end in places:
                self.checkpoint()
            if on_chunk is not None:
                on_chunk(self._position)
        return self._position

    def generate(
        self,
        last_token_id: int,
        sampling: SamplingParams,
        *,
        history: TokenIds,
        mask: TokenMask | None = None,
    ) -> Iterator[Sequence[int]]:
        sampler = Sampler(sampling, self.info.vocab_size, history, fresh_seed=self._fresh_seed())
        token = last_token_id
        while self._position < self.info.context_tokens:
            self._decode(np.array([token], dtype=np.int64), None)
            try:
                token = sampler.pick_row(self._sequence.logits(), None if mask is None else mask.allowed())
            except BadLogits as error:
                raise EngineFailure(
                    f"The engine could not finish this turn: {error}. Send the request again."
                ) from error
            if mask is not None:
                mask.accept(token)
            yield (token,)

    def steering_digest(self, scales: Mapping[str, float] | None) -> bytes:
        try:
            return self._vectors.digest(scales)
        except UnknownVector as error:
            raise InvalidRequest(str(error), param="steering") from error

    def steer(self, scales: Mapping[str, float] | None) -> bytes:
        if self.steering_digest(scales) != self._steered:
            self._steered = self._steer_by(scales)
        return self._steered

    def text_stream(self, stop: Sequence[str]) -> TextStream:
        return TextStream(TextAssembler(self._answer_bytes, stop))

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        missing = [place for place in checkpoints if place not in self._kept]
        if missing:
            raise EngineFailure(f"The engine holds no checkpoint at {missing[0]}.")
        return StateSizes(self._sequence.state_size(WHOLE), tuple(self._kept[place].nbytes for place in checkpoints))

    def capture(self, transfer: Transfer) -> Checksums:
        [stage] = transfer.stages
        if transfer.layout_digest != self.info.layout.digest or transfer.stop != self._position:
            raise EngineFailure(f"The engine is at {self._position}, not at {transfer.stop}: nothing can be parked.")
        whole = []
        for run in stage.rows:
            if not self._sequence.read_state(run.buffer, WHOLE):
                raise EngineFailure("llama.cpp did not give the state it announced.")
            whole.append(_sum(run.buffer))
        fixed = []
        for part in stage.fixed:
            if part.buffer.nbytes:
                held = self._kept.get(part.position)
                if held is None or held.nbytes != part.buffer.nbytes:
                    raise EngineFailure(f"The engine holds no checkpoint at {part.position}.")
                part.buffer[:] = held
            fixed.append(_sum(part.buffer))
        return Checksums(_column(whole), _column(fixed))

    def restore(self, transfer: Transfer) -> None:
        try:
            self._restore(transfer)
        except BaseException:
            self.reset()
            raise

    def close(self) -> None:
        """Gives weights and memory back. The engine is of no use afterwards."""
        self._sequence.close()
        self._model.close()

    def _restore(self, transfer: Transfer) -> None:
        if transfer.layout_digest != self.info.layout.digest or len(transfer.stages) != 1 or transfer.start:
            raise RestoreFailed("The parked state has another layout than this engine.")
        if transfer.stop > self.info.context_tokens:
            raise RestoreFailed(f"{transfer.stop} tokens do not fit the context of {self.info.context_tokens}.")
        [stage] = transfer.stages
        [run] = stage.rows
        partial = [part for part in stage.fixed if part.buffer.nbytes]
        is_cut = transfer.position < transfer.stop
        if is_cut and self._has_fixed_state and [part.position for part in partial] != [transfer.position]:
            raise RestoreFailed(f"There is no partial state of {transfer.position} tokens.")
        _compare([run.buffer], transfer.checksums)
        _compare([part.buffer for part in stage.fixed], transfer.fixed_checksums)
        self.reset()
        self._set(run.buffer, WHOLE, transfer.stop)
        if is_cut and self._has_fixed_state:
            self._set(partial[0].buffer, PARTIAL, transfer.position)
        if is_cut:
            self._cut(transfer.position)
        self.checkpoint()

    def _set(self, state: Bytes, flags: int, position: int) -> None:
        """Raises RestoreFailed, with the engine empty, unless the library took all of it and is where it should be."""
        taken = self._sequence.write_state(state, flags)
        reached = self._sequence.position
        if not taken or reached != position:
            self.reset()
            raise RestoreFailed(
                f"llama.cpp refused the state of {position} tokens: {self._model.last_words()}"
                if not taken
                else f"The state brought llama.cpp to {reached} tokens, not to {position}."
            )
        self._position = reached

    def _cut(self, position: int) -> None:
        if not self._sequence.cut(position):
            self.reset()
            raise RestoreFailed(f"llama.cpp refused to cut its memory at {position} tokens.")
        self._position = position
        for place in [place for place in self._kept if place > position]:
            del self._kept[place]

    def _decode(self, token_ids: TokenIds, cancel: Cancel | None) -> bool:
        """Computes tokens behind the position. False if it was cancelled meanwhile; then, as after an error, the
        position is one at which the state is exact."""
        start = self._position
        if cancel is not None and self._model.is_recurrent and start:
            self._note_start()
        else:
            self._before_batch = (_NOWHERE, self._before_batch[1])
        try:
            done = self._sequence.decode(token_ids, start, is_cancelled=None if cancel is None else cancel.is_set)
        except EngineFailure:
            self._settle(start)
            raise
        if done:
            self._position = start + len(token_ids)
        else:
            self._settle(start)
        return done

    def _note_start(self) -> None:
        """Keeps the partial state in front of a batch: one that is stopped inside has left it in some layers."""
        size = self._sequence.state_size(PARTIAL)
        held = self._before_batch[1]
        if held.nbytes != size:
            held = np.empty(size, dtype=np.uint8)
        is_whole = self._sequence.read_state(held, PARTIAL)
        self._before_batch = (self._position if is_whole else _NOWHERE, held)

    def _settle(self, start: int) -> None:
        """After a batch that did not end: back to its beginning if that is exact still, else to the last checkpoint."""
        if self._model.is_recurrent and self._before_batch[0] == start:
            try:
                self._set(self._before_batch[1], PARTIAL, start)
                self._cut(start)
            except RestoreFailed:
                return  # Empty is exact.
            return
        if not self._model.is_recurrent and self._sequence.cut(start):
            self._position = start
            if start >= self.rewind_floor:
                return
        place = max((place for place in self._kept if place <= start), default=0)
        if place == 0:
            self.reset()
            return
        try:
            self._set(self._kept[place], PARTIAL, place)
            self._cut(place)
        except RestoreFailed:
            return  # Empty is exact.

    def _steer_by(self, scales: Mapping[str, float] | None) -> bytes:
        steering = self._vectors.select(scales)
        self._model.steer(steering)
        return steering.digest

    def _describe(self) -> EngineInfo:
        model, config = self._model, self._model.config
        row_bytes, fixed_bytes = self._probe()
        name = f"{model.architecture} {config.cache_type_k} {config.cache_type_v} {self._window}"
        digest = blake2b(name.encode(), digest_size=16, person=b"llama.cpp-state").digest()
        layout = StateLayout((StageLayout(0, model.layers, row_bytes, fixed_bytes, digest),), CHECKSUM, Grain.OPAQUE)
        return EngineInfo(
            model_name=model.name,
            architecture=model.architecture,
            fingerprint=model.fingerprint(),
            context_tokens=model.context_tokens,
            vocab_size=model.vocab_size,
            end_token_ids=model.end_tokens(),
            layout=layout,
            devices=("llama.cpp",),
            weights_bytes=model.weights_bytes,
            arena_bytes=row_bytes * model.context_tokens + fixed_bytes * (1 + self._limit),
            is_demo_model=config.is_demo_model,
            ctx_checkpoints=self._limit,
        )

    def _probe(self) -> tuple[int, int]:
        """About what a token and a checkpoint take: seen on a few tokens, and scaled to a full window."""
        token = np.zeros(1, dtype=np.int64)
        sizes = []
        for count in (_PROBE_TOKENS, 2 * _PROBE_TOKENS):
            while self._position < count:
                self._decode(token, None)
            sizes.append((self._sequence.state_size(WHOLE), self._sequence.state_size(PARTIAL)))
        self.reset()
        (whole, partial), (later, later_partial) = sizes
        a_token = (later - whole) // _PROBE_TOKENS
        if not self._has_fixed_state:
            return a_token, 0
        in_window = (later_partial - partial) // _PROBE_TOKENS
        return a_token - in_window, max(1, partial + in_window * max(0, self._window - _PROBE_TOKENS))


def _vectors(model: LlamaModel) -> SteeringBank:
    config = model.config
    hidden = int(model.entry(f"{model.architecture}.embedding_length") or 0)
    try:
        return load_vectors(config.control_vectors, hidden, model.layers, config.steered_layers)
    except EngineError as error:
        raise ModelError(str(error)) from error


def _compare(buffers: Sequence[Bytes], expected: Any) -> None:
    """Raises RestoreFailed."""
    if expected is None or expected.shape != (len(buffers), 1):
        raise RestoreFailed("The parked state has no checksums.")
    for buffer, wanted in zip(buffers, expected[:, 0], strict=True):
        if _sum(buffer) != int(wanted):
            raise RestoreFailed("A checksum of the parked state does not match its bytes.")


def _sum(buffer: Bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(buffer.data))


def _column(sums: list[int]) -> Any:
    return np.array(sums, dtype=np.uint64).reshape(len(sums), 1)
