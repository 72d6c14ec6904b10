"""Errors in Anthropic's format, sent instead of an answer or within its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parkd.errors import ContextOverflow, ParkdError, ThreadUnsupported

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_status(error: ParkdError) -> int:
    return 529 if error.status == 503 else error.status


def error_document(error: ParkdError, request_id: str) -> Mapping[str, Any]:
    kind = ERROR_TYPES.get(error_status(error), "api_error")
    message: dict[str, object] = {"type": kind, "message": _error_message(error)}
    if isinstance(error, ThreadUnsupported):
        message["details"] = {"error_code": error.code}
    return {"type": "error", "error": message, "request_id": request_id}


def _error_message(error: ParkdError) -> str:
    """Claude Code reads the numbers in the message of a context overflow, and retries with less."""
    if not isinstance(error, ContextOverflow):
        return error.message
    prompt, output, limit = error.prompt_tokens, error.output_tokens, error.context_tokens
    if prompt >= limit:
        longest = limit - 1  # a prompt that fills the context leaves no token for an answer
        return f"prompt is too long: {prompt} tokens > {longest} maximum"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}"
