"""A model and its contexts in llama.cpp: loading, describing, freeing.

    GGUF file -> model (weights on the devices that llama.cpp splits them over) -> contexts (each the memory of one
                                                                                   live conversation)

The library returns error codes and writes the reasons to its log. The last lines of the log are kept for error
messages.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as low
from gguf import GGMLQuantizationType

from parkd.config import ModelConfig
from parkd.engine_adapter.llama_cpp.adapters import Adapters
from parkd.engine_adapter.llama_cpp.cards import copies_at_once
from parkd.engine_adapter.llama_cpp.objects import computing_objects, library_folder
from parkd.errors import EngineFailure, ModelError
from parkd.model_files.cache import ModelCache
from parkd.words.steering import Steering

FINGERPRINT_BYTES = 16
BATCH_TOKENS = 512
"""The default number of tokens in a chunk of a prompt."""
MOST_PHYSICAL_BATCH = 512
"""The most tokens of a batch that are computed at once."""
LOG_LINES = 8
WARN_LEVEL = 3
HAS_CELLS = b"state_read_meta: cell_count"
"""How the line begins that the library logs when it has found the cells for a state (llama.cpp:
`llama_kv_cache::state_read_meta`). After it, only bytes are copied."""
NO_FLASH = (b"Flash Attention not supported", b"flash_attn is not compatible")
"""What the library warns of when it does without flash attention although nobody switched it off (llama.cpp:
`llama_context::resolve_fused_ops`, `llama_init_from_model`)."""
GRAPHS_VARIABLE = "GGML_CUDA_DISABLE_GRAPHS"
"""Read by the CUDA backend when it first computes."""
_SHARD_MARK = "-00001-of-"
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}
PLAIN_TYPES = ("f32", "f16", "bf16")
"""Types of values that attention without flash attention reads."""
_FLASH = {"auto": -1, "off": 0, "on": 1}
_EXPERTS = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps"
"""What the tensors of experts are called, after the number of the layer (llama.cpp: `LLM_TENSOR_NAMES`)."""


class _Override(ctypes.Structure):
    """llama.h: `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class LibraryLog:
    """Receives the library's log. One per process, since the library has one log."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self.has_no_flash = False
        """The library does without flash attention."""
        self._at_cells: dict[int, Callable[[], None]] = {}
        """What to call on each thread that sets a state."""
        self._callback = low.llama_log_callback(self._take)
        low.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _data: Any) -> None:
        if level >= WARN_LEVEL and text.strip():
            self._lines.append(text.decode(errors="replace").strip())
            self.has_no_flash |= any(words in text for words in NO_FLASH)
        elif self._at_cells and text.startswith(HAS_CELLS):
            self._at_cells.get(threading.get_ident(), _nothing)()

    @contextmanager
    def at_cells(self, call: Callable[[], None]) -> Iterator[None]:
        """Calls it when the library, called on this thread meanwhile, has found the cells for a state. A library that
        does not say so never calls it."""
        thread = threading.get_ident()
        self._at_cells[thread] = call
        try:
            yield
        finally:
            del self._at_cells[thread]

    @property
    def last(self) -> str:
        return " / ".join(self._lines) or "the library gave no reason"


def _nothing() -> None:
    pass


class LlamaModel:
    """The loaded model. For the engine's thread only, except for reading the vocabulary."""

    def __init__(self, config: ModelConfig, progress: Callable[[str, float], None] | None = None) -> None:
        """`config.model` is a GGUF file, or the first of several. Raises ModelError."""
        assert config.model is not None
        self.config = config
        self.file = Path(config.model)
        self.batch_tokens = config.layout.batch_tokens or BATCH_TOKENS
        self._log = LibraryLog()
        low.llama_backend_init()
        self._check()
        self._progress = progress
        # Referenced for as long as the library may call or read them.
        self._on_progress = low.llama_progress_callback(self._advance)
        self._tensor_split = (ctypes.c_float * max(1, low.llama_max_devices()))(*config.llama.tensor_split)
        self._overrides = _experts_on_host(experts_on_host(config.llama.cpu_moe, config.llama.n_cpu_moe))
        self.pointer = low.llama_model_load_from_file(os.fsencode(self.file), self._model_params())
        if not self.pointer:
            raise ModelError(
                f"llama.cpp cannot load {self.file}: {self._log.last}. Is it whole, and of an architecture that "
                f"this build knows? With too little memory, lower --gpu-layers or take a smaller quantisation."
            )
        self.vocab = low.llama_model_get_vocab(self.pointer)
        self.model_tokens = max(0, int(low.llama_model_n_ctx_train(self.pointer)))
        """The longest context that the model was made for; 0 if its file does not say."""
        self.copies = copies_at_once(self.uses_cards, self.is_recurrent or self.window_tokens > 0)
        """How many ranges of cells are copied at once. Each needs a sequence."""
        self._files = ModelCache(config.cache_dir)
        self.adapters = Adapters(
            self.pointer, config.llama.loras, lambda path: self._files.file_digest(path, None), self.last_words
        )

    def open_context(self, embeds_tokens: int = 0, pooling: int = low.LLAMA_POOLING_TYPE_NONE) -> LlamaContext:
        """Memory for one more conversation; or, with `embeds_tokens`, for texts of so many tokens, to be embedded with
        the library's `pooling`. Raises ModelError."""
        params = self._context_params()
        if embeds_tokens:
            params.n_ctx = params.n_batch = params.n_ubatch = embeds_tokens
            params.n_seq_max = 1
            params.embeddings = True
            params.pooling_type = pooling
        pointer = low.llama_init_from_model(self.pointer, params)
        if not pointer:
            asked, seats = self.config.layout.context_tokens, self.config.layout.seats or 1
            many = f"{seats} contexts" if seats > 1 else "a context"
            raise ModelError(
                f"llama.cpp has no room for {many} of {asked or 'the full number of'} tokens: {self.last_words()}. "
                f"Start with a smaller --ctx-size{' or --parallel' if seats > 1 else ''}, or another --cache-type-k "
                f"and --cache-type-v."
            )
        if self.without_graphs:  # nothing was computed yet
            os.environ[GRAPHS_VARIABLE] = "1"
        context = LlamaContext(self, pointer)
        if not context.memory:
            context.close()
            raise ModelError(
                f"{self.name} keeps no state between tokens: it only embeds texts, and holds no conversation. "
                f"llama-server --embeddings serves such models."
            )
        return context

    @property
    def architecture(self) -> str:
        return self.entry("general.architecture") or "unknown"

    @property
    def name(self) -> str:
        return self.config.name or self.entry("general.name") or self.file.stem

    @property
    def vocab_size(self) -> int:
        return int(low.llama_vocab_n_tokens(self.vocab))

    @property
    def layers(self) -> int:
        return int(low.llama_model_n_layer(self.pointer))

    @property
    def weights_bytes(self) -> int:
        return int(low.llama_model_size(self.pointer))

    @property
    def window_tokens(self) -> int:
        """The window of sliding layers, in tokens; 0 without any."""
        return int(low.llama_model_n_swa(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        """Some of the state is valid only at its end."""
        return bool(low.llama_model_is_recurrent(self.pointer) or low.llama_model_is_hybrid(self.pointer))

    @property
    def uses_cards(self) -> bool:
        """Some of the state may be on a card."""
        return bool(low.llama_supports_gpu_offload()) and self.config.llama.gpu_layers != 0

    @property
    def without_graphs(self) -> bool:
        """CUDA graphs are switched off: without flash attention, the same prompt left other keys and values the first
        time than later, by far more than rounding; with them off, always the same (ggml 0.25.3 on an H200)."""
        return self.uses_cards and (self.config.llama.flash_attn == "off" or self._log.has_no_flash)

    @property
    def has_experts(self) -> bool:
        return bool(int(self.entry(f"{self.architecture}.expert_count") or 0))

    @property
    def splits_experts(self) -> bool:
        """Some experts are computed by cards and others by the processor."""
        llama, layers = self.config.llama, self.layers
        on_host = llama.cpu_moe or llama.n_cpu_moe > 0 or (llama.gpu_layers is not None and llama.gpu_layers <= layers)
        return self.has_experts and self.uses_cards and on_host

    @property
    def chat_template(self) -> str | None:
        if self.config.chat_template_file is not None:
            return self.config.chat_template_file.read_text()
        text = low.llama_model_chat_template(self.pointer, None)
        return text.decode() if text else None

    def entry(self, key: str) -> str | None:
        """A metadata value of the file, as text; None without it."""
        buffer = ctypes.create_string_buffer(4096)
        size = low.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if size >= 0 else None

    def end_tokens(self) -> frozenset[int]:
        return frozenset(t for t in range(self.vocab_size) if low.llama_vocab_is_eog(self.vocab, t))

    def opening_tokens(self) -> tuple[int, ...]:
        """The tokens that the vocabulary puts before plain text."""
        return (low.llama_vocab_bos(self.vocab),) if low.llama_vocab_get_add_bos(self.vocab) else ()

    def fingerprint(self) -> bytes:
        """A digest of 16 bytes over the weights, KV types, adapters with their scales, the shared objects that compute,
        and the settings that shape a written state. Control vectors are in each request's key instead."""
        cache, llama = self._files, self.config.llama
        hasher = blake2b(digest_size=FINGERPRINT_BYTES, person=b"parkd-llama.cpp")
        parts = [cache.file_digest(path, self._progress) for path in shards(self.file)]
        objects, below = computing_objects(library_folder(Path(llama_cpp.__file__).parent))
        parts += [cache.file_digest(path, None) for path in objects]
        parts += [name.encode() for name in below]
        parts += [f"{' '.join(llama.cache_types)} {llama.flash_attn}".encode()]
        if on_host := experts_on_host(llama.cpu_moe, llama.n_cpu_moe):
            parts += [on_host.encode()]
        if self.without_graphs:
            parts += [GRAPHS_VARIABLE.encode()]
        parts += self.adapters.identity()
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()

    def at_cells(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """See `LibraryLog.at_cells`."""
        return self._log.at_cells(call)

    def last_words(self) -> str:
        """The last lines of the library's log, for an error message."""
        return self._log.last

    def close(self) -> None:
        """After all of its contexts."""
        if self.pointer:
            low.llama_model_free(self.pointer)
            self.pointer = None

    def _check(self) -> None:
        shares = self.config.llama.tensor_split
        if not self.file.is_file():
            raise ModelError(f"There is no GGUF file {self.file}.")
        if self.config.llama.flash_attn == "off" and self.config.llama.cache_types[1] not in PLAIN_TYPES:
            raise ModelError(
                f"--cache-type-v {self.config.llama.cache_types[1]} needs flash attention in llama.cpp, and "
                f"--flash-attn is off: leave it to auto, or take --cache-type-v f16."
            )
        if len(shares) > low.llama_max_devices():
            raise ModelError(
                f"--tensor-split names {len(shares)} shares, and this build of llama.cpp knows "
                f"{low.llama_max_devices()} device(s)."
            )

    def _model_params(self) -> Any:
        llama, params = self.config.llama, low.llama_model_default_params()
        params.n_gpu_layers = -1 if llama.gpu_layers is None else llama.gpu_layers
        params.split_mode = _SPLIT_MODES[llama.split_mode]
        params.main_gpu = llama.main_gpu
        if llama.tensor_split:
            params.tensor_split = self._tensor_split
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        params.progress_callback = self._on_progress
        return params

    def _context_params(self) -> Any:
        config, params = self.config, low.llama_context_default_params()
        threads = config.threads or os.cpu_count() or 1
        params.n_ctx = capped(config.layout.context_tokens, self.model_tokens)
        params.n_batch = self.batch_tokens
        params.n_ubatch = min(self.batch_tokens, MOST_PHYSICAL_BATCH)
        params.n_seq_max = 1 + self.copies  # the live one, and those through which ranges of its cells are moved
        params.kv_unified = True  # one pool of cells, so that a cell may belong to two
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = map(_type, config.llama.cache_types)
        params.flash_attn_type = _FLASH[config.llama.flash_attn]
        params.no_perf = True
        params.swa_full = False
        return params

    def _advance(self, share: float, _data: Any) -> bool:
        if self._progress is not None:
            self._progress("loading weights", float(share))
        return True


class LlamaContext:
    """What computes over the model, and the memory of one live conversation. For the engine's thread only."""

    def __init__(self, model: LlamaModel, pointer: Any) -> None:
        self.model = model
        self.pointer = pointer
        self.memory = low.llama_get_memory(pointer)
        self._adapted: tuple[tuple[int, float], ...] = ()

    @property
    def tokens(self) -> int:
        """The most that it holds."""
        return int(low.llama_n_ctx(self.pointer))

    def steer(self, steering: Steering) -> None:
        """Sets the directions that are added to the layers from now on; an empty set removes all. Raises
        EngineFailure."""
        embed, layers = int(low.llama_model_n_embd(self.model.pointer)), self.model.layers
        if not steering.sums:
            failed = low.llama_set_adapter_cvec(self.pointer, None, 0, embed, 0, 0)
        else:
            data = (ctypes.c_float * (embed * (layers - 1)))()
            for layer, direction in steering.sums.items():
                start = (layer - 1) * embed
                data[start : start + embed] = direction.tolist()
            failed = low.llama_set_adapter_cvec(self.pointer, data, len(data), embed, 1, layers - 1)
        if failed:
            raise EngineFailure(f"llama.cpp refused the control vectors: {self.model.last_words()}.")

    def adapt(self, scales: Mapping[int, float] | None) -> None:
        """Applies adapters from now on. Those that are not named do not apply; None: the default set. Raises
        EngineFailure."""
        used = self.model.adapters.in_use(scales)
        if used == self._adapted:
            return
        pointers = self.model.adapters.pointers
        chosen = (low.llama_adapter_lora_p_ctypes * len(used))(*(pointers[place] for place, _ in used))
        factors = (ctypes.c_float * len(used))(*(scale for _, scale in used))
        if low.llama_set_adapters_lora(self.pointer, chosen, len(used), factors):
            raise EngineFailure(f"llama.cpp refused the adapters: {self.model.last_words()}.")
        self._adapted = used

    def close(self) -> None:
        if self.pointer:
            low.llama_free(self.pointer)
            self.pointer = self.memory = None


def experts_on_host(all_layers: bool, first_layers: int) -> str | None:
    """A regular expression of the tensors that stay in the memory of the host; None: all go where their layer goes."""
    if all_layers:
        return _EXPERTS
    numbers = "|".join(map(str, range(first_layers)))
    return rf"^blk\.({numbers}){_EXPERTS}" if numbers else None


def _experts_on_host(pattern: str | None) -> ctypes.Array[_Override] | None:
    """What the library is told: a list that ends with an empty entry."""
    if pattern is None:
        return None
    host = low._lib.ggml_backend_cpu_buffer_type
    host.restype = ctypes.c_void_p
    return (_Override * 2)(_Override(pattern.encode(), host()), _Override())


def capped(asked: int | None, model_tokens: int) -> int:
    """Tokens of the context; 0 leaves it to the library, which takes the model's. More than the model was made for
    would only take memory."""
    asked = asked or 0
    return min(asked, model_tokens) if model_tokens else asked


def _type(name: str) -> int:
    return int(GGMLQuantizationType[name.upper()])


def shards(first: Path) -> Iterator[Path]:
    """All files of a model, which may be split: `NAME-00001-of-00003.gguf`."""
    head, mark, tail = first.name.partition(_SHARD_MARK)
    if not mark:
        yield first
        return
    count = int(tail.partition(".")[0])
    for number in range(1, count + 1):
        yield first.with_name(f"{head}-{number:05d}-of-{tail}")
