"""The settings after parsing: one small frozen configuration for each component."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from parkd.config.llama_settings import LlamaSettings
from parkd.config.model_settings import ControlVectorFile


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """A llama-server that is already running."""

    url: str
    slot_dir: Path
    """Its `--slot-save-path`."""
    api_key: str | None = field(default=None, repr=False)
    silence_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is spread over the devices."""

    model: str | None
    """A directory, a hub id or a GGUF file; None: the demo model, if it is installed."""
    alias: str | None
    """The name that `/v1/models` shows."""
    chat_template_file: Path | None
    devices: tuple[str, ...]
    """One per stage; empty: chosen when the model is loaded."""
    layer_split: tuple[int, ...]
    """First layer of each stage but the first; empty: split by the sizes of the layers."""
    context_tokens: int | None
    """Context length; None: the largest that fits, up to the model's limit."""
    batch_tokens: int | None
    """Tokens per prefill chunk; None: by the kind of devices."""
    ctx_checkpoints: int = 8
    """Copies of the fixed state on the devices, for models that have it."""
    kv_format: str | None = None
    """Type of the stored keys and values, a name in `arenas.kv_format`; None: the type they are computed in."""
    draft_tokens: int | None = None
    """Tokens that a draft head guesses per step; None: the engine's default, 0: none."""
    control_vectors: tuple[ControlVectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer; None: all but the first."""
    upstream: UpstreamConfig | None = None
    """If set, this llama-server serves the model, and nothing is loaded here."""
    threads: int | None = None
    """Threads that compute on CPUs; None: the library's own choice."""
    engine: str = "auto"
    llama: LlamaSettings = field(default_factory=LlamaSettings)


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """Limits of parked conversations on disk."""

    budget_bytes: int
    """0: in memory only."""
    directory: Path | None
    """Where they survive a restart; None: files without names, lost when the process ends."""
    write_bytes_per_day: int
    max_age_s: float | None
    """Conversations not used for this long are forgotten; None: never."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Limits of parked conversations."""

    budget_bytes: int | Literal["auto"]
    """0 turns parking off."""
    slots: int | None
    """Most conversations; None: as many as the budget holds."""
    answer_bytes: int
    """Memory for the tokens of generated answers; 0: every answer that comes back is rendered."""
    memo_bytes: int = 64 * 1024 * 1024
    """Memory for tokens and hashes of texts seen before; 0: each prompt is tokenised from its start."""
    disk: DiskCacheConfig = DiskCacheConfig(0, None, 0, None)
    eviction_policy: str = "value"
    """One of EVICTION_POLICIES."""
    min_free_bytes: int | None = None
    """Memory of the machine that parking leaves free; None: by the machine's size."""
    record: Path | None = None
    """File for a trace of the turns; None: no trace."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, and who may use it."""

    host: str
    port: int
    """0: any free port."""
    api_keys: tuple[str, ...]
    """Keys without names. Each has its own conversations."""
    operator_keys: tuple[str, ...]
    """Keys that may also see what all keys do together."""
    api_key_file: Path | None
    """File of named keys and their namespaces. If there are no keys at all, clients need none."""
    max_queue: int
    max_queue_bytes: int
    max_output_tokens: int | None
    """The most tokens of an answer; None: up to the end of the context."""
    cors_origins: tuple[str, ...]
    """Origins of web pages that may call this server; empty: only those of this machine."""
    keeps_billing_header: bool
    """Whether the billing header of agents, which changes with each request, stays in the prompt."""
    rewrite_rules_file: Path | None = None
    """File of rules for replacing text in prompts; None: no rules."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig
    cache: CacheConfig
    server: ServerConfig
    home: Path
    """Where converted weights are kept."""
    notes: tuple[str, ...] = ()
    """Warnings for the user, printed at start."""
