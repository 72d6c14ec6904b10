"""Paths of other servers' APIs, and what to use instead here: advice for the 404 of an unknown path."""

from __future__ import annotations

from collections.abc import Mapping

CHAT = "POST /v1/chat/completions"
MODELS = "GET /v1/models"
_OLLAMA = "Of Ollama's API there are /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."
_NONE = "This server generates text only; run another one beside it for that."

_EMBED = "Embeddings are at POST /v1/embeddings, if the server was started with --embeddings."
ADVICE: Mapping[str, str] = {
    "/api/pull": "The model is named when the server starts (--model), a hub id is downloaded then.",
    "/api/embed": _EMBED,
    "/api/embeddings": _EMBED,
    "/lora-adapters": "GET lists the adapters that were loaded at start; a request sets their scales in `lora`.",
    "/messages": "Anthropic's API is at POST /v1/messages: its base URL has no /v1 at the end.",
    "/responses": "The Responses API is POST /v1/responses: its base URL ends in /v1.",
    "/v1": f"This is the base URL for OpenAI clients. The chat is {CHAT}.",
}
"""Advice by path, without a trailing slash."""

_FAMILIES = (
    ("/api/", f"{_OLLAMA} The model is named when the server starts (--model)."),
    ("/slots/", "Conversations are parked and restored by themselves; GET /slots lists them."),
    ("/v1/audio/", _NONE),
    ("/v1/images/", _NONE),
    ("/v1/responses/", "This server keeps no responses: send the whole history in `input`."),
    ("/v1/v1/", "The base URL has one /v1 too many."),
)


def advice(path: str) -> str:
    """What a client can use instead of `path`."""
    family = next((words for head, words in _FAMILIES if path.startswith(head)), None)
    default = f"The chat is {CHAT} (OpenAI) or POST /v1/messages (Anthropic)."
    return ADVICE.get(path.rstrip("/")) or family or default
