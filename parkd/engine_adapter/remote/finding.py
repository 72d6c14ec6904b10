"""Finds out what kind of server answers at an address, and which model it serves, by asking it.

    /v1/models        every server's; who owns the models says what it is, and their lengths are here
    /version          vLLM                     /props           llama-server
    /get_model_info   SGLang                   /info            TGI
    /api/version      Ollama                   /api/v0/models   LM Studio

Only answers count that say it plainly. All others are asked as a hosted API is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parkd.engine_adapter.http.client import HttpClient
from parkd.engine_adapter.remote.flavours import (
    HOSTED,
    LLAMA_SERVER,
    LM_STUDIO,
    OLLAMA,
    OMLX,
    SGLANG,
    TGI,
    VLLM,
    Flavour,
)
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed, UpstreamTimeout

MODELS_PATH = "/v1/models"
PATHS = ("/version", "/props", "/get_model_info", "/info", "/api/version", "/api/v0/models")
_OWNERS: Mapping[str, Flavour] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_SERVER,
    "library": OLLAMA,
    "organization_owner": LM_STUDIO,
    "omlx": OMLX,
}
"""`owned_by` of models."""
SHOWN_MODELS = 12
"""Most names of models in a message."""

Answers = Mapping[str, Any]
"""Path -> the JSON value that was answered, for paths that were answered with one."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an address was found to be."""

    flavour: Flavour
    version: str
    model: str
    """Its name there."""
    root: str
    """Where the server has the model from: a directory of its machine or a name on a hub; empty if it does not say."""
    context_tokens: int
    """0: it does not say."""
    why: str
    """What says so."""


def ask(client: HttpClient) -> Answers:
    """Asks for all that tells what a server is. Raises UpstreamFailed if it does not list its models."""
    answers: dict[str, Any] = {MODELS_PATH: client.object("GET", MODELS_PATH)}
    for path in PATHS:
        try:
            answers[path] = client.object("GET", path)
        except (UpstreamDown, UpstreamTimeout):
            raise
        except UpstreamFailed:  # it knows no such path
            continue
    return answers


def found_in(answers: Answers, named: str | None) -> Found:
    """What the answers say. `named` is the model to ask for; None: the only one. Raises ModelError."""
    flavour, why = flavour_of(answers)
    model = _model(_models(answers), named)
    return Found(
        flavour,
        version_of(answers, flavour),
        str(model["id"]),
        str(model.get("root") or _field(answers, "/get_model_info", "model_path") or ""),
        _context(answers, flavour, model),
        why,
    )


def flavour_of(answers: Answers) -> tuple[Flavour, str]:
    """The kind of server, and what says so."""
    owners = {str(model.get("owned_by", "")) for model in _models(answers)}
    for owner, flavour in _OWNERS.items():
        if owner in owners:
            return flavour, f"{MODELS_PATH} says that {owner!r} owns its models"
    if "default_generation_settings" in _object(answers, "/props"):
        return LLAMA_SERVER, "/props has a llama-server's settings"
    if "model_path" in _object(answers, "/get_model_info"):
        return SGLANG, "/get_model_info names a model"
    if str(_field(answers, "/info", "router") or "").startswith("text-generation"):
        return TGI, "/info names its router"
    if isinstance(_field(answers, "/api/version", "version"), str):
        return OLLAMA, "/api/version answers"
    if isinstance(_field(answers, "/api/v0/models", "data"), list):
        return LM_STUDIO, "/api/v0/models answers"
    if isinstance(_field(answers, "/version", "version"), str):
        return VLLM, "/version answers"
    return HOSTED, "it does not say what it is"


def version_of(answers: Answers, flavour: Flavour) -> str:
    """Empty if it does not say."""
    place = {
        VLLM.name: ("/version", "version"),
        LLAMA_SERVER.name: ("/props", "build_info"),
        OLLAMA.name: ("/api/version", "version"),
        TGI.name: ("/info", "version"),
        SGLANG.name: ("/get_model_info", "version"),
    }.get(flavour.name)
    value = None if place is None else _field(answers, *place)
    return value if isinstance(value, str) else ""


def _context(answers: Answers, flavour: Flavour, model: Mapping[str, Any]) -> int:
    told = [model.get("max_model_len"), model.get("context_length")]
    if flavour is LLAMA_SERVER:
        settings = _field(answers, "/props", "default_generation_settings")
        told.insert(0, settings.get("n_ctx") if isinstance(settings, Mapping) else None)
    if flavour is TGI:
        told.insert(0, _field(answers, "/info", "max_total_tokens"))
    if flavour is LM_STUDIO:
        listed = _field(answers, "/api/v0/models", "data") or ()
        own = next((each for each in listed if isinstance(each, Mapping) and each.get("id") == model["id"]), {})
        told = [own.get("loaded_context_length"), own.get("max_context_length"), *told]
    return next((each for each in told if isinstance(each, int) and not isinstance(each, bool) and each > 0), 0)


def _model(models: Sequence[Mapping[str, Any]], named: str | None) -> Mapping[str, Any]:
    names = [str(model["id"]) for model in models]
    if named is not None:
        return next((model for model in models if model["id"] == named), {"id": named})
    if len(models) == 1:
        return models[0]
    shown = ", ".join(names[:SHOWN_MODELS]) + (", ..." if len(names) > SHOWN_MODELS else "")
    have = f"the server has {len(names)} models ({shown})" if names else "the server lists no model"
    raise ModelError(f"--upstream-model must name the model, since {have}")


def _models(answers: Answers) -> list[Mapping[str, Any]]:
    listed = _field(answers, MODELS_PATH, "data")
    models = [model for model in listed if isinstance(model, Mapping)] if isinstance(listed, list) else []
    return [model for model in models if isinstance(model.get("id"), str)]


def _object(answers: Answers, path: str) -> Mapping[str, Any]:
    value = answers.get(path)
    return value if isinstance(value, Mapping) else {}


def _field(answers: Answers, path: str, name: str) -> Any:
    return _object(answers, path).get(name)
