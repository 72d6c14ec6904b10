"""Reads all sources of settings and checks that the settings agree. The only module that reads the environment."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parkd.config.llama_settings import FLAGS
from parkd.config.model_settings import control_vectors, draft_tokens, one_kv_format
from parkd.config.parsers import MIB
from parkd.config.settings import ENV_PREFIX, SETTINGS, Setting, default_of
from parkd.config.toml_files import read_toml
from parkd.config.values import (
    CacheConfig,
    Config,
    Deadlines,
    DiskCacheConfig,
    LlamaSettings,
    ModelConfig,
    ProxyConfig,
    RemoteConfig,
    UpstreamConfig,
)
from parkd.errors import ConfigError
from parkd.state import EngineConfig

URL_VARIABLE = ENV_PREFIX + "URL"
"""Where commands find a running server."""
LEDGER_NAME = "ledger.sqlite3"
_SECRET = ("api-key", "operator-key", "upstream-api-key")
"""Settings whose texts no message repeats."""
UPSTREAM_PARK_DIR = "parkd"
"""Default park directory for a llama-server, inside its slot directory."""


def load(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Config:
    """Reads all sources and checks that the settings agree. `flags` maps setting names, and `config`, to the text that
    was typed.

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
            if not text.strip().isprintable():
                raise ValueError("it has a control character, such as a line's end")
            values[name] = by_name[name].parse(text.strip())
        except ValueError as error:
            shown = "" if name in _SECRET else f" {text!r}"
            raise ConfigError(f"{where}{shown}: {error}") from None
    _check_together(values, {name for name, _, _ in texts})
    return _assemble(values, environ, _unknown_variables(environ))


def server_address(environ: Mapping[str, str] = os.environ) -> tuple[str, str | None]:
    """The URL and the key with which commands ask a running server: PARKD_URL, else the port that PARKD_PORT names
    here; the first key of PARKD_API_KEY."""
    port = environ.get(ENV_PREFIX + "PORT", "")
    url = environ.get(URL_VARIABLE) or f"http://127.0.0.1:{port if port.isdecimal() else default_of('port')}"
    return url, environ.get(ENV_PREFIX + "API_KEY", "").partition(",")[0].strip() or None


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """`; did you mean X?`, or nothing if no known name is similar."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _read_toml(path: Path, by_name: Mapping[str, Setting]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in read_toml(path, f"--config {path}").items():
        name = key.replace("_", "-")
        if name not in by_name:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, by_name)}")
        if name in texts:
            raise ConfigError(f"{path}: {name} is there twice, with - and with _: leave one of them out")
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{path}: {key} must be a text, a number, true or false, or a list of such")
        if by_name[name].metavar and any(isinstance(item, bool) for item in items):
            raise ConfigError(f"{path}: {key} must be {by_name[name].metavar}, and no true or false")
        texts[name] = ",".join(str(item) for item in items)
    return texts


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {setting.variable: setting for setting in SETTINGS} | {ENV_PREFIX + "CONFIG": None, URL_VARIABLE: None}
    strange = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    return tuple(f"the environment variable {name} is not a setting of parkd{nearest(name, known)}" for name in strange)


def _check_together(values: Mapping[str, Any], named: Set[str]) -> None:
    """`named`: settings to which any source gives a value, be it the default."""
    _check_disk(values)
    _check_upstream(values, named)
    if values["kwh-price"] is not None and values["watts"] is None:
        raise ConfigError("--kwh-price needs --watts: what the machine takes while it reads")
    if values["reranking"] and (values["embeddings"] or values["pooling"] not in (None, "rank")):
        raise ConfigError("--reranking pools by rank and embeds nothing else: leave out --embeddings and --pooling")
    if values["pooling"] is not None and not (values["embeddings"] or values["reranking"]):
        raise ConfigError(f"--pooling {values['pooling']} is for --embeddings: add it")
    devices, split = values["devices"], values["layer-split"]
    if split and len(split) + 1 != len(devices):
        raise ConfigError(
            f"--layer-split names the first layer of {len(split)} later stage(s), so --devices must name "
            f"{len(split) + 1} devices; it names {len(devices) or 'none'}"
        )
    has_keys = any(values[name] for name in ("api-key", "operator-key", "api-key-file"))
    if not (_is_loopback(values["host"]) or has_keys or values["insecure"]):
        raise ConfigError(
            f"--host {values['host']} can be reached from other machines and no key is set: set PARKD_API_KEY, "
            "or give --insecure if everyone who can reach it may use it"
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


def _engine_of(values: Mapping[str, Any]) -> str:
    """`llama-server` or `remote` if another server serves the model; else the value of --engine."""
    engine: str = values["engine"]
    if engine == "auto" and values["slot-save-path"] is not None:
        return "llama-server"
    return "remote" if engine == "auto" and values["upstream"] is not None else engine


def _check_upstream(values: Mapping[str, Any], named: Set[str]) -> None:
    engine = _engine_of(values)
    wanted = {"llama-server": ("upstream", "slot-save-path"), "remote": ("upstream",)}.get(engine, ())
    for setting in SETTINGS:
        name = setting.name
        if setting.group == "upstream" and values[name] != setting.default and name not in _TAKEN.get(engine, ()):
            engines = " or ".join(f"--engine {each}" for each, names in _TAKEN.items() if name in names)
            use = f"name the server with --upstream, or leave out --{name}"
            if values["engine"] != "auto":
                use = f"leave out --{name} or --engine {values['engine']}"
            raise ConfigError(f"--{name} is for {engines}: {use}")
    for name in wanted:
        if values[name] is None:
            raise ConfigError(f"--engine {engine} needs --{name}: {_WHAT[name]}")
    if not wanted:
        return
    for setting in SETTINGS:
        of_the_model = setting.group in ("model", "llama.cpp") and setting.name not in _OF_ANY.get(engine, ())
        if of_the_model and setting.name in named:
            raise ConfigError(
                f"--{setting.name} is for a model that parkd loads itself: give it to the "
                f"{'llama-server' if engine == 'llama-server' else 'server at --upstream'} instead"
            )
    if values["upstream-events-replay"] is not None and values["upstream-events"] is None:
        raise ConfigError("--upstream-events-replay repeats what --upstream-events tells: name both")
    if engine == "remote":
        for name in ("conversation-cache-mib", "conversation-cache-disk-mib", "park-dir"):
            if values[name] != default_of(name) and values[name]:
                raise ConfigError(
                    f"--{name} is for parked conversations, and the server at --upstream keeps its own: leave it out"
                )
    elif not values["conversation-cache-disk-mib"] and values["conversation-cache-mib"] != 0:
        raise ConfigError(
            "--engine llama-server parks in files: --conversation-cache-disk-mib must limit their size (or "
            "--conversation-cache-mib 0: no parking)"
        )


_WHAT = {"upstream": "the address of the server", "slot-save-path": "its slot directory"}
_TAKEN = {
    "llama-server": ("upstream", "slot-save-path", "upstream-api-key", "upstream-timeout"),
    "remote": (
        "upstream",
        "upstream-model",
        "upstream-api-key",
        "upstream-timeout",
        "upstream-turns",
        "tokenizer",
        "upstream-events",
        "upstream-events-replay",
    ),
}
"""The settings of another server that each engine takes."""
_OF_ANY = {"llama-server": ("engine", "alias"), "remote": ("engine", "alias", "ctx-size", "chat-template-file")}
"""The settings of a model that it takes."""


def _upstream(values: Mapping[str, Any], home: Path) -> UpstreamConfig | None:
    if _engine_of(values) != "llama-server":
        return None
    return UpstreamConfig(
        values["upstream"],
        values["slot-save-path"],
        home,
        values["upstream-api-key"],
        Deadlines(silence_s=float(values["upstream-timeout"])),
    )


def _remote(values: Mapping[str, Any]) -> RemoteConfig | None:
    if _engine_of(values) != "remote":
        return None
    return RemoteConfig(
        values["upstream"],
        values["upstream-model"],
        values["tokenizer"],
        values["chat-template-file"],
        values["ctx-size"],
        values["upstream-turns"],
        values["upstream-api-key"],
        Deadlines(silence_s=float(values["upstream-timeout"])),
        values["upstream-events"],
        values["upstream-events-replay"],
    )


def _llama(values: Mapping[str, Any]) -> LlamaSettings:
    changed = {setting.name for setting in SETTINGS if values[setting.name] != setting.default}
    return LlamaSettings(
        gpu_layers=values["gpu-layers"],
        split_mode=values["split-mode"],
        tensor_split=values["tensor-split"],
        main_gpu=values["main-gpu"],
        cpu_moe=values["cpu-moe"],
        n_cpu_moe=values["n-cpu-moe"],
        library=values["llama-lib"],
        flash_attn=values["flash-attn"],
        loras=(*values["lora"], *values["lora-scaled"]),
        embeddings=values["embeddings"] or values["reranking"],
        pooling="rank" if values["reranking"] else values["pooling"],
        cache_type_k=values["cache-type-k"],
        cache_type_v=values["cache-type-v"],
        given=tuple(name for name in FLAGS if name in changed),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _disk(values: Mapping[str, Any]) -> DiskCacheConfig:
    directory, hours = values["park-dir"], values["conversation-cache-max-age-hours"]
    budget_mib = values["conversation-cache-disk-mib"]
    if directory is None and _engine_of(values) == "llama-server" and budget_mib:
        # Slot files are renamed into the park directory, so it must exist, on the server's file system.
        directory = str(Path(values["slot-save-path"]) / UPSTREAM_PARK_DIR)
    return DiskCacheConfig(
        budget_bytes=budget_mib * MIB,
        directory=None if directory is None else Path(directory).expanduser(),
        write_bytes_per_day=values["disk-write-gib-per-day"] * 1024 * MIB,
        max_age_s=None if hours is None else hours * 3600.0,
    )


def _ledger(values: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    if values["ledger"] is not None:
        return None if values["ledger"] == "off" else Path(values["ledger"]).expanduser()
    if values["park-dir"] is not None:
        return Path(values["park-dir"]).expanduser() / LEDGER_NAME
    state = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "parkd"
    return state / f"{values['port']}-{LEDGER_NAME}"


def _assemble(values: Mapping[str, Any], environ: Mapping[str, str], notes: tuple[str, ...]) -> Config:
    llama = _llama(values)
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parkd"
    return Config(
        model=ModelConfig(
            model=values["model"],
            cache_dir=home,
            chat_template_file=values["chat-template-file"],
            layout=EngineConfig(
                devices=values["devices"],
                layer_split=values["layer-split"] or None,
                context_tokens=values["ctx-size"],
                seats=values["parallel"],
                cpu_experts=values["cpu-experts"],
                batch_tokens=values["batch-size"],
                kv_format=None if values["engine"] == "llama.cpp" or llama.given else one_kv_format(values),
                weights=values["weights"],
                ctx_checkpoints=values["ctx-checkpoints"],
                draft_tokens=draft_tokens(values),
            ),
            control_vectors=control_vectors(values),
            steered_layers=values["control-vector-layer-range"],
            upstream=_upstream(values, home),
            remote=_remote(values),
            threads=values["threads"],
            engine=values["engine"],
            llama=llama,
        ),
        cache=CacheConfig(
            0 if _engine_of(values) == "remote" else values["conversation-cache-mib"],
            values["conversation-cache-slots"],
            answer_bytes=0 if values["replay"] == "strict" else values["answer-memory-mib"] * MIB,
            memo_bytes=values["prompt-memory-mib"] * MIB,
            disk=_disk(values),
            eviction_policy=values["eviction-policy"],
            min_free_bytes=values["conversation-cache-min-free-mib"],
            record=None if values["record"] is None else Path(values["record"]).expanduser(),
            ledger=_ledger(values, environ),
        ),
        server=ProxyConfig(
            host=values["host"],
            port=values["port"],
            api_keys=values["api-key"],
            operator_keys=values["operator-key"],
            api_key_file=values["api-key-file"],
            max_queue=values["max-queue"],
            schedule=values["schedule"],
            read_share=values["read-share"],
            classes=tuple(values["class"]),
            bodies_limit_bytes=values["max-queue-mib"] * MIB,
            max_output_tokens=values["max-output-tokens"],
            alias=values["alias"],
            cors_origins=values["cors-origin"],
            tells_progress=values["progress-summaries"],
            has_page=not values["no-ui"],
            shows_text=values["page-text"],
            watts=values["watts"],
            kwh_price=values["kwh-price"],
            keeps_billing_header=values["keep-billing-header"],
            rewrite_rules_file=values["rewrite-rules"],
        ),
        home=home,
        notes=notes,
    )
