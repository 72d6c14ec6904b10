"""llama.cpp in process: an engine over one context with one live sequence.

Its state is rows, which are moved as ranges of cells, and partial states where the model has windows or recurrent
layers. Where that does not hold, which is tried when the model is loaded, it is opaque and moved whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as low
import numpy as np

from parkd.config import ModelConfig
from parkd.engine_adapter.base import (
    Cancel,
    CaptureInFlight,
    ChatTemplate,
    EngineInfo,
    ImageReader,
    OneSeatEngine,
    ScoredToken,
    Seat,
    TextStream,
    Tokenizer,
)
from parkd.engine_adapter.llama_cpp.cards import block_tokens_for, cuda_runtime, page_locks
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.ranges import PROBE_TOKENS, CellRanges, RangeForm, probe
from parkd.engine_adapter.llama_cpp.row_moves import LENGTH_BYTES, RowMoves
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.sequence import Sequence as TokenSequence
from parkd.engine_adapter.llama_cpp.text import AnswerBytes, LlamaTokenizer, model_template
from parkd.engine_adapter.llama_cpp.timeline import Timeline
from parkd.engine_adapter.llama_cpp.whole_moves import WholeMoves
from parkd.engine_adapter.pinned import PinnedMemory
from parkd.errors import EngineFailure, LogitsNotFinite, RestoreFailed
from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes, Transfer, chunk_end
from parkd.types import TokenIds
from parkd.words.logprobs import TokenLogprobs, logprobs_of
from parkd.words.sampling import Sampler
from parkd.words.steering import SteeringBank, load_vectors
from parkd.words.text import TextAssembler

CHECKSUM = "xxh3-64"
NO_RANGES = ("deepseek4",)
"""Architectures whose memory stops the process if a part of a sequence is shared (llama.cpp:
`llama_kv_cache_dsv4::seq_cp`)."""


@dataclass(frozen=True, slots=True)
class ProbedSizes:
    """What a few tokens were seen to leave."""

    form: RangeForm | None
    """How ranges of rows are written; None: the state is whole or nothing."""
    row_bytes: int
    fixed_bytes: int
    """Of full windows; nearly, if the state is whole or nothing."""


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
        self.timeline = Timeline(model, self.sequence, model.config.layout.ctx_checkpoints)
        self._fresh_seed = fresh_seed
        self.images: ImageReader | None = None
        self._vocabulary = LlamaTokenizer(model)
        self.tokenizer: Tokenizer = self._vocabulary
        self.template: ChatTemplate = model_template(model, self._vocabulary)
        self.build_has_cards = bool(low.llama_supports_gpu_offload())
        self.template_source = model.chat_template
        """The chat template's text."""
        self.uses_cards = self.build_has_cards and model.config.llama.gpu_layers != 0
        """Some of the state may be on a card."""
        self._answer_bytes = AnswerBytes(self._vocabulary, model.vocab)
        self._vectors = _vectors(model)
        self.adapters = model.adapters.infos
        self._steered: bytes | None = None
        """The digest of what steers; None: not that of any turn."""
        self.steer(None)
        self._logprobs: list[TokenLogprobs] = []
        sizes = self._probe()
        self.info = self._describe(sizes)
        self._moves = self._moves_of(sizes.form)

    @classmethod
    def load(cls, config: ModelConfig, progress: Callable[[str, float], None] | None = None) -> LlamaCppEngine:
        """Raises ModelError, whose message says what to do."""
        return cls(LlamaModel(config, progress))

    def tokenizer_json(self) -> Callable[[], Any]:
        """The vocabulary for structured output: an `LLTokenizer`, since a GGUF file has no tokenizer.json."""
        ends = sorted(self.info.end_token_ids)
        return lambda: self._vocabulary.grammar_tokenizer(self.info.vocab_size, ends)

    def host_memory_hooks(self) -> PinnedMemory | None:
        """Hooks that page-lock the memory of parked blocks, for fast copies; None where no card is used, or its
        library cannot be reached."""
        runtime = cuda_runtime() if self.uses_cards else None
        return None if runtime is None else page_locks(runtime)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user should know at start."""
        asked, most = self.model.config.layout.context_tokens or 0, self.model.model_tokens
        if not 0 < most < asked:
            return ()
        return (f"--ctx-size {asked:,} is more than the model was made for: it has {most:,} tokens",)

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

    def set_aside(self) -> Callable[[Seat], None]:
        put_prompt_back, logprobs = super().set_aside(), self._logprobs

        def put_back(seat: Seat) -> None:
            assert seat is self, "the library has one seat"
            put_prompt_back(seat)
            self._logprobs = logprobs

        return put_back

    @property
    def logprobs(self) -> Sequence[ScoredToken]:
        return self._logprobs

    def piece(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    @property
    def opening_ids(self) -> Sequence[int]:
        return self.model.opening_tokens()

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        vectors, applied = self._vectors.digest(scales), self.model.adapters.digest(adapters)
        if not applied:
            return vectors
        return blake2b(vectors + applied, digest_size=16, person=b"parkd-steering").digest()

    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        digest = self.steering_digest(scales, adapters)
        if digest != self._steered:
            self._steered = None  # until both are in effect
            self.model.steer(self._vectors.select(scales))
            self.model.adapters.apply(adapters)
            self._steered = digest
        return digest

    def text_stream(self) -> TextStream:
        return TextAssembler(self._answer_bytes)

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

    def close(self) -> None:
        """Frees weights and memory. The engine must not be used afterwards."""
        if isinstance(self._moves, RowMoves):
            self._moves.close()
        self.sequence.close()
        self.model.close()

    def _check_capture(self, transfer: Transfer) -> None:
        if transfer.layout_digest != self.info.layout.digest:
            raise EngineFailure("The parked state would have another layout than this engine.")

    def _moves_of(self, form: RangeForm | None) -> RowMoves | WholeMoves:
        if form is None:
            return WholeMoves(self.timeline)
        return RowMoves(self.timeline, CellRanges(self.sequence, form), self.info.layout.stages[0])

    def _describe(self, sizes: ProbedSizes) -> EngineInfo:
        model, config, form = self.model, self.model.config, sizes.form
        name = f"{model.architecture} {' '.join(config.llama.cache_types)} {self.timeline.window}"
        if form is not None:
            name += f" ranges {form.cell_bytes} {form.values_apart}"
        digest = blake2b(name.encode(), digest_size=16, person=b"llama.cpp-state").digest()
        head_bytes = 0 if form is None else form.head_bytes
        stage = StageLayout(0, model.layers, sizes.row_bytes, sizes.fixed_bytes, digest, head_bytes=head_bytes)
        return EngineInfo(
            model_name=model.name,
            architecture=model.architecture,
            fingerprint=model.fingerprint(),
            context_tokens=model.context_tokens,
            vocab_size=model.vocab_size,
            end_token_ids=model.end_tokens(),
            layout=self._layout_of(stage, form),
            devices=("llama.cpp",),
            weights_bytes=model.weights_bytes,
            arena_bytes=sizes.row_bytes * model.context_tokens + sizes.fixed_bytes * (1 + self.timeline.limit),
            is_demo_model=config.is_demo_model,
            ctx_checkpoints=self.timeline.limit,
            model_tokens=model.model_tokens,
            can_pause=not self.timeline.window,  # a restore moves a window's cells, and so changes how sums round
            build=f"llama.cpp {llama_cpp.__version__} {config.llama} {config.layout.batch_tokens} {config.threads}",
        )

    def _layout_of(self, stage: StageLayout, form: RangeForm | None) -> StateLayout:
        if form is None:
            return StateLayout((stage,), CHECKSUM, Grain.OPAQUE)
        return StateLayout((stage,), CHECKSUM, block_tokens=block_tokens_for(form.key_bytes, self.uses_cards))

    def _probe(self) -> ProbedSizes:
        """Reads a few tokens to see what they leave."""
        token = np.zeros(1, dtype=np.int64)
        wholes, partials = [], []
        for count in (PROBE_TOKENS // 3, 2 * PROBE_TOKENS // 3, PROBE_TOKENS):
            while self.position < count:
                self.timeline.decode(token, None)
            wholes.append(self.sequence.state_size(WHOLE))
            partials.append(self.sequence.state_size(PARTIAL))
        can_cut = self.model.architecture not in NO_RANGES
        form = probe(self.sequence, is_recurrent=self.model.is_recurrent) if can_cut else None
        if form is not None and form.values_apart and self.uses_cards:
            form = None  # A card copies single numbers of each row so slowly that fewer, longer runs are better.
        self.reset()
        step = PROBE_TOKENS // 3
        a_token = (wholes[1] - wholes[0]) // step
        if not self.timeline.has_fixed_state:
            return ProbedSizes(form, a_token if form is None else form.row_bytes, 0)
        in_window = (partials[1] - partials[0]) // step
        fixed_bytes = max(1, partials[0] + in_window * max(0, self.timeline.window - step))
        if form is None:
            return ProbedSizes(None, a_token - in_window, fixed_bytes)
        return ProbedSizes(form, form.row_bytes, fixed_bytes + LENGTH_BYTES)


def _vectors(model: LlamaModel) -> SteeringBank:
    config = model.config
    hidden = int(model.entry(f"{model.architecture}.embedding_length") or 0)
    return load_vectors(config.control_vectors, hidden, model.layers, config.steered_layers)
