"""Builds the documents of the endpoints that are not turns, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parkd.engine_adapter.base import EngineInfo
from parkd.proxy.dialects.ollama import rfc3339

OLLAMA_VERSION = "0.12.0"
"""The release of Ollama whose API is spoken here. Editors refuse to talk to older ones, and to anything else."""
_NEVER = "9999-12-31T23:59:59Z"


def capabilities(abilities: Mapping[str, bool]) -> list[str]:
    """What the model can do, in Ollama's and llama-server's words."""
    return ["completion", *(name for name, has in abilities.items() if has)]


def model_entry(
    info: EngineInfo, alias: str | None, created_s: int, abilities: Mapping[str, bool]
) -> Mapping[str, Any]:
    return {
        "id": alias or info.model_name,
        "object": "model",
        "created": created_s,
        "owned_by": "parkd",
        **({"max_model_len": info.context_tokens} if info.context_tokens else {}),
        "capabilities": capabilities(abilities),
        "meta": {"n_ctx": info.context_tokens, "n_vocab": info.vocab_size, "architecture": info.architecture},
    }


def model_list(info: EngineInfo, alias: str | None, created_s: int, abilities: Mapping[str, bool]) -> Mapping[str, Any]:
    return {"object": "list", "data": [model_entry(info, alias, created_s, abilities)]}


def anthropic_model_entry(info: EngineInfo, alias: str | None, created_s: int) -> Mapping[str, Any]:
    return {
        "type": "model",
        "id": alias or info.model_name,
        "display_name": alias or info.model_name,
        "created_at": rfc3339(created_s),
        **({"max_input_tokens": info.context_tokens, "max_tokens": info.context_tokens} if info.context_tokens else {}),
    }


def anthropic_model_list(info: EngineInfo, alias: str | None, created_s: int) -> Mapping[str, Any]:
    entry = anthropic_model_entry(info, alias, created_s)
    return {"data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}


def ollama_entry(info: EngineInfo, alias: str | None, created_s: int) -> Mapping[str, Any]:
    """The model in Ollama's lists, both of models and of loaded models."""
    name, on_cards = alias or info.model_name, any(device != "cpu" for device in info.devices)
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(created_s),
        "size": info.weights_bytes,
        "digest": info.fingerprint.hex() * 2,
        "details": _ollama_details(info),
        "expires_at": _NEVER,
        "size_vram": info.weights_bytes + info.arena_bytes if on_cards else 0,
        "context_length": info.context_tokens,
    }


def ollama_model(info: EngineInfo, chat_template: str | None, abilities: Mapping[str, bool]) -> Mapping[str, Any]:
    """The document of `/api/show`."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": chat_template or "",
        "details": _ollama_details(info),
        "model_info": {
            "general.architecture": info.architecture,
            f"{info.architecture}.context_length": info.context_tokens,
        },
        "capabilities": capabilities(abilities),
    }


def _ollama_details(info: EngineInfo) -> Mapping[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": "",
        "quantization_level": "",
    }


def props(
    info: EngineInfo, alias: str | None, chat_template: str | None, *, reads_images: bool = False, seats: int = 1
) -> Mapping[str, Any]:
    """The document for `/props`, with the fields that llama-server's clients read, but no paths of this machine.
    `seats` are the places for live conversations."""
    name = alias or info.model_name
    return {
        "default_generation_settings": {"n_ctx": info.context_tokens},
        "total_slots": seats,
        "model_alias": name,
        "model_path": name,
        "chat_template": chat_template or "",
        "modalities": {"vision": reads_images, "audio": False},
        "build_info": "parkd",
    }


def health(*, lost: bool, stopping: bool, load: tuple[int, bool] | None) -> tuple[int, Mapping[str, Any]]:
    """The status code and the document for `/health`. `load` is how many wait and whether one runs, for callers who
    may know what others do; None for everyone else, who learn whether the server takes requests."""
    status = "lost" if lost else "stopping" if stopping else "ok"
    told = {} if load is None else {"waiting": load[0], "busy": load[1]}
    return (200 if status == "ok" else 503), {"status": status, **told}
