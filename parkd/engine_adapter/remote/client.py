"""The HTTP client for an OpenAI-style server, and what its errors mean here."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from parkd.config import Deadlines
from parkd.engine_adapter.http.client import WRONG_KEY, HttpClient, UpstreamRefused
from parkd.engine_adapter.http.lines import error_text
from parkd.errors import (
    ContextOverflow,
    InvalidRequest,
    ParkdError,
    QueueFull,
    UpstreamDown,
    UpstreamFailed,
    UpstreamTimeout,
)

CALLED = "upstream server"
SPARE_CONNECTIONS = 16
"""For workers that render and tokenise, beside one for each turn."""
RETRY_AFTER_S = 5
"""Told to clients where a server that has too much to do does not say."""
MOST_RETRY_AFTER_S = 120
_OVERFLOW_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_OVERFLOW_WORDS = re.compile(
    r"maximum context length|context (?:length|window|size)|longer than the model's|too many tokens|max_model_len"
    r"|prompt is too long|must be <=.*tokens",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d[\d,]*")


class RemoteClient(HttpClient):
    """A client for one server."""

    def __init__(
        self,
        url: str,
        *,
        turns: int,
        api_key: str | None = None,
        deadlines: Deadlines,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`turns` run at once."""
        super().__init__(
            url,
            called=CALLED,
            most_connections=turns + SPARE_CONNECTIONS,
            api_key=api_key,
            deadlines=deadlines,
            monotonic=monotonic,
        )

    def tokenised(self, body: Mapping[str, Any]) -> list[int] | None:
        """The ids of a text or a chat, if the server has `/tokenize` for it; None if it has not."""
        try:
            tokens = self.object("POST", "/tokenize", body).get("tokens")
        except (UpstreamDown, UpstreamTimeout):
            raise
        except UpstreamFailed:
            return None
        whole = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if whole else None

    def refusal(self, path: str, status: int, retry_after: str, raw: bytes) -> UpstreamFailed:  # noqa: ARG002
        """Servers write errors in many ways: `{"error": {...}}`, `{"error": "..."}`, `{"message": ...}`, `{"detail":
        ...}`, or as text."""
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            document = None
        error = document.get("error", document) if isinstance(document, Mapping) else document
        details: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
        if not details.get("message") and details.get("detail") is not None:
            details = {**details, "message": _detail(details["detail"])}
        return UpstreamRefused(
            status,
            error_text({"message": details.get("message") or ""}),
            str(details.get("code") or details.get("type") or ""),
            details,
            self.called,
            retry_after,
        )


def _detail(detail: Any) -> str:
    """FastAPI's list of what is wrong, without what was sent."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}"
        for each in detail
        if isinstance(each, Mapping)
    )


def meaning_of(refused: UpstreamRefused, prompt_tokens: int, context_tokens: int) -> ParkdError:
    """What a server's refusal of a turn is to the client. `context_tokens` is 0 if that is not known."""
    status, text = refused.upstream_status, refused.text
    if status in WRONG_KEY:
        return UpstreamFailed(
            f"The upstream server does not take parkd's key ({status}): {text} Name the key that it asks for with "
            f"--upstream-api-key or PARKD_UPSTREAM_API_KEY."
        )
    if 300 <= status < 400:
        return UpstreamFailed(
            f"The upstream server sends parkd to another address ({status}). Name the one where it answers with "
            f"--upstream."
        )
    if status in (400, 413, 422) and (refused.kind in _OVERFLOW_CODES or _OVERFLOW_WORDS.search(text)):
        limit = context_tokens or _said_limit(text)
        if limit:
            return ContextOverflow(max(prompt_tokens, limit + 1), 0, limit, limit)
        return InvalidRequest(f"The upstream server refuses this request: {text}", param="messages")
    if status in (400, 405, 409, 413, 415, 422):
        param = refused.details.get("param")
        return InvalidRequest(
            f"The upstream server refuses this request: {text}", param=param if isinstance(param, str) else None
        )
    if status == 404:
        return UpstreamFailed(
            f"The upstream server does not know this path or model: {text} Check --upstream and --upstream-model."
        )
    if status == 429:
        return QueueFull(f"The upstream server has too many requests: {text}", retry_after_s=_retry_after_s(refused))
    if status in (503, 529):
        return UpstreamDown(f"The upstream server is not ready ({status}): {text} Send the request again soon.")
    return refused


def _said_limit(text: str) -> int:
    """The context that an error tells, which is the first number after its words; 0 if there is none."""
    found = _OVERFLOW_WORDS.search(text)
    number = None if found is None else _NUMBER.search(text, found.end())
    return 0 if number is None else int(number[0].replace(",", ""))


def _retry_after_s(refused: UpstreamRefused) -> int:
    with contextlib.suppress(ValueError):
        return min(MOST_RETRY_AFTER_S, max(1, int(float(refused.retry_after))))
    return RETRY_AFTER_S
