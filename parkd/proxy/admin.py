"""The endpoints that are not turns: models, health, metrics. None of them waits for the lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parkd.engine_adapter.base import EngineInfo


def model_entry(info: EngineInfo, alias: str | None, created_s: int) -> Mapping[str, Any]:
    return {
        "id": alias or info.model_name,
        "object": "model",
        "created": created_s,
        "owned_by": "parkd",
        "meta": {"n_ctx": info.context_tokens, "n_vocab": info.vocab_size, "architecture": info.architecture},
    }


def model_list(info: EngineInfo, alias: str | None, created_s: int) -> Mapping[str, Any]:
    return {"object": "list", "data": [model_entry(info, alias, created_s)]}


def health(*, lost: bool, stopping: bool, waiting: int, busy: bool) -> tuple[int, Mapping[str, Any]]:
    """The status code and the body."""
    status = "lost" if lost else "stopping" if stopping else "ok"
    return (200 if status == "ok" else 503), {"status": status, "waiting": waiting, "busy": busy}
