"""The settings once read: one small frozen configuration a component."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from parkd.llama_settings import LlamaSettings
from parkd.model_settings import ControlVectorFile


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """A llama-server that already runs."""

    url: str
    slot_dir: Path
    """Its `--slot-save-path`."""
    api_key: str | None = field(default=None, repr=False)
    silence_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it lies on the devices."""

    model: str | None
    """A directory, a hub id or a GGUF file; None: the demo model, if it is installed."""
    alias: str | None
    """The name that `/v1/models` shows."""
    chat_template_file: Path | None
    devices: tuple[str, ...]
    """One a stage; empty: chosen when the model is loaded."""
    layer_split: tuple[int, ...]
    """First layer of each stage but the first; empty: split by what the layers weigh."""
    context_tokens: int | None
    """None: the largest that fits, up to the model's own."""
    batch_tokens: int | None
    """Tokens a prefill chunk; None: what suits the devices."""
    ctx_checkpoints: int = 8
    """Copies of the fixed state kept on the devices, for models that have any."""
    kv_format: str | None = None
    """What keys and values are kept as, of `engine.kv_format`; None: as they are computed."""
    draft_tokens: int | None = None
    """Tokens guessed a step by models with a draft head; None: the engine's choice, 0: none."""
    control_vectors: tuple[ControlVectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer; None: all but the first."""
    upstream: UpstreamConfig | None = None
    """Set: a llama-server that runs serves the model, and nothing is loaded here."""
    engine: str = "auto"
    llama: LlamaSettings = field(default_factory=LlamaSettings)


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """What parked conversations may take on disk."""

    budget_bytes: int
    """0: they are in memory only."""
    directory: Path | None
    """Where they stay; None: files without a name, gone with the process."""
    write_bytes_per_day: int
    max_age_s: float | None
    """Conversations not used for so long are forgotten; None: never for their age."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What parked conversations may take."""

    budget_bytes: int | Literal["auto"]
    """0 turns parking off."""
    slots: int | None
    """None: as many conversations as the budget holds."""
    answer_bytes: int
    """What the memory of generated answers may take; 0 renders every answer that comes back."""
    memo_bytes: int = 64 * 1024 * 1024
    """What the memory of texts already tokenised and hashed may take; 0: each prompt is tokenised whole."""
    disk: DiskCacheConfig = DiskCacheConfig(0, None, 0, None)
    eviction_policy: str = "value"
    """One of EVICTION_POLICIES."""
    min_free_bytes: int | None = None
    """Of the machine's memory, left free by parking; None: chosen by the machine's size."""
    record: Path | None = None
    """Where a trace of the turns is written."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str
    port: int
    """0: any free one."""
    api_keys: tuple[str, ...]
    """Keys given as they are, each with conversations of its own."""
    api_key_file: Path | None
    """Named keys and their namespaces; with neither, no key is asked for."""
    max_queue: int
    max_queue_bytes: int
    max_output_tokens: int | None
    """None: up to the context's end."""
    cors_origins: tuple[str, ...]
    """Web pages that may call this server; empty: none but those of this machine."""
    keeps_billing_header: bool
    """An agent's header that changes with every request stays in the prompt."""
    rewrite_rules_file: Path | None = None
    """What is replaced in prompts before they are read; None: nothing."""


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig
    cache: CacheConfig
    server: ServerConfig
    home: Path
    """Where converted weights are kept."""
    notes: tuple[str, ...] = ()
    """What the user should be told although it stops nothing."""
