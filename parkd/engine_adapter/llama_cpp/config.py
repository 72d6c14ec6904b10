"""The settings with which a GGUF model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parkd.config import default_of
from parkd.config.llama_settings import LoraAdapter
from parkd.state import VectorFile

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""llama-server's names."""


@dataclass(frozen=True)
class LlamaCppConfig:
    """What to load and how to lay it out. Names and meanings are llama-server's."""

    model: Path
    """A GGUF file, or the first of several."""
    cache_dir: Path
    """Directory for the digests of weight files."""
    name: str | None = None
    """The model's name; None: the name in its file."""
    chat_template_file: Path | None = None
    context_tokens: int | None = None
    """None: the model's own."""
    batch_tokens: int = 512
    ctx_checkpoints: int = default_of("ctx-checkpoints")
    gpu_layers: int | None = None
    """None: all layers that the library can offload."""
    split_mode: str = default_of("split-mode")
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = default_of("main-gpu")
    threads: int | None = None
    """None: one per core."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = default_of("flash-attn")
    loras: tuple[LoraAdapter, ...] = ()
    control_vectors: tuple[VectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    is_demo_model: bool = False
