"""Connects to a running llama-server: finds out what it serves and checks its flags, before the first request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from parkd.config import UpstreamConfig
from parkd.engine_adapter.base import EngineInfo
from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.llama_server.probe import SlotFacts, named, probe_slots, remove_leftovers
from parkd.engine_adapter.llama_server.text import first_tokens, special_tokens
from parkd.engine_adapter.llama_server.weights import ModelFacts, Progress, model_facts, weights_digest
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed
from parkd.state import Grain, StageLayout, StateLayout

LOAD_WAIT_S = 600.0
"""Longest wait for a server that is still loading its model."""
LOAD_POLL_S = 1.0
NO_CHECKPOINTS = "this llama-server's slot files hold no checkpoints"
CHECKSUM = "xxh3-64"
FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class Incarnation:
    """Identifies one run of a server with one model. Equal values mean the same run."""

    marker: str
    """Random for each process; empty if this server has no such marker."""
    model_path: str
    build: str
    slots: int
    context_tokens: int
    template_digest: bytes
    adapters: tuple[tuple[int, str, float], ...]
    """Id, path and scale."""


@dataclass(frozen=True)
class Upstream:
    """A server that was examined, and what was found."""

    client: UpstreamClient
    incarnation: Incarnation
    info: EngineInfo
    facts: SlotFacts
    template_source: str
    template_names: Mapping[str, str]
    """Variables of the template, such as `bos_token`, with their texts."""
    special_tokens: tuple[str, ...]
    first_text: str
    """Text that the server adds in front of every prompt."""
    notes: tuple[str, ...]
    """Shown to the operator at start."""


def connect(
    config: UpstreamConfig,
    progress: Progress | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Upstream:
    """Waits until the server has loaded its model, and examines it. Raises ModelError, whose message says with which
    flags to start it."""
    client = UpstreamClient(config.url, api_key=config.api_key, deadlines=config.deadlines, monotonic=monotonic)
    try:
        properties = _loaded(client, progress, sleep, monotonic)
        return _looked_at(config, client, properties, progress)
    except UpstreamFailed as error:
        client.close()
        raise ModelError(error.message) from error
    except BaseException:
        client.close()
        raise


def incarnation_of(client: UpstreamClient) -> Incarnation:
    """The server's present run. Sends two requests. Raises UpstreamFailed."""
    return _incarnation(client.properties(), client.adapters())


def fingerprint_of(
    incarnation: Incarnation, model: Mapping[str, Any], cache_dir: Path, progress: Progress | None
) -> bytes:
    """16 bytes over weights, adapters with their scales, and the server's build.

    Files that parkd cannot read are represented by their path and the server's metadata of the model.
    """
    hasher = blake2b(digest_size=FINGERPRINT_BYTES, person=b"parkd-upstream")
    parts = [_file_identity(incarnation.model_path, cache_dir, progress), incarnation.build.encode()]
    meta = model.get("meta") or {}
    parts.append(repr(sorted((key, str(value)) for key, value in meta.items() if key != "n_ctx")).encode())
    for _, path, scale in incarnation.adapters:
        parts += [_file_identity(path, cache_dir, progress), repr(scale).encode()]
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _loaded(
    client: UpstreamClient, progress: Progress | None, sleep: Callable[[float], None], monotonic: Callable[[], float]
) -> Mapping[str, Any]:
    """The server's properties, as soon as it has loaded its model."""
    began_s = monotonic()
    while True:
        try:
            return client.properties()
        except UpstreamDown as down:
            waited_s = monotonic() - began_s
            if "loading" not in down.message or waited_s > LOAD_WAIT_S:
                raise
            if progress is not None:
                progress("Waiting for the llama-server to load its model", waited_s / LOAD_WAIT_S)
            sleep(LOAD_POLL_S)


def _looked_at(
    config: UpstreamConfig, client: UpstreamClient, properties: Mapping[str, Any], progress: Progress | None
) -> Upstream:
    if not config.slot_dir.is_dir() or not os.access(config.slot_dir, os.W_OK | os.X_OK):
        raise ModelError(
            f"--slot-save-path {config.slot_dir} is not a directory that parkd can write to: name the one that the "
            f"llama-server was given."
        )
    incarnation = _incarnation(properties, client.adapters())
    named("tell the state of its slots", "--slots", client.slots)
    remove_leftovers(config.slot_dir)
    model = client.models()
    fingerprint = fingerprint_of(incarnation, model, config.cache_dir, progress)
    known = model_facts(Path(incarnation.model_path))
    has_fixed_state = None if known is None else known.has_fixed_state
    facts = probe_slots(client, config.slot_dir, incarnation.slots, has_fixed_state=has_fixed_state)
    template = str(properties.get("chat_template", ""))
    ends = _end_tokens(client, properties)
    first = first_tokens(client)
    info = EngineInfo(
        model_name=_name(incarnation.model_path, model),
        architecture=known.architecture if known is not None else "llama-server",
        fingerprint=fingerprint,
        context_tokens=incarnation.context_tokens,
        vocab_size=int((model.get("meta") or {}).get("n_vocab", 0)),
        end_token_ids=ends,
        layout=_layout(facts),
        devices=("upstream",),
        weights_bytes=int((model.get("meta") or {}).get("size", 0)),
        arena_bytes=0,
        live_conversations=incarnation.slots,
        enforces_schemas=True,
        resumes_near=not facts.is_linear,
        parked_state_lacks="" if facts.resumes_inside else NO_CHECKPOINTS,
    )
    names = {name: str(properties.get(name, "")) for name in ("bos_token", "eos_token")}
    return Upstream(
        client=client,
        incarnation=incarnation,
        info=info,
        facts=facts,
        template_source=template,
        template_names=names,
        special_tokens=special_tokens(client, list(names.values()), template),
        first_text=client.detokenize(first) if first else "",
        notes=_notes(incarnation, known, facts),
    )


def _layout(facts: SlotFacts) -> StateLayout:
    """The layout of slot files. Its digest covers their sizes, so that files of another KV type do not match."""
    row_bytes = -(-facts.row_bytes // 8) * 8
    digest = blake2b(repr((facts.row_bytes, facts.base_bytes)).encode(), digest_size=16).digest()
    return StateLayout((StageLayout(0, 1, row_bytes, 0 if facts.resumes_inside else 1, digest),), CHECKSUM, Grain.FILE)


def _incarnation(properties: Mapping[str, Any], adapters: list[Mapping[str, Any]]) -> Incarnation:
    try:
        return Incarnation(
            marker=str(properties.get("media_marker", "")),
            model_path=str(properties["model_path"]),
            build=str(properties.get("build_info", "")),
            slots=int(properties["total_slots"]),
            context_tokens=int(properties["default_generation_settings"]["n_ctx"]),
            template_digest=blake2b(str(properties.get("chat_template", "")).encode(), digest_size=16).digest(),
            adapters=tuple((int(a["id"]), str(a.get("path", "")), float(a.get("scale", 0.0))) for a in adapters),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UpstreamFailed(
            f"The llama-server's /props lacks what parkd needs ({error}). Use a newer llama-server."
        ) from error


def _end_tokens(client: UpstreamClient, properties: Mapping[str, Any]) -> frozenset[int]:
    """The end-of-sequence token, which represents all end tokens: the server does not tell which one it sampled."""
    ids = client.tokenize(str(properties.get("eos_token", "")))
    if len(ids) != 1:
        raise ModelError("The llama-server reports no end-of-sequence token; parkd cannot serve a model without one.")
    return frozenset(ids)


def _name(path: str, model: Mapping[str, Any]) -> str:
    called = str(model.get("id", "")) or path
    return Path(called).stem if called.endswith(".gguf") else called


def _file_identity(path: str, cache_dir: Path, progress: Progress | None) -> bytes:
    return weights_digest(Path(path), cache_dir, progress) or path.encode()


def _notes(incarnation: Incarnation, known: ModelFacts | None, facts: SlotFacts) -> tuple[str, ...]:
    notes = []
    if known is None:
        notes.append(
            f"the model's file {incarnation.model_path} cannot be read here, so another file of that name and size "
            f"would not be noticed: clear the park directory when you replace it"
        )
    if not facts.resumes_inside:
        notes.append(
            f"this model keeps windows or recurrent state, and {NO_CHECKPOINTS}, so a parked conversation resumes at "
            f"its end only: a newer llama-server writes them"
        )
    if not incarnation.marker:
        notes.append(
            "this llama-server does not identify its runs: a restart is noticed when its slots have lost tokens"
        )
    return tuple(notes)
