"""llama.cpp in process: an engine whose seats have a context each, over one model.

Its state is rows, which are moved as ranges of cells, and partial states where the model has windows or recurrent
layers. Where that does not hold, which is tried when the model is loaded, it is opaque and moved whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as low
import numpy as np

from parkd.config import ModelConfig
from parkd.engine_adapter.base import ChatTemplate, Embedder, Engine, EngineInfo, ImageReader, TextStream, Tokenizer
from parkd.engine_adapter.llama_cpp.cards import block_tokens_for, cuda_runtime, page_locks
from parkd.engine_adapter.llama_cpp.embedder import LlamaEmbedder
from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.ranges import PROBE_TOKENS, RangeForm, probe
from parkd.engine_adapter.llama_cpp.row_moves import LENGTH_BYTES
from parkd.engine_adapter.llama_cpp.seat import LlamaSeat
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL, WHOLE
from parkd.engine_adapter.llama_cpp.text import AnswerBytes, LlamaTokenizer, model_template
from parkd.engine_adapter.pinned import PinnedMemory
from parkd.state import Grain, StageLayout, StateLayout
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


class LlamaCppEngine(LlamaSeat, Engine):
    """llama.cpp's low-level interface. It is its own first seat, as an engine with one seat is."""

    response_reader = None
    """GGUF files contain no response template."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        """Raises ModelError."""
        vectors = _vectors(model)
        super().__init__(model, vectors, fresh_seed)
        self._beside = tuple(LlamaSeat(model, vectors, fresh_seed) for _ in range((model.config.layout.seats or 1) - 1))
        self.images: ImageReader | None = None
        self._vocabulary = LlamaTokenizer(model)
        self.tokenizer: Tokenizer = self._vocabulary
        self.template: ChatTemplate = model_template(model, self._vocabulary)
        self.build_has_cards = bool(low.llama_supports_gpu_offload())
        self.template_source = model.chat_template
        """The chat template's text."""
        self._answer_bytes = AnswerBytes(self._vocabulary, model.vocab)
        self.adapters = model.adapters.infos
        llama = model.config.llama
        self._embedder = LlamaEmbedder(model, self._vocabulary, llama.pooling) if llama.embeddings else None
        self.embedder: Embedder | None = self._embedder
        sizes = self._probe()
        info = self._describe(sizes)
        for seat in (self, *self._beside):
            seat.open(info, sizes.form)

    @property
    def seats(self) -> Sequence[LlamaSeat]:
        return (self, *self._beside)

    @property
    def turns_at_once(self) -> int:
        return len(self.seats)

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
        found, model, llama = [], self.model, self.model.config.llama
        asked, most = model.config.layout.context_tokens or 0, model.model_tokens
        if 0 < most < asked:
            found.append(f"--ctx-size {asked:,} is more than the model was made for: it has {most:,} tokens")
        if (llama.cpu_moe or llama.n_cpu_moe) and not model.has_experts:
            found.append("--cpu-moe and --n-cpu-moe change nothing: this model has no experts")
        if model.without_graphs:
            found.append(
                "without flash attention, llama.cpp's CUDA graphs can compute other keys and values each time: they "
                "are switched off, which may slow answers. --flash-attn on avoids it, where the model allows it"
            )
        if model.splits_experts:
            found.append(
                "experts are computed by a card and by the processor: how llama.cpp's sums round then depends on what "
                "it computed before, so logits of the same state can differ slightly"
            )
        return tuple(found)

    def piece(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    @property
    def opening_ids(self) -> Sequence[int]:
        return self.model.opening_tokens()

    def text_stream(self) -> TextStream:
        return TextAssembler(self._answer_bytes)

    def close(self) -> None:
        """Frees weights and memory. The engine must not be used afterwards."""
        if self._embedder is not None:
            self._embedder.close()
        for seat in self.seats:
            seat.close_seat()
        self.model.close()

    def _describe(self, sizes: ProbedSizes) -> EngineInfo:
        model, config, form = self.model, self.model.config, sizes.form
        tokens, seats = self.context.tokens, len(self.seats)
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
            context_tokens=tokens,
            vocab_size=model.vocab_size,
            end_token_ids=model.end_tokens(),
            layout=self._layout_of(stage, form),
            devices=("llama.cpp",),
            weights_bytes=model.weights_bytes,
            arena_bytes=seats * (sizes.row_bytes * tokens + sizes.fixed_bytes * (1 + self.timeline.limit)),
            is_demo_model=config.is_demo_model,
            ctx_checkpoints=self.timeline.limit,
            live_conversations=seats,
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
