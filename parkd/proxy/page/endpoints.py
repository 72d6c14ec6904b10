"""The page and what it reads: `/`, `/parkd/now`, `/parkd/events`, `/parkd/budget`. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from parkd.errors import InvalidRequest
from parkd.proxy.guard import Handler
from parkd.proxy.page import budget, now
from parkd.proxy.page.events import EventStream, Listeners
from parkd.proxy.page.static import START, StaticFiles, wants_page
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers
from parkd.store.budget import MIB

MOST_RAM_MIB = 1 << 30
"""The largest budget that is planned for."""


class PageEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy, root: Handler) -> None:
        """`root` answers `/` for programs."""
        self._proxy = proxy
        self._root = root
        self._files = StaticFiles() if proxy.config.has_page else None
        self._listeners = Listeners()

    def reading(self) -> Mapping[str, Handler]:
        """Handlers of GET requests by path."""
        data: dict[str, Handler] = {
            "/parkd/now": self.now,
            "/parkd/events": self.events,
            "/parkd/budget": self.budget,
        }
        return data if self._files is None else {"/": self.root, "/parkd/page/{name}": self.file, **data}

    async def root(self, request: Request, request_id: str) -> ASGIApp:
        """The page for browsers. Who does not ask for HTML gets JSON, as ever."""
        if self._files is not None and wants_page(request.headers.get("accept", "")):
            return self._files.response(START, request)
        return await self._root(request, request_id)

    async def file(self, request: Request, _request_id: str) -> ASGIApp:
        assert self._files is not None
        return self._files.response(request.path_params["name"], request)

    async def now(self, request: Request, request_id: str) -> ASGIApp:
        return _json(now.document(self._proxy, self._proxy.caller_of(request)), request_id)

    async def events(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._proxy.caller_of(request)
        self._listeners.check(caller.owner)
        if request.method == "HEAD":  # whose answer has no body to wait for
            return Response(headers=id_headers(request_id), media_type="text/event-stream")
        return EventStream(
            self._listeners,
            caller.owner,
            partial(now.document, self._proxy, caller),
            self._is_over,
            id_headers(request_id),
        )

    def _is_over(self) -> bool:
        return self._proxy.lost is not None or self._proxy.lane.closed

    async def budget(self, request: Request, request_id: str) -> ASGIApp:
        """What all keys hold together is for an operator; what a budget would hold follows from the model alone."""
        caller, store = self._proxy.caller_of(request), self._proxy.services.store
        asked = _asked_bytes(request.query_params.get("ram_mib"))
        shown: dict[str, Any] = {"process": None, "devices": [], "ram": None, "disk": None, "refusals": []}
        info = self._proxy.services.engine.info
        positions: list[int] = []
        if caller.is_operator:
            shown |= self._all()
            positions = [] if store is None else [each.parked.position for each in store.table.all()]
        lengths = budget.example_tokens([each for each in positions if each], info.context_tokens)
        if store is not None:
            room = store.room() if caller.is_operator else None
            shown["holds"] = budget.held(
                budget.sizes_for(info.layout, store.config), lengths, room, info.context_tokens
            )
            if asked is not None:
                sizes = budget.sizes_for(info.layout, store.config, asked)
                shown["what_if"] = budget.held(sizes, lengths, None, info.context_tokens)
        return _json({"is_operator": caller.is_operator, "lengths_are_seen": bool(positions), **shown}, request_id)

    def _all(self) -> Mapping[str, Any]:
        services = self._proxy.services
        store, info = services.store, services.engine.info
        ram = None if store is None else store.stats()
        remembered = sum(self._proxy.remembered().bytes.values())
        parts = budget.parts_of(info, ram, remembered)
        shown: dict[str, Any] = {"devices": budget.devices(info)}
        if services.machine is not None:
            shown["process"] = budget.process(parts, services.machine())
        if store is not None and ram is not None:
            shown |= budget.tiers(ram, store.disk_stats() if store.has_disk else None)
            shown["refusals"] = budget.refusals(ram)
        return shown


def _asked_bytes(text: str | None) -> int | None:
    """Raises InvalidRequest."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(MOST_RAM_MIB)) or int(text) > MOST_RAM_MIB:
        raise InvalidRequest(f"`ram_mib` must be a whole number from 0 to {MOST_RAM_MIB}.", param="ram_mib")
    return int(text) * MIB


def _json(document: Mapping[str, Any], request_id: str) -> Response:
    headers = {**id_headers(request_id), "cache-control": "no-store"}
    return Response(orjson.dumps(document), headers=headers, media_type="application/json")
