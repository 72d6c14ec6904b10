"""llama.cpp in process: an engine of opaque state over one context with one sequence.

A state that the library refuses leaves the engine empty and counts as a miss. A state that it did not take whole is
never used.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np
from parkd_engine.words.logprobs import TokenLogprobs, logprobs_of
from parkd_engine.words.sampling import Sampler
from parkd_engine.words.steering import SteeringBank, load_vectors
from parkd_engine.words.text import TextAssembler

from parkd.config import ModelConfig
from parkd.engine_adapter.base import (
    Cancel,
    ChatTemplate,
    EngineInfo,
    ImageReader,
    OneSeatEngine,
    ScoredToken,
    TextStream,
    Tokenizer,
)
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.engine_adapter.llama_cpp.text import AnswerBytes, LlamaTokenizer, model_template
from parkd.engine_adapter.llama_cpp.timeline import Timeline
from parkd.engine_adapter.whole_sums import compare_sums, sums_of
from parkd.errors import EngineFailure, LogitsNotFinite, RestoreFailed
from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes, Transfer, chunk_end
from parkd.types import TokenIds

CHECKSUM = "xxh3-64"
LIBRARY = "llama-cpp-python"
_PROBE_TOKENS = 16


class LlamaCppEngine(OneSeatEngine):
    """One sequence through llama.cpp's low-level interface."""

    response_reader = None
    """GGUF files contain no response template."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        """Raises ModelError."""
        self.model = model
        self._batch_tokens = model.batch_tokens
        self.sequence = TokenSequence(model, model.batch_tokens)
        self.timeline = Timeline(model, self.sequence, model.config.ctx_checkpoints)
        self._fresh_seed = fresh_seed
        self.images: ImageReader | None = None
        self._vocabulary = LlamaTokenizer(model)
        self.tokenizer: Tokenizer = self._vocabulary
        self.template: ChatTemplate = model_template(model, self._vocabulary)
        self.build_has_cards = bool(low.llama_supports_gpu_offload())
        self.template_source = model.chat_template
        """The chat template's text."""
        self._answer_bytes = AnswerBytes(self._vocabulary, model.vocab)
        self._vectors = _vectors(model)
        self._steered = self._steer_by(None)
        self._logprobs: list[TokenLogprobs] = []
        self.info = self._describe()

    @classmethod
    def load(cls, config: ModelConfig, progress: Callable[[str, float], None] | None = None) -> LlamaCppEngine:
        """Raises ModelError, whose message says what to do."""
        return cls(LlamaModel(config, progress))

    def tokenizer_json(self) -> Callable[[], Any]:
        """The vocabulary for structured output: an `LLTokenizer`, since a GGUF file has no tokenizer.json."""
        ends = sorted(self.info.end_token_ids)
        return lambda: self._vocabulary.grammar_tokenizer(self.info.vocab_size, ends)

    def host_memory_hooks(self) -> None:
        """None: the library does the copying."""

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
            end = chunk_end(start, stop, self._batch_tokens, places)
            if not timeline.decode(token_ids[start - base : end - base], cancel):
                break
            if end in places:
                timeline.checkpoint()
            if on_chunk is not None:
                on_chunk(timeline.position)
        return timeline.position

    def generate(self) -> Iterator[Sequence[int]]:
        begun, mask = self.begun, self.begun.mask
        sampler = Sampler(begun.sampling, self.info.vocab_size, begun.token_ids, fresh_seed=self._fresh_seed())
        self._logprobs = []
        top_logprobs = begun.sampling.top_logprobs
        token = int(begun.token_ids[-1])
        while self.position < self.info.context_tokens:
            self.timeline.decode(np.array([token], dtype=np.int64), None)
            logits = self.sequence.logits()
            try:
                token = sampler.pick_row(logits, None if mask is None else mask.allowed())
            except LogitsNotFinite:
                if not np.isfinite(logits).any():
                    # The state is not finite either, so nothing could be generated from it now or after a restore.
                    self.reset()
                raise
            if mask is not None:
                mask.accept(token)
            if top_logprobs is not None:
                self._logprobs.append(logprobs_of(logits, token, top_logprobs))
            yield (token,)

    @property
    def logprobs(self) -> Sequence[ScoredToken]:
        return self._logprobs

    def piece(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    @property
    def opening_ids(self) -> Sequence[int]:
        return self.model.opening_tokens()

    def steering_digest(self, scales: Mapping[str, float] | None) -> bytes:
        return self._vectors.digest(scales)

    def steer(self, scales: Mapping[str, float] | None) -> bytes:
        if self.steering_digest(scales) != self._steered:
            self._steered = self._steer_by(scales)
        return self._steered

    def text_stream(self) -> TextStream:
        return TextAssembler(self._answer_bytes)

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        partial = tuple(self.timeline.held(place).nbytes for place in checkpoints)
        return StateSizes(self.sequence.state_size(WHOLE), partial)

    def capture(self, transfer: Transfer) -> Checksums:
        [stage] = transfer.stages
        if transfer.layout_digest != self.info.layout.digest or transfer.stop != self.position:
            raise EngineFailure(f"The engine is at {self.position}, not at {transfer.stop}: nothing can be parked.")
        for run in stage.rows:
            if not self.sequence.read_state(run.buffer, WHOLE):
                raise EngineFailure("llama.cpp wrote a state of another size than it announced.")
        for part in stage.fixed:
            if part.buffer.nbytes:
                held = self.timeline.held(part.position)
                if held.nbytes != part.buffer.nbytes:
                    raise EngineFailure(f"The checkpoint at {part.position} has another size than was announced.")
                part.buffer[:] = held
        return Checksums(sums_of([run.buffer for run in stage.rows]), sums_of([part.buffer for part in stage.fixed]))

    def restore(self, transfer: Transfer) -> None:
        with self.emptied_by_failures():
            self._restore(transfer)

    def close(self) -> None:
        """Frees weights and memory. The engine must not be used afterwards."""
        self.sequence.close()
        self.model.close()

    def _restore(self, transfer: Transfer) -> None:
        if transfer.layout_digest != self.info.layout.digest or len(transfer.stages) != 1 or transfer.start:
            raise RestoreFailed("The parked state has another layout than this engine.")
        if transfer.stop > self.info.context_tokens:
            raise RestoreFailed(f"{transfer.stop} tokens do not fit the context of {self.info.context_tokens}.")
        [stage] = transfer.stages
        [run] = stage.rows
        partial = [part for part in stage.fixed if part.buffer.nbytes]
        is_cut = transfer.position < transfer.stop
        if is_cut and self.timeline.has_fixed_state and [part.position for part in partial] != [transfer.position]:
            raise RestoreFailed(f"There is no partial state of {transfer.position} tokens.")
        compare_sums([run.buffer], transfer.checksums)
        compare_sums([part.buffer for part in stage.fixed], transfer.fixed_checksums)
        self.reset()
        self.timeline.set(run.buffer, WHOLE, transfer.stop)
        if is_cut and self.timeline.has_fixed_state:
            self.timeline.set(partial[0].buffer, PARTIAL, transfer.position)
        if is_cut:
            self.timeline.cut(transfer.position)
        self.checkpoint()

    def _steer_by(self, scales: Mapping[str, float] | None) -> bytes:
        steering = self._vectors.select(scales)
        self.model.steer(steering)
        return steering.digest

    def _describe(self) -> EngineInfo:
        model, config = self.model, self.model.config
        row_bytes, fixed_bytes = self._probe()
        name = f"{model.architecture} {' '.join(config.llama.cache_types)} {self.timeline.window}"
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
            arena_bytes=row_bytes * model.context_tokens + fixed_bytes * (1 + self.timeline.limit),
            is_demo_model=config.is_demo_model,
            ctx_checkpoints=self.timeline.limit,
            build=f"{low.__name__} {version(LIBRARY)} {config.llama} {config.batch_tokens} {config.threads}",
        )

    def _probe(self) -> tuple[int, int]:
        """Approximate bytes of a token and of a checkpoint: measured with a few tokens, scaled to a full window."""
        token = np.zeros(1, dtype=np.int64)
        sizes = []
        for count in (_PROBE_TOKENS, 2 * _PROBE_TOKENS):
            while self.position < count:
                self.timeline.decode(token, None)
            sizes.append((self.sequence.state_size(WHOLE), self.sequence.state_size(PARTIAL)))
        self.reset()
        (whole, partial), (later, later_partial) = sizes
        a_token = (later - whole) // _PROBE_TOKENS
        if not self.timeline.has_fixed_state:
            return a_token, 0
        in_window = (later_partial - partial) // _PROBE_TOKENS
        return a_token - in_window, max(1, partial + in_window * max(0, self.timeline.window - _PROBE_TOKENS))


def _vectors(model: LlamaModel) -> SteeringBank:
    config = model.config
    hidden = int(model.entry(f"{model.architecture}.embedding_length") or 0)
    return load_vectors(config.control_vectors, hidden, model.layers, config.steered_layers)
