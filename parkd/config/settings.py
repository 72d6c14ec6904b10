"""The table of all settings: one entry makes a flag, a variable and a TOML key of one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parkd.config import parsers
from parkd.config.llama_settings import (
    cache_type,
    engine_name,
    flash_attn,
    library,
    loras,
    pooling,
    scaled_loras,
    shares,
    split_mode,
)
from parkd.config.model_settings import (
    cpu_experts,
    guesses,
    kv_format,
    layer_range,
    parallel,
    scaled_vectors,
    vectors,
    weights_kind,
)
from parkd.state.engine_config import CARD_BATCH, CPU_BATCH, CTX_CHECKPOINTS

ENV_PREFIX = "PARKD_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing a user may choose: a flag, a variable and a TOML key of one name."""

    name: str
    """The flag without its leading dashes."""
    group: str
    metavar: str
    """Empty for a switch."""
    parse: Callable[[str], Any]
    """Text to value; raises ValueError saying what is expected."""
    default: Any
    """The only place where the default is written. `default_of` is for those who need it elsewhere."""
    text: str
    """What the help says; `{}` stands for the default."""
    many: bool = False
    """The flag may be given several times."""
    words: int = 1
    """How many words the flag takes on the command line; elsewhere they are one text."""
    short: tuple[str, ...] = ()
    """Short names on the command line, as in llama.cpp."""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")

    @property
    def help(self) -> str:
        return self.text.replace("{}", str(self.default))


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "model",
        "model",
        "PATH|ID",
        parsers.some_text,
        None,
        "Hugging Face directory, GGUF file, or name on the hub: owner/name[:Q4_K_M] (demo model)",
        short=("-m", "-hf", "-hfr", "--hf-repo"),
    ),
    Setting(
        "engine", "model", "NAME", engine_name, "auto", "torch, llama.cpp, llama-server, remote (auto: by the model)"
    ),
    Setting(
        "alias", "model", "NAME", parsers.some_text, None, "name shown by /v1/models (the model's own)", short=("-a",)
    ),
    Setting("chat-template-file", "model", "FILE", parsers.file, None, "chat template in place of the model's own"),
    Setting(
        "devices",
        "model",
        "LIST",
        parsers.devices,
        (),
        "one device per stage: cpu,cpu or cuda:0,cuda:1; mps on Apple (cuda:0, else cpu)",
    ),
    Setting(
        "layer-split", "model", "LIST", parsers.layer_split, (), "first layer of each later stage: 24 or 24,36 (auto)"
    ),
    Setting(
        "cpu-experts",
        "model",
        "N|auto",
        cpu_experts,
        0,
        "layers whose experts stay in main memory; auto: as few as let the rest fit the cards ({})",
    ),
    Setting(
        "ctx-size",
        "model",
        "TOKENS",
        parsers.context,
        None,
        "context (0: the largest that fits, up to the model's)",
        short=("-c",),
    ),
    Setting(
        "parallel",
        "model",
        "N|auto",
        parallel,
        1,
        "conversations live at once, others are parked; auto: as many as fit, up to 4 ({})",
        short=("-np",),
    ),
    Setting(
        "batch-size",
        "model",
        "TOKENS|auto",
        parsers.batch,
        None,
        f"tokens read per chunk (auto: {CPU_BATCH} on CPUs, else {CARD_BATCH})",
        short=("-b",),
    ),
    Setting(
        "threads",
        "model",
        "N",
        parsers.count(1, 1024),
        None,
        "threads that compute on CPUs (as many as there are cores)",
        short=("-t",),
    ),
    Setting(
        "weights",
        "model",
        "KIND",
        weights_kind,
        None,
        "convert weights in full precision: int4, int8, fp8 (auto: as they are)",
    ),
    Setting(
        "ctx-checkpoints",
        "model",
        "N",
        parsers.count(1, 1024),
        CTX_CHECKPOINTS,
        "copies of the fixed state to go back to, for models that have it ({})",
    ),
    Setting("kv-cache-dtype", "model", "TYPE", kv_format, None, "type of keys and values: f32, f16, bf16, int8 (auto)"),
    Setting(
        "cache-type-k",
        "model",
        "TYPE",
        cache_type,
        None,
        "the same for keys, as in llama.cpp; torch: q8_0 is int8",
        short=("-ctk",),
    ),
    Setting(
        "cache-type-v",
        "model",
        "TYPE",
        cache_type,
        None,
        "the same for values; torch: must be that of the keys",
        short=("-ctv",),
    ),
    Setting(
        "gpu-layers",
        "llama.cpp",
        "N",
        parsers.count(0),
        None,
        "layers on the cards (all)",
        short=("-ngl",),
    ),
    Setting(
        "split-mode",
        "llama.cpp",
        "MODE",
        split_mode,
        "layer",
        "how to use several cards: none, layer, row ({})",
        short=("-sm",),
    ),
    Setting(
        "tensor-split",
        "llama.cpp",
        "LIST",
        shares,
        (),
        "share of each card, such as 3,1 (by free memory)",
        short=("-ts",),
    ),
    Setting(
        "main-gpu",
        "llama.cpp",
        "N",
        parsers.count(0),
        0,
        "the card for --split-mode none or row ({})",
        short=("-mg",),
    ),
    Setting(
        "cpu-moe",
        "llama.cpp",
        "",
        parsers.switch,
        False,
        "keep the experts of all layers off the cards",
        short=("-cmoe",),
    ),
    Setting(
        "n-cpu-moe",
        "llama.cpp",
        "N",
        parsers.count(0, 9999),
        0,
        "the same for the first N layers ({})",
        short=("-ncmoe",),
    ),
    Setting("llama-lib", "llama.cpp", "PATH", library, None, "libllama, or its folder (the installed one, or found)"),
    Setting("flash-attn", "llama.cpp", "HOW", flash_attn, "auto", "on, off or auto ({})", short=("-fa",)),
    Setting("lora", "llama.cpp", "FILE", loras, (), "adapter, at scale 1; may be repeated", True),
    Setting(
        "embeddings",
        "llama.cpp",
        "",
        parsers.switch,
        False,
        "also embed texts, for models made for it: /v1/embeddings",
        short=("--embedding",),
    ),
    Setting("pooling", "llama.cpp", "HOW", pooling, None, "how tokens are pooled: mean, cls, last (the file says)"),
    Setting(
        "reranking",
        "llama.cpp",
        "",
        parsers.switch,
        False,
        "rank documents, for models made for it: /v1/rerank",
        short=("--rerank",),
    ),
    Setting("lora-scaled", "llama.cpp", "FILE:SCALE", scaled_loras, (), "the same with its scale", True),
    Setting(
        "draft-tokens", "model", "N", guesses, None, "tokens that the model's draft head guesses per step (auto: none)"
    ),
    Setting("draft-max", "model", "N", guesses, None, "the same, as in llama.cpp"),
    Setting("control-vector", "model", "[NAME=]FILE", vectors, (), "control vector, at scale 1; may be repeated", True),
    Setting(
        "control-vector-scaled",
        "model",
        "[NAME=]FILE:SCALE",
        scaled_vectors,
        (),
        "the same with its default scale; 0: only for requests that name it",
        True,
    ),
    Setting(
        "control-vector-layer-range",
        "model",
        "START END",
        layer_range,
        None,
        "layers that control vectors steer, both included (all but the first)",
        words=2,
    ),
    Setting(
        "upstream",
        "upstream",
        "URL",
        parsers.url,
        None,
        "serve the model of another server: llama-server, vLLM, SGLang, LM Studio, oMLX, Ollama, TGI, a hosted API",
    ),
    Setting("slot-save-path", "upstream", "DIR", parsers.directory, None, "a llama-server's --slot-save-path"),
    Setting("upstream-model", "upstream", "NAME", parsers.some_text, None, "its name for the model (the only one)"),
    Setting("upstream-api-key", "upstream", "KEY", parsers.some_text, None, "its API key"),
    Setting(
        "tokenizer",
        "upstream",
        "DIR|ID|none",
        parsers.some_text,
        None,
        "directory or hub name with its model's tokenizer; none: characters (its own directory, if that is here)",
    ),
    Setting(
        "upstream-events",
        "upstream",
        "ADDRESS",
        parsers.some_text,
        None,
        "tcp://HOST:PORT where it publishes its KV events (vLLM, SGLang); needs the extra kv-events",
    ),
    Setting(
        "upstream-events-replay",
        "upstream",
        "ADDRESS",
        parsers.some_text,
        None,
        "tcp://HOST:PORT where it repeats them",
    ),
    Setting("upstream-turns", "upstream", "N", parsers.count(1, 1024), 64, "turns it is given at once ({})"),
    Setting(
        "upstream-timeout",
        "upstream",
        "SECONDS",
        parsers.count(1),
        600,
        "longest silence inside its answers, such as while it reads a prompt ({})",
    ),
    Setting(
        "conversation-cache-mib",
        "parking",
        "MIB|auto",
        parsers.mib_or_auto,
        "auto",
        "memory for parked conversations; 0: no parking (auto: a quarter of the free memory)",
    ),
    Setting(
        "conversation-cache-slots",
        "parking",
        "N",
        parsers.count(1),
        None,
        "most conversations parked at a time (no limit)",
    ),
    Setting(
        "replay",
        "parking",
        "HOW",
        parsers.replay,
        "remember",
        "earlier answers: remember their tokens, or strict: render them ({})",
    ),
    Setting(
        "prompt-memory-mib",
        "parking",
        "MIB",
        parsers.count(0),
        64,
        "memory for the tokens of texts seen before ({})",
    ),
    Setting("answer-memory-mib", "parking", "MIB", parsers.count(0), 32, "memory for the tokens of answers ({})"),
    Setting(
        "conversation-cache-disk-mib",
        "parking",
        "MIB",
        parsers.count(0),
        0,
        "disk for parked conversations (0: memory only)",
    ),
    Setting(
        "park-dir",
        "parking",
        "DIR",
        parsers.some_text,
        None,
        "directory for them, to survive a restart (none: lost when parkd stops)",
    ),
    Setting(
        "disk-write-gib-per-day",
        "parking",
        "GIB",
        parsers.count(1),
        200,
        "most that is written to disk per day ({})",
    ),
    Setting(
        "conversation-cache-max-age-hours",
        "parking",
        "HOURS",
        parsers.count(1),
        None,
        "forget conversations not used for this long (never)",
    ),
    Setting(
        "eviction-policy",
        "parking",
        "NAME",
        parsers.eviction_policy,
        "value",
        "what is evicted first: value, gdsf, lru ({})",
    ),
    Setting(
        "conversation-cache-min-free-mib",
        "parking",
        "MIB",
        parsers.mib,
        None,
        "memory that parking leaves free (a sixteenth of the machine's, at most 2560)",
    ),
    Setting(
        "record",
        "parking",
        "FILE",
        parsers.some_text,
        None,
        "write a trace of the turns, without text, for parkd replay",
    ),
    Setting(
        "ledger",
        "parking",
        "PATH|off",
        parsers.some_text,
        None,
        "file of what turns cost, for parkd bill (in --park-dir, else in the user's state directory)",
    ),
    Setting("watts", "parking", "W", parsers.amount, None, "what the machine takes while it reads, for kWh"),
    Setting("kwh-price", "parking", "PRICE", parsers.amount, None, "price of a kWh, for money in the bill"),
    Setting("host", "server", "ADDRESS", parsers.some_text, "127.0.0.1", "address to listen on ({})"),
    Setting("port", "server", "PORT", parsers.count(0, 65535), 8080, "port to listen on, 0 for any free one ({})"),
    Setting(
        "api-key",
        "server",
        "KEY",
        parsers.keys,
        (),
        "a key that clients may send; may be repeated (no key needed)",
        True,
    ),
    Setting(
        "api-key-file",
        "server",
        "FILE",
        parsers.file,
        None,
        "lines name:key:namespace; a namespace shares parked conversations",
    ),
    Setting(
        "operator-key",
        "server",
        "KEY",
        parsers.keys,
        (),
        "a key that may also see what all keys do, as /metrics tells; may be repeated",
        True,
    ),
    Setting("insecure", "server", "", parsers.switch, False, "allow an address others can reach without an API key"),
    Setting(
        "cors-origin",
        "server",
        "ORIGIN",
        parsers.origins,
        (),
        "origin of a web page that may call; may be repeated (none)",
        True,
    ),
    Setting(
        "progress-summaries",
        "server",
        "",
        parsers.switch,
        False,
        "tell Responses clients how far a prompt is read, as reasoning summaries",
    ),
    Setting("no-ui", "server", "", parsers.switch, False, "serve no page at /", short=("--no-webui",)),
    Setting("page-text", "server", "", parsers.switch, False, "show words of prompts on the page (none)"),
    Setting(
        "keep-billing-header",
        "server",
        "",
        parsers.switch,
        False,
        "leave the billing header of agents in prompts",
    ),
    Setting("rewrite-rules", "server", "FILE", parsers.file, None, "TOML of regex rules applied to prompts (none)"),
    Setting("max-queue", "server", "N", parsers.count(1, 100_000), 64, "requests that may wait before a 503 ({})"),
    Setting("schedule", "server", "NAME", parsers.schedule, "fair", "who runs next: fair, or fifo ({})"),
    Setting(
        "read-share",
        "server",
        "SHARE",
        parsers.share,
        0.5,
        "the share of the time that prompts are read in while others are answered ({})",
    ),
    Setting(
        "class",
        "server",
        "KEY=CLASS",
        parsers.key_class,
        (),
        "requests of keys with this name, or pattern of names, are interactive, side or batch; may be repeated",
        many=True,
    ),
    Setting("max-queue-mib", "server", "MIB", parsers.count(1), 256, "memory for their bodies before a 503 ({})"),
    Setting(
        "max-output-tokens", "server", "TOKENS", parsers.count(1), None, "longest answer (up to the end of the context)"
    ),
)
_DEFAULTS = {setting.name: setting.default for setting in SETTINGS}


def default_of(name: str) -> Any:
    """The default of the setting `name`, in the unit of the setting."""
    return _DEFAULTS[name]
