"""The settings after parsing: one small frozen configuration for each component."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from parkd.config.llama_settings import LoraAdapter
from parkd.config.parsers import MIB
from parkd.config.settings import default_of
from parkd.state import EngineConfig, VectorFile
from parkd.types import NamedKey, TurnClass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """For another server, in seconds. Each limits the time for a whole answer, except `silence_s`, which limits pauses
    within one."""

    connect_s: float = 5.0
    answer_s: float = 60.0
    """Templates, tokens, properties and the state of slots."""
    file_s: float = 300.0
    """Saving and restoring a slot, which depends on the server's disk."""
    silence_s: float = float(default_of("upstream-timeout"))
    """Time between two events of a completion, at least that for reading one batch of a prompt."""


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """A llama-server that is already running, and how to connect to it."""

    url: str
    """`http://host:port`"""
    slot_dir: Path
    """The server's `--slot-save-path`, as a path for this process."""
    cache_dir: Path
    """Directory for the digests of weight files."""
    api_key: str | None = field(default=None, repr=False)
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A server with an OpenAI-style API that is already running, and how to ask it."""

    url: str
    """`http://host:port`, without `/v1`."""
    model: str | None = None
    """Its name for the model; None: the only one."""
    tokenizer: str | None = None
    """A directory or hub id with the model's tokenizer and chat template; `none`: none is to be used; None: that of the
    server's own directory, if it is on this machine."""
    chat_template_file: Path | None = None
    """In place of that template."""
    context_tokens: int | None = None
    """None: as the server says."""
    turns: int = default_of("upstream-turns")
    """Most at once."""
    api_key: str | None = field(default=None, repr=False)
    deadlines: Deadlines = field(default_factory=Deadlines)
    events: str | None = None
    """Where the server publishes what it keeps of prompts (`tcp://host:port`); None: it is not listened to."""
    events_replay: str | None = None
    """Where it repeats that; None: it does not."""


_LIBRARY_TYPES = {None: "f16", "int8": "q8_0"}
"""Its default, and its name for int8."""


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """How llama.cpp loads a model."""

    gpu_layers: int | None = None
    """None: all layers that the library can offload."""
    split_mode: str = default_of("split-mode")
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = default_of("main-gpu")
    cpu_moe: bool = default_of("cpu-moe")
    """The experts of all layers are in the memory of the host."""
    n_cpu_moe: int = default_of("n-cpu-moe")
    """Those of the first layers."""
    library: Path | None = None
    """The library, or its folder; None: the bindings' own, or one that is found."""
    flash_attn: str = default_of("flash-attn")
    loras: tuple[LoraAdapter, ...] = ()
    embeddings: bool = default_of("embeddings")
    """Texts are embedded too, or documents ranked if `pooling` is `rank`."""
    pooling: str | None = None
    """None: as the model's file says."""
    cache_type_k: str | None = None
    """llama-server's name, or `int8`; None: the library's default."""
    cache_type_v: str | None = None
    given: tuple[str, ...] = ()
    """The settings that only llama.cpp has and that were changed."""

    @property
    def cache_types(self) -> tuple[str, str]:
        """The library's names for the types of keys and values."""
        key, value = (_LIBRARY_TYPES.get(each, each or "") for each in (self.cache_type_k, self.cache_type_v))
        return key, value


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is spread over the devices."""

    model: str | None
    """A directory, a hub id, a GGUF file or `random:NAME`; None: the demo model, if it is installed."""
    cache_dir: Path
    """Directory for converted weights and the digests of weight files."""
    name: str | None = None
    """The model's name; None: the name in its files."""
    is_demo_model: bool = False
    chat_template_file: Path | None = None
    layout: EngineConfig = field(default_factory=lambda: EngineConfig(devices=()))
    """How it is laid out on the devices."""
    control_vectors: tuple[VectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer, both included; None: all but the first."""
    upstream: UpstreamConfig | None = None
    """If set, this llama-server serves the model, and nothing is loaded here."""
    remote: RemoteConfig | None = None
    """If set, this server does."""
    threads: int | None = None
    """Threads that compute on CPUs; None: the library's own choice."""
    engine: str = default_of("engine")
    llama: LlamaSettings = field(default_factory=LlamaSettings)

    @property
    def is_elsewhere(self) -> bool:
        """Another server serves the model."""
        return self.upstream is not None or self.remote is not None


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
    memo_bytes: int
    """Memory for tokens and hashes of texts seen before; 0: each prompt is tokenised from its start."""
    disk: DiskCacheConfig
    eviction_policy: str
    """One of EVICTION_POLICIES."""
    min_free_bytes: int | None
    """Memory of the machine that parking leaves free; None: by the machine's size."""
    record: Path | None
    """File for a trace of the turns; None: no trace."""
    ledger: Path | None = None
    """File of what turns cost; None: none."""


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Limits, deadlines and access rules of the HTTP side, and where it finds them."""

    host: str = default_of("host")
    """The address to listen on. If it is a loopback address, the Host of requests must be a loopback name."""
    port: int = default_of("port")
    """0: any free port."""
    max_queue: int = default_of("max-queue")
    """Requests that may wait for the lane, not counting the running one."""
    schedule: str = default_of("schedule")
    read_share: float = default_of("read-share")
    """Of the time, for prompts where answers are under way too."""
    """The name of the order in which turns run."""
    classes: tuple[tuple[str, TurnClass], ...] = ()
    """Patterns of names of keys, and the class of their requests; the first that fits counts."""
    max_output_tokens: int | None = None
    """The most tokens of an answer; None: up to the end of the context."""
    api_keys: tuple[str, ...] = ()
    """Keys that each have their own namespace. If there are neither these nor named keys, clients need none."""
    api_key_file: Path | None = None
    """File of the named keys and their namespaces."""
    named_keys: tuple[NamedKey, ...] = ()
    """Those in `api_key_file`, once it is read."""
    operator_keys: tuple[str, ...] = ()
    """Keys that may also see what all keys do together. If there are any keys at all, only these may."""
    tells_progress: bool = False
    """Whether streams of the Responses API tell how far a prompt is read, as reasoning summaries."""
    has_page: bool = True
    """Whether `/` is a page for browsers."""
    watts: float | None = None
    """What the machine takes while it reads, for the bill; None: not known."""
    kwh_price: float | None = None
    shows_text: bool = False
    """Whether what is told about conversations and turns may contain words of their prompts."""
    body_limit_bytes: int = 64 * MIB
    bodies_limit_bytes: int = default_of("max-queue-mib") * MIB
    """Limit for all bodies together that are being read, wait or run. Each body also has its own limit."""
    body_silence_s: float = 60.0
    """A request fails if no part of its body arrives for this long, which frees the memory charged for it."""
    idle_connection_s: int = 75
    """A connection without a complete request header is closed after this long. Longer than clients keep idle
    connections, so that a client does not send a request just as the server closes."""
    first_byte_deadline_s: float = 10.0
    """Headers of a streamed answer are sent after this long at the latest, with `pending` if the start of the turn is
    not known yet."""
    keep_alive_s: float = 10.0
    """The longest silence on a stream; then a keep-alive is sent."""
    resend_grace_s: float = 0.0
    """A turn whose client has disconnected waits this long for the same request to be sent again; 0: the turn is given
    up at once."""
    shutdown_deadline_s: float = 20.0
    """The time that the running answer has to end after a stop is requested; then it is cut."""
    alias: str | None = None
    """The name that `/v1/models` shows; None: the model's own."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server, besides loopback ones and its own host."""
    keeps_billing_header: bool = False
    """Whether the billing header of agents, which changes with each request, stays in the prompt."""
    rewrite_rules_file: Path | None = None
    """File of rules for replacing text in prompts; None: no rules."""

    @property
    def owners(self) -> int:
        """How many keys there are."""
        return len(self.api_keys) + len(self.named_keys) + len(self.operator_keys)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig
    cache: CacheConfig
    server: ProxyConfig
    home: Path
    """Where converted weights are kept."""
    notes: tuple[str, ...]
    """Warnings for the user, printed at start."""
