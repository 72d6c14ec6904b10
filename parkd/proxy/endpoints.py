"""The endpoints that are not turns. None of them waits for the lane, and none changes anything.

`/slots` and `/parkd/explain` show only the requests and conversations of the caller's key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from parkd.errors import Forbidden, InvalidRequest, NotFound, Unauthorized
from parkd.identity.fill import fill_marks
from parkd.lane import metrics
from parkd.lane.reports import explain
from parkd.proxy import admin
from parkd.proxy.access import Caller, check_operator
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.guard import Handler
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers
from parkd.types import ConversationKey

APIS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages", "/v1/models")
"""Paths shown at `/`."""
PIECE_LIMIT = 200_000
"""Most tokens that `/tokenize` and `/detokenize` spell out one by one."""


class Endpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._services = proxy.services
        self._config = proxy.config
        self._info = proxy.services.engine.info

    def reading(self) -> Mapping[str, Handler]:
        """Handlers of GET requests by path."""
        return {
            "/v1/models": self.models,
            "/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/v1/health": self.health,
            "/metrics": self.metrics_page,
            "/props": self.props,
            "/slots": self.slots,
            "/lora-adapters": self.lora_adapters,
            "/parkd/explain/{request_id}": self.explain,
            "/": self.root,
            "/api/hello": self.root,
            "/api/tags": self.ollama_models,
            "/api/ps": self.ollama_models,
            "/api/version": self.ollama_version,
        }

    def asking(self) -> Mapping[str, Handler]:
        """Handlers of POST requests by path."""
        return {
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/apply-template": self.apply_template,
            "/api/show": self.ollama_model,
        }

    async def models(self, request: Request, request_id: str) -> ASGIApp:
        self._caller(request)
        info, alias, created_s = self._info, self._config.alias, self._proxy.created_s
        if "anthropic-version" in request.headers:
            return _json(admin.anthropic_model_list(info, alias, created_s), request_id)
        return _json(admin.model_list(info, alias, created_s, self._abilities()), request_id)

    async def model(self, request: Request, request_id: str) -> ASGIApp:
        self._caller(request)
        info, alias, created_s = self._info, self._config.alias, self._proxy.created_s
        entry = admin.model_entry(info, alias, created_s, self._abilities())
        if request.path_params["name"] != entry["id"]:
            raise NotFound(f"This server has one model, {entry['id']!r}.", param="model")
        if "anthropic-version" in request.headers:
            entry = admin.anthropic_model_entry(info, alias, created_s)
        return _json(entry, request_id)

    async def ollama_models(self, request: Request, request_id: str) -> ASGIApp:
        """The one model: what there is (`/api/tags`) and what is loaded (`/api/ps`) are the same here."""
        self._caller(request)
        return _json(
            {"models": [admin.ollama_entry(self._info, self._config.alias, self._proxy.created_s)]}, request_id
        )

    async def ollama_model(self, request: Request, request_id: str) -> ASGIApp:
        """Any name is accepted, as in requests of turns."""
        self._caller(request)
        await self._body(request)
        return _json(admin.ollama_model(self._info, self._services.chat_template, self._abilities()), request_id)

    def _abilities(self) -> Mapping[str, bool]:
        output, engine = self._services.output, self._services.engine
        return {
            "tools": output.calls_tools,
            "thinking": output.reasoning is not None,
            "vision": engine.images is not None,
            "insert": fill_marks(engine.tokenizer.special_tokens) is not None,
        }

    async def ollama_version(self, _request: Request, request_id: str) -> ASGIApp:
        return _json({"version": admin.OLLAMA_VERSION}, request_id)

    async def health(self, request: Request, _request_id: str) -> ASGIApp:
        """Asks for no key. Where there are keys, only an operator's learns how many requests of all keys wait."""
        proxy = self._proxy
        with suppress(Unauthorized, Forbidden):
            check_operator(self._caller(request))
            status, body = admin.health(
                lost=proxy.lost is not None,
                stopping=proxy.lane.closed,
                load=(proxy.lane.waiting, proxy.lane.busy),
            )
            return JSONResponse(body, status_code=status)
        status, body = admin.health(lost=proxy.lost is not None, stopping=proxy.lane.closed, load=None)
        return JSONResponse(body, status_code=status)

    async def metrics_page(self, request: Request, _request_id: str) -> ASGIApp:
        check_operator(self._caller(request))
        return Response(self._proxy.metrics.page(), headers={"content-type": metrics.CONTENT_TYPE})

    async def root(self, _request: Request, _request_id: str) -> ASGIApp:
        return JSONResponse({"name": "parkd", "apis": list(APIS), "health": "/health"})

    async def props(self, request: Request, request_id: str) -> ASGIApp:
        self._caller(request)
        template = self._services.chat_template
        reads_images = self._services.engine.images is not None
        seats = len(self._services.engine.seats)
        document = admin.props(self._info, self._config.alias, template, reads_images=reads_images, seats=seats)
        return _json(document, request_id)

    async def slots(self, request: Request, request_id: str) -> ASGIApp:
        """As in llama-server, with a slot for each seat. The first also tells what is parked, and how many wait. Shows
        a request only to the key that sent it, and what all keys do, as in `/health`, only to an operator's."""
        caller = self._caller(request)
        lane, seats = self._proxy.lane, self._proxy.runner.seats
        waiting = {"waiting": lane.waiting} if caller.is_operator else {}
        slots: list[dict[str, Any]] = []
        for number, live in enumerate(self._proxy.lives):
            turn = seats.turn_in(live)
            mine = turn.explained if turn is not None else None
            if mine is not None and mine.owner != caller.owner:
                mine = None
            slots.append(
                {
                    "id": number,
                    "n_ctx": self._info.context_tokens,
                    "is_processing": turn is not None and (caller.is_operator or mine is not None),
                    "request": explain.summary(mine) if mine is not None else None,
                }
            )
        parked = [
            {"tokens": tokens, "idle_s": round(max(0.0, idle_s), 1)} for tokens, idle_s in self._parked_of(caller)
        ]
        slots[0] |= {**waiting, "parked": parked}
        return _json(slots, request_id)

    async def lora_adapters(self, request: Request, request_id: str) -> ASGIApp:
        """As in llama-server: what a request's `lora` can name. Files are named without their folders."""
        self._caller(request)
        adapters = enumerate(self._services.engine.adapters)
        return _json([{"id": place, "path": each.name, "scale": each.scale} for place, each in adapters], request_id)

    def _parked_of(self, caller: Caller) -> list[tuple[int, float]]:
        """Tokens of each conversation of the caller's key, and the seconds since it was used. Where other keys share
        the namespace: of each as much as the key itself said, and the seconds since it did."""
        if self._services.store is None:
            return []
        key = ConversationKey(caller.namespace, self._info.fingerprint)
        parked = [found for found, _ in self._services.store.candidates(key.digest, ())]
        now_s = self._services.monotonic()
        if caller.shares_namespace:
            own = self._proxy.requests.own_parts(caller.owner, key, [found.units for found in parked])
            return [(tokens, now_s - request.arrived_s) for tokens, request in own]
        return [(found.position, now_s - found.last_used_s) for found in parked]

    async def explain(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._caller(request)
        asked = request.path_params["request_id"]
        found = self._proxy.requests.get(asked, caller.owner)
        if found is None:
            raise NotFound(
                f"No request {asked[:128]!r} of this key is remembered. Ask for one of the last requests, by the "
                "`x-request-id` of its answer.",
                param="request_id",
            )
        return _json(explain.document(found), request_id)

    async def tokenize(self, request: Request, request_id: str) -> ASGIApp:
        """As in llama-server: special tokens in the text are recognised unless `parse_special` is false, and those that
        open a text are added if `add_special` asks for them."""
        owner = self._caller(request).owner
        body = await self._body(request)
        content = fields.text(body, "content")
        with_pieces = fields.flag(body, "with_pieces", default=False)
        engine = self._services.engine
        special = fields.flag(body, "parse_special", default=True)
        ids = await self._proxy.prompts.tokenise(content, owner, special=special)
        if fields.flag(body, "add_special", default=False):
            ids = [*await self._in_thread(owner, lambda: engine.opening_ids), *ids]
        if not with_pieces:
            return _json({"tokens": ids}, request_id)
        if len(ids) > PIECE_LIMIT:
            raise InvalidRequest(f"`with_pieces` takes at most {PIECE_LIMIT} tokens.", param="with_pieces")
        pieces = await self._in_thread(
            owner, lambda: [{"id": token_id, "piece": _shown(engine.piece(token_id))} for token_id in ids]
        )
        return _json({"tokens": pieces}, request_id)

    async def detokenize(self, request: Request, request_id: str) -> ASGIApp:
        """As in llama-server: ids to their text, special tokens included."""
        owner = self._caller(request).owner
        body = await self._body(request)
        engine, tokens = self._services.engine, fields.items(body, "tokens")
        known = range(engine.info.vocab_size)
        if not all(isinstance(token, int) and not isinstance(token, bool) and token in known for token in tokens):
            raise InvalidRequest(f"`tokens` must be a list of token ids from 0 to {known.stop - 1}.", param="tokens")
        if len(tokens) > PIECE_LIMIT:
            raise InvalidRequest(f"`tokens` takes at most {PIECE_LIMIT} ids.", param="tokens")
        text = await self._in_thread(owner, lambda: engine.text_of(tokens))
        return _json({"content": text}, request_id)

    async def _in_thread(self, owner: str, work: Callable[[], Any]) -> Any:
        return await self._proxy.prompts.run(owner, work)

    async def apply_template(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._caller(request)
        body = await self._body(request)
        asked = dataclasses.replace(OpenAIChat().parse(body, request.headers), namespace=caller.namespace)
        render = self._services.render
        if render is None:
            raise NotFound("This server renders no templates.")
        text = await self._in_thread(caller.owner, partial(render, asked))
        return _json({"prompt": text}, request_id)

    async def _body(self, request: Request) -> Mapping[str, Any]:
        with self._proxy.bodies.charge(self._caller(request).owner) as charge:
            return await self._proxy.body_of(request, charge)

    def _caller(self, request: Request) -> Caller:
        return self._proxy.caller_of(request)


def _shown(piece: bytes) -> str | list[int]:
    """A piece as llama-server shows it: its bytes, if they are no text by themselves."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _json(document: object, request_id: str) -> JSONResponse:
    return JSONResponse(document, headers=id_headers(request_id))
