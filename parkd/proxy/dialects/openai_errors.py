"""Errors in OpenAI's format, for all of its dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parkd.errors import ContextOverflow, ParkdError, QueueFull
from parkd.proxy.dialects.base import ErrorAnswer

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_object(error: ParkdError) -> Mapping[str, Any]:
    """The value of `error`."""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, fallback)
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if isinstance(error, ContextOverflow):  # llama-server's type and numbers, by which its clients shorten a prompt
        sizes = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
        return {**told, "type": "exceed_context_size_error", **sizes}
    return told


def error_answer(error: ParkdError) -> ErrorAnswer:
    """The body has no request id, because every answer has it in a header."""
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, QueueFull) else {}
    return ErrorAnswer(error.status, {"error": error_object(error)}, headers)
