"""The settings: what a user may choose, where it is read from, and what is refused.

    flag  >  PARKD_* in the environment  >  the TOML file (--config)  >  default

All four go through the same parser, so a value means the same wherever it stands. This is the only module that reads
the environment. Whatever is wrong raises ConfigError, which names the place and says what to do.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from parkd.errors import ConfigError
from parkd.model_settings import (
    ControlVectorFile,
    control_vectors,
    kv_format,
    layer_range,
    one_kv_format,
    scaled_vectors,
    vectors,
)

MIB = 1024 * 1024
ENV_PREFIX = "PARKD_"
EVICTION_POLICIES = ("value", "gdsf", "lru")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


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
    batch_tokens: int
    """Tokens a prefill chunk."""
    ctx_checkpoints: int = 8
    """Copies of the fixed state kept on the devices, for models that have any."""
    kv_format: str | None = None
    """What keys and values are kept as, of `engine.kv_format`; None: as they are computed."""
    control_vectors: tuple[ControlVectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer; None: all but the first."""


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
    max_output_tokens: int | None
    """None: up to the context's end."""
    cors_origins: tuple[str, ...]
    """Web pages that may call this server; empty: none but those of this machine."""
    keeps_billing_header: bool
    """An agent's header that changes with every request stays in the prompt."""


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig
    cache: CacheConfig
    server: ServerConfig
    home: Path
    """Where converted weights are kept."""
    notes: tuple[str, ...] = ()
    """What the user should be told although it stops nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing a user may choose: a flag, a variable and a TOML key of one name."""

    name: str
    """As the flag, without its dashes in front."""
    group: str
    metavar: str
    """Empty for a switch."""
    parse: Callable[[str], Any]
    """Text to value; raises ValueError saying what is expected."""
    default: Any
    help: str
    many: bool = False
    """The flag may be given several times."""
    words: int = 1
    """That the flag takes on the command line; elsewhere they are one text."""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")


def _count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        expected = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else " up")
        if not re.fullmatch(r"\d{1,15}", text):
            raise ValueError(f"expected {expected}")
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"expected {expected}")
        return number

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("expected some text; leave it out instead")
    return text


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise ValueError("expected one key, or several with a comma between them; leave it out for none")
    return keys


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip().rstrip("/") for origin in text.split(","))
    if not all(re.fullmatch(r"https?://[^/\s]+", origin) for origin in origins):
        raise ValueError("expected an origin such as https://chat.example, or several with commas between")
    return origins


def _file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _devices(text: str) -> tuple[str, ...]:
    if text == "auto":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in names):
        raise ValueError("expected cpu or cuda:N, one for each stage with commas between, e.g. cuda:0,cuda:1")
    return names


def _layer_split(text: str) -> tuple[int, ...]:
    if text == "auto":
        return ()
    expected = "expected auto, or the first layer of each later stage in ascending order, e.g. 24 or 24,36"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
        raise ValueError(expected)
    firsts = tuple(int(part) for part in parts)
    if firsts[0] < 1 or any(left >= right for left, right in pairwise(firsts)):
        raise ValueError(expected)
    return firsts


def _mib_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return _count(0)(text) * MIB
    except ValueError:
        raise ValueError("expected a whole number of MiB, 0 for no parking, or auto") from None


def _replay(text: str) -> str:
    if text not in ("remember", "strict"):
        raise ValueError("expected remember or strict")
    return text


def _eviction_policy(text: str) -> str:
    if text not in EVICTION_POLICIES:
        raise ValueError(f"expected {', '.join(EVICTION_POLICIES)}")
    return text


def _mib(text: str) -> int:
    return _count(0)(text) * MIB


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("expected true or false")
    return text.lower() in _TRUE


SETTINGS: tuple[Setting, ...] = (
    Setting("model", "model", "PATH|ID", _text, None, "Hugging Face directory, hub id or GGUF file (demo model)"),
    Setting("alias", "model", "NAME", _text, None, "name shown by /v1/models (the model's own)"),
    Setting("chat-template-file", "model", "FILE", _file, None, "chat template in place of the model's own"),
    Setting("devices", "model", "LIST", _devices, (), "a device a stage: cpu,cpu or cuda:0,cuda:1 (cuda:0, else cpu)"),
    Setting("layer-split", "model", "LIST", _layer_split, (), "first layer of each later stage: 24 or 24,36 (auto)"),
    Setting("ctx-size", "model", "TOKENS", _count(16), None, "context (the largest that fits, up to the model's)"),
    Setting("batch-size", "model", "TOKENS", _count(1, 65536), 512, "tokens read in one prefill chunk (512)"),
    Setting("ctx-checkpoints", "model", "N", _count(1, 1024), 8, "rewind points kept by models with fixed state (8)"),
    Setting("kv-cache-dtype", "model", "TYPE", kv_format, None, "keys and values kept as f32, f16, bf16, int8 (auto)"),
    Setting("cache-type-k", "model", "TYPE", kv_format, None, "as llama.cpp has it, q8_0 for int8; needs its twin:"),
    Setting("cache-type-v", "model", "TYPE", kv_format, None, "of the same type as --cache-type-k"),
    Setting("control-vector", "model", "[NAME=]FILE", vectors, (), "control vector, at scale 1; may be repeated", True),
    Setting(
        "control-vector-scaled",
        "model",
        "[NAME=]FILE:SCALE",
        scaled_vectors,
        (),
        "the same with its default scale; 0: only requests that name it use it",
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
        "conversation-cache-mib",
        "parking",
        "MIB|auto",
        _mib_or_auto,
        "auto",
        "memory for parked conversations; 0: no parking (auto: a quarter of what is free)",
    ),
    Setting(
        "conversation-cache-slots", "parking", "N", _count(1), None, "most conversations parked (no bound but memory)"
    ),
    Setting(
        "replay", "parking", "HOW", _replay, "remember", "answers sent back: remember their tokens, or strict: render"
    ),
    Setting("answer-memory-mib", "parking", "MIB", _count(0), 32, "memory for the tokens of answers (32)"),
    Setting(
        "conversation-cache-disk-mib", "parking", "MIB", _count(0), 0, "disk for parked conversations (0: memory only)"
    ),
    Setting("park-dir", "parking", "DIR", _text, None, "where they survive a restart (nowhere: gone with the process)"),
    Setting("disk-write-gib-per-day", "parking", "GIB", _count(1), 200, "most written to disk in a day (200)"),
    Setting(
        "conversation-cache-max-age-hours", "parking", "HOURS", _count(1), None, "forget what was not used for so long"
    ),
    Setting("eviction-policy", "parking", "NAME", _eviction_policy, "value", "who goes when room is short (value)"),
    Setting(
        "conversation-cache-min-free-mib",
        "parking",
        "MIB",
        _mib,
        None,
        "memory that parking leaves free (a sixteenth of the machine's, at most 2560)",
    ),
    Setting("record", "parking", "FILE", _text, None, "write a trace of the turns, without text, for parkd replay"),
    Setting("host", "server", "ADDRESS", _text, "127.0.0.1", "address to listen on (127.0.0.1)"),
    Setting("port", "server", "PORT", _count(0, 65535), 8080, "port to listen on, 0 for any free one (8080)"),
    Setting(
        "api-key", "server", "KEY", _keys, (), "a key that clients may send; may be repeated (none asked for)", True
    ),
    Setting("api-key-file", "server", "FILE", _file, None, "lines name:key:namespace; one namespace shares a cache"),
    Setting("insecure", "server", "", _switch, False, "allow an address others can reach without an API key"),
    Setting("cors-origin", "server", "ORIGIN", _origins, (), "web page that may call; may be repeated (none)", True),
    Setting("keep-billing-header", "server", "", _switch, False, "leave agents' per-request billing header in prompts"),
    Setting("max-queue", "server", "N", _count(1, 100_000), 64, "requests that may wait before 503 (64)"),
    Setting("max-output-tokens", "server", "TOKENS", _count(1), None, "longest answer (to the context's end)"),
)


def load(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Config:
    """Reads every source and checks the whole. `flags` maps setting names, and `config`, to what was typed.

    Raises ConfigError.
    """
    by_name = {setting.name: setting for setting in SETTINGS}
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    file = flags.get("config") or environ.get(ENV_PREFIX + "CONFIG")
    texts: list[tuple[str, str, str]] = []  # (name, text, where it was read), weakest first
    if file:
        texts += [(name, text, f"{name} in {file}") for name, text in _read_toml(Path(file), by_name).items()]
    texts += [(s.name, environ[s.variable], s.variable) for s in SETTINGS if s.variable in environ]
    texts += [(name, text, f"--{name}") for name, text in flags.items() if name in by_name]
    for name, text, where in texts:
        try:
            values[name] = by_name[name].parse(text)
        except ValueError as error:
            shown = "" if name == "api-key" else f" {text!r}"
            raise ConfigError(f"{where}{shown}: {error}") from None
    _check_together(values)
    return _assemble(values, environ, _unknown_variables(environ))


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is near."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _read_toml(path: Path, by_name: Mapping[str, Setting]) -> dict[str, str]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    texts: dict[str, str] = {}
    for key, value in document.items():
        name = key.replace("_", "-")
        if name not in by_name:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, by_name)}")
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, str | int) for item in items):
            raise ConfigError(f"{path}: {key} must be a text, a whole number, true or false, or a list of such")
        texts[name] = ",".join(str(item) for item in items)
    return texts


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {setting.variable: setting for setting in SETTINGS} | {ENV_PREFIX + "CONFIG": None}
    strange = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    return tuple(f"{name} in the environment means nothing to parkd{nearest(name, known)}" for name in strange)


def _check_together(values: Mapping[str, Any]) -> None:
    _check_disk(values)
    devices, split = values["devices"], values["layer-split"]
    if split and len(split) + 1 != len(devices):
        raise ConfigError(
            f"--layer-split names the first layer of {len(split)} later stage(s), so --devices must name "
            f"{len(split) + 1} devices; it names {len(devices) or 'none'}"
        )
    if not (_is_loopback(values["host"]) or values["api-key"] or values["api-key-file"] or values["insecure"]):
        raise ConfigError(
            f"--host {values['host']} can be reached from other machines and no key is set: set PARKD_API_KEY, "
            "or say --insecure if everyone who can reach it may use it"
        )


def _check_disk(values: Mapping[str, Any]) -> None:
    disk_mib = values["conversation-cache-disk-mib"]
    if values["park-dir"] is not None and not disk_mib:
        raise ConfigError("--park-dir says where, --conversation-cache-disk-mib must say how much: name both")
    if disk_mib and values["conversation-cache-mib"] == 0:
        raise ConfigError(
            "--conversation-cache-disk-mib needs memory to read into: leave --conversation-cache-mib at auto, or "
            "give it more than 0"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _disk(values: Mapping[str, Any]) -> DiskCacheConfig:
    directory, hours = values["park-dir"], values["conversation-cache-max-age-hours"]
    return DiskCacheConfig(
        budget_bytes=values["conversation-cache-disk-mib"] * MIB,
        directory=None if directory is None else Path(directory).expanduser(),
        write_bytes_per_day=values["disk-write-gib-per-day"] * 1024 * MIB,
        max_age_s=None if hours is None else hours * 3600.0,
    )


def _assemble(values: Mapping[str, Any], environ: Mapping[str, str], notes: tuple[str, ...]) -> Config:
    cache_home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Config(
        model=ModelConfig(
            model=values["model"],
            alias=values["alias"],
            chat_template_file=values["chat-template-file"],
            devices=values["devices"],
            layer_split=values["layer-split"],
            context_tokens=values["ctx-size"],
            batch_tokens=values["batch-size"],
            ctx_checkpoints=values["ctx-checkpoints"],
            kv_format=one_kv_format(values),
            control_vectors=control_vectors(values),
            steered_layers=values["control-vector-layer-range"],
        ),
        cache=CacheConfig(
            values["conversation-cache-mib"],
            values["conversation-cache-slots"],
            answer_bytes=0 if values["replay"] == "strict" else values["answer-memory-mib"] * MIB,
            disk=_disk(values),
            eviction_policy=values["eviction-policy"],
            min_free_bytes=values["conversation-cache-min-free-mib"],
            record=None if values["record"] is None else Path(values["record"]).expanduser(),
        ),
        server=ServerConfig(
            host=values["host"],
            port=values["port"],
            api_keys=values["api-key"],
            api_key_file=values["api-key-file"],
            max_queue=values["max-queue"],
            max_output_tokens=values["max-output-tokens"],
            cors_origins=values["cors-origin"],
            keeps_billing_header=values["keep-billing-header"],
        ),
        home=Path(cache_home).expanduser() / "parkd",
        notes=notes,
    )
