"""The HTTP application: the routes over one `Proxy`."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from parkd.proxy.bill import BillEndpoints
from parkd.proxy.config import Services
from parkd.proxy.conversations import ConversationEndpoints
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import Dialect
from parkd.proxy.dialects.llama_server import LlamaCompletion, LlamaInfill
from parkd.proxy.dialects.ollama import OllamaChat, OllamaGenerate
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.proxy.embeddings import EmbeddingEndpoints
from parkd.proxy.endpoints import Endpoints
from parkd.proxy.guard import Handler, guarded, http_error, server_error
from parkd.proxy.page.endpoints import PageEndpoints
from parkd.proxy.portable import PortableEndpoints
from parkd.proxy.proxy import Proxy
from parkd.proxy.queries import known_fields
from parkd.proxy.requests import id_headers
from parkd.proxy.rules import RuleEndpoints
from parkd.proxy.targets import AbsoluteTargets

Counter = AnthropicMessages | OpenAIResponses
FINGERPRINT_CHARACTERS = 12
"""Characters of the model's fingerprint in `system_fingerprint`."""


def default_dialects(services: Services) -> Mapping[str, Dialect]:
    """The dialect of each path."""
    chat = OpenAIChat(f"parkd-{services.engine.info.fingerprint.hex()[:FINGERPRINT_CHARACTERS]}")
    return {
        "/v1/chat/completions": chat,
        "/chat/completions": chat,
        "/v1/completions": OpenAICompletions(),
        "/completion": LlamaCompletion(),
        "/completions": LlamaCompletion(),
        "/infill": LlamaInfill(),
        "/v1/responses": OpenAIResponses(tells_progress=services.config.tells_progress),
        "/v1/messages": AnthropicMessages(),
        "/api/chat": OllamaChat(),
        "/api/generate": OllamaGenerate(),
    }


def create_app(services: Services) -> Starlette:
    """The application over `services`. It does not close the engine."""
    proxy = Proxy(services)
    routes = [
        Route(path, guarded(proxy.config, proxy.metrics, dialect, _turn(proxy, dialect)), methods=["POST"])
        for path, dialect in default_dialects(services).items()
    ]
    counters: Mapping[str, Counter] = {
        "/v1/messages/count_tokens": AnthropicMessages(),
        "/v1/responses/input_tokens": OpenAIResponses(),
    }
    for path, counter in counters.items():
        counted = guarded(proxy.config, proxy.metrics, counter, _count(proxy, counter))
        routes.append(Route(path, counted, methods=["POST"]))
    endpoints = Endpoints(proxy)
    pages = PageEndpoints(proxy, endpoints.root)
    for method, handlers in (("GET", {**endpoints.reading(), **pages.reading()}), ("POST", endpoints.asking())):
        for path, handler in handlers.items():
            endpoint = guarded(proxy.config, proxy.metrics, None, handler, known_fields(path))
            routes.append(Route(path, endpoint, methods=[method]))
    groups = (
        ConversationEndpoints(proxy),
        PortableEndpoints(proxy),
        BillEndpoints(proxy),
        RuleEndpoints(proxy),
        EmbeddingEndpoints(proxy),
    )
    for method, path, handler in (route for group in groups for route in group.routes()):
        endpoint = guarded(proxy.config, proxy.metrics, None, handler, known_fields(path))
        routes.append(Route(path, endpoint, methods=[method]))
    middleware = [Middleware(AbsoluteTargets)]
    if services.config.cors_origins:
        origins = list(services.config.cors_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=proxy.life,
        exception_handlers={HTTPException: http_error(proxy.config, proxy.metrics), Exception: server_error},
    )
    app.router.redirect_slashes = False
    app.state.parkd = proxy
    return app


def _turn(proxy: Proxy, dialect: Dialect) -> Handler:
    async def handler(request: Request, request_id: str) -> ASGIApp:
        return await proxy.turn_response(request, dialect, request_id)

    return handler


def _count(proxy: Proxy, dialect: Counter) -> Handler:
    kind = {"object": "response.input_tokens"} if isinstance(dialect, OpenAIResponses) else {}

    async def handler(request: Request, request_id: str) -> ASGIApp:
        count = await proxy.count_tokens(request, dialect)
        return JSONResponse({**kind, "input_tokens": count}, headers=id_headers(request_id))

    return handler
