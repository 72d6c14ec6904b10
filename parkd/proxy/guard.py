"""Wraps every endpoint: checks the request's origin, and answers errors in the format of its dialect."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from parkd.errors import InvalidRequest, NotFound, ParkdError, Unauthorized, UpgradeRefused
from parkd.lane.metrics import Metrics
from parkd.lane.reports.turn_log import requests_log
from parkd.proxy.access import Caller, authenticate, check_length, check_origin, has_two_lengths
from parkd.proxy.config import ProxyConfig
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import Dialect
from parkd.proxy.dialects.frames import encoded
from parkd.proxy.dialects.ollama import OllamaChat
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.foreign_paths import ADVICE, advice
from parkd.proxy.queries import check_fields
from parkd.proxy.requests import id_headers, request_id_of
from parkd.proxy.sse import unforeseen

log = logging.getLogger(__name__)

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"
PATH_SHOWN = 200
"""Most characters of a path that error messages repeat."""

Handler = Callable[[Request, str], Awaitable[ASGIApp]]


def guarded(
    config: ProxyConfig,
    metrics: Metrics,
    dialect: Dialect | None,
    handler: Handler,
    query: tuple[str, ...] | None = None,
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Wraps a handler in the checks of origin and query, and turns its errors into answers in the format of `dialect`;
    None: the format that the client expects. `query` names the fields that it takes; None: any."""

    async def endpoint(request: Request) -> ASGIApp:
        request_id = request_id_of(request.headers)
        try:
            check_length(request.headers)
            check_origin(request.headers, bound_host=config.host, allowed_origins=config.cors_origins)
            check_fields((name for name, _ in request.query_params.multi_items()), query)
            return await handler(request, request_id)
        except ClientDisconnect:
            return Response(status_code=499)
        except ParkdError as error:
            metrics.requests.labels(error.code).inc()
            note_refused(request, error, config)
            return _closing(request, _error_response(dialect or spoken_by(request), error, request_id))

    return endpoint


def note_refused(request: Request, error: ParkdError, config: ProxyConfig, status: int | None = None) -> None:
    """The log line of a request that never became a turn: who sent it, and why it was refused; no text of it. `status`
    is the answer's, if it is not the error's."""
    try:
        caller = caller_of(request.headers, config).shown
    except Unauthorized:
        caller = "-"
    requests_log.info(
        "key=%s refused=%s status=%d %s %r",
        caller,
        error.code,
        status or error.status,
        request.method,
        request.url.path[:PATH_SHOWN],
    )


def spoken_by(request: Request) -> Dialect:
    """The dialect that a client expects, for paths that belong to several APIs or to none."""
    if request.url.path.startswith(OLLAMA_PATHS):
        return OllamaChat()
    is_anthropic = "anthropic-version" in request.headers or request.url.path.startswith(ANTHROPIC_PATH)
    return AnthropicMessages() if is_anthropic else OpenAIChat()


def _error_response(dialect: Dialect, error: ParkdError, request_id: str) -> Response:
    answer = dialect.error(error, request_id)
    headers = {**id_headers(request_id), **answer.headers}
    return Response(encoded(answer.body), answer.status, headers, "application/json")


def caller_of(headers: Mapping[str, str], config: ProxyConfig) -> Caller:
    """Who sends a request with these headers. Raises Unauthorized."""
    return authenticate(headers, config.api_keys, config.named_keys, config.operator_keys)


def http_error(config: ProxyConfig, metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler for what the router refuses: unknown paths and methods. OPTIONS gets an empty answer, without headers
    that would permit a web page anything."""

    async def handler(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
        if request.headers.get("upgrade", "").lower() == "websocket":
            return _refused_websocket(request, metrics)
        refused: ParkdError
        if error.status_code == 404:
            refused = NotFound(f"There is nothing at {request.url.path[:PATH_SHOWN]}. {advice(request.url.path)}")
        else:
            words = f"{request.method} is not allowed at {request.url.path}. {ADVICE.get(request.url.path, '')}"
            refused = InvalidRequest(words.rstrip())
        metrics.requests.labels(refused.code).inc()
        note_refused(request, refused, config, error.status_code)
        response = _error_response(spoken_by(request), refused, request_id_of(request.headers))
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return _closing(request, response)

    return handler


def _closing(request: Request, response: Response) -> Response:
    """The same answer, after which the connection is closed if nobody knows where the request ended."""
    if has_two_lengths(request.headers):
        response.headers["connection"] = "close"
    return response


def _refused_websocket(request: Request, metrics: Metrics) -> Response:
    """The answer to a WebSocket request. Its `upgrade` header names the protocol to use (RFC 9110, 15.5.22)."""
    path = request.url.path[:PATH_SHOWN]
    refused = UpgradeRefused(
        f"WebSockets are not supported at {path}: send a POST over HTTP, with `stream` for a stream."
    )
    log.info("a client requested a WebSocket at %r and was told to use HTTP", path)
    metrics.requests.labels(refused.code).inc()
    response = _error_response(spoken_by(request), refused, request_id_of(request.headers))
    response.headers.update({"upgrade": "HTTP/1.1", "connection": "upgrade"})
    return response


async def server_error(request: Request, _error: Exception) -> Response:
    return _error_response(spoken_by(request), unforeseen(), request_id_of(request.headers))
