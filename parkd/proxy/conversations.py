"""`/parkd/conversations`: what is live and parked, and what people may do with it.

A key sees and steers what it sent itself, an operator's key everything; text is shown to the key that sent it alone.
Where keys share a namespace, a conversation is a key's own only if one of its requests, since the server started, went
as far as what is kept, and left it there. What is not the caller's own is not found.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from parkd.errors import Conflict, InvalidRequest, NotFound
from parkd.identity.chain import prefix_hashes
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.reports.listing import Shown, as_alone, document, parents
from parkd.lane.reports.roster import Counts
from parkd.proxy.access import Caller, check_deliberate, holds
from parkd.proxy.guard import Handler
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers
from parkd.store.listing import Listed
from parkd.store.records import Name, Refused, name_of
from parkd.store.store import ConversationStore
from parkd.types import Units

LIST_LIMIT = 1000
"""Most conversations in one answer, the most recently used."""
KEEP_LIMIT_S = 30 * 24 * 3600
"""Longest time that `keep` takes."""
Action = Callable[[Name, Caller, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """What a seat holds."""

    name: Name
    """Of the conversation that it continues, or of the seat if nothing of it is parked."""
    units: Units
    key_digest: bytes
    namespace: str
    live: LiveConversation


class ConversationEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._store = proxy.services.store

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        one = "/parkd/conversations/{id}"
        return [
            ("GET", "/parkd/conversations", self.all),
            ("GET", one, self.one),
            ("DELETE", one, self.forget),
            ("POST", f"{one}/pin", self._action(self._pin)),
            ("POST", f"{one}/unpin", self._action(self._unpin)),
            ("POST", f"{one}/keep", self._action(self._keep)),
            ("POST", f"{one}/disk", self._action(self._to_disk)),
        ]

    async def all(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._proxy.caller_of(request)
        shown = sorted(self._shown(caller), key=lambda each: (each.idle_s, each.name))
        documents = await anyio.to_thread.run_sync(_documents, shown[:LIST_LIMIT])
        left_off = len(shown) - len(documents)
        return JSONResponse({"conversations": documents, "left_off": left_off}, headers=id_headers(request_id))

    async def one(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._proxy.caller_of(request)
        return JSONResponse(await self._told(caller, self._asked(request)), headers=id_headers(request_id))

    async def forget(self, request: Request, request_id: str) -> ASGIApp:
        """Forgets a conversation: what is parked of it, what is live, the answers to it, and its requests. Where
        another key had turns of the same, only what is this key's own."""
        check_deliberate(request.headers)
        caller = self._proxy.caller_of(request)
        found = self._own(caller, self._asked(request))
        proxy, answers = self._proxy, 0
        owner = None if caller.is_operator else caller.owner
        if owner is None or not self._is_anothers(owner, found):
            answers = await self._drop(found)
        elif proxy.runner.retention is not None:
            proxy.runner.retention.let_go(found.name, proxy.services.monotonic(), owner)
        # Where keys share a namespace, others may have gone on from what this one said.
        proxy.requests.forget(found.key_digest, found.units, owner)
        proxy.runner.roster.forget(found.name, owner)
        if proxy.services.ledger is not None:
            proxy.services.ledger.forget(found.name, owner)
        told = None if found.hides_sharing else answers  # it counts what others were answered to the same
        body = {"id": found.name, "forgotten": True, "answers": told}
        return JSONResponse(body, headers=id_headers(request_id))

    def _is_anothers(self, owner: str, found: Shown) -> bool:
        """Whether another key had turns of this conversation too."""
        activity = self._proxy.runner.roster.get(found.name)
        had_turns = activity is not None and any(one != owner for one in activity.by_owner)
        return had_turns or self._proxy.requests.is_left_by_another(owner, found.key_digest, found.units)

    async def _drop(self, found: Shown) -> int:
        """Drops what is parked and live, and the answers to it. Returns how many those were."""
        for live in self._lives():
            if live.name == found.name:
                live.live.discard()
        for row in found.rows:
            assert self._store is not None
            self._store.drop(row.parked.id, "it was forgotten because someone asked for that")
        if self._proxy.disk is not None:
            self._proxy.disk.wake()
        if self._proxy.services.forget is None:
            return 0
        given = found.units, found.key_digest, found.namespace
        return await anyio.to_thread.run_sync(self._proxy.services.forget, *given)

    def _action(self, act: Action) -> Callable[[Request, str], Awaitable[ASGIApp]]:
        async def handler(request: Request, request_id: str) -> ASGIApp:
            check_deliberate(request.headers)
            caller = self._proxy.caller_of(request)
            body = await self._body(request, caller)
            found = self._own(caller, self._asked(request))
            if not found.rows:
                raise Conflict(
                    "Nothing of this conversation is parked: it is live, and parked when its turn ends, if it fits."
                )
            act(found.name, caller, body)
            return JSONResponse(await self._told(caller, found.name), headers=id_headers(request_id))

        return handler

    def _pin(self, name: Name, caller: Caller, _body: Mapping[str, Any]) -> None:
        self._keep_until(name, caller, math.inf)

    def _keep(self, name: Name, caller: Caller, body: Mapping[str, Any]) -> None:
        for_s = body.get("for_s")
        if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 < for_s <= KEEP_LIMIT_S:
            raise InvalidRequest(
                f"`for_s` must be the seconds to keep it: more than 0, at most {KEEP_LIMIT_S}.", param="for_s"
            )
        self._keep_until(name, caller, self._proxy.services.monotonic() + for_s)

    def _keep_until(self, name: Name, caller: Caller, until_s: float) -> None:
        retention = self._proxy.runner.retention
        assert retention is not None
        retention.keep(name, until_s, self._proxy.services.monotonic(), caller.owner)

    def _unpin(self, name: Name, caller: Caller, _body: Mapping[str, Any]) -> None:
        retention = self._proxy.runner.retention
        assert retention is not None
        retention.let_go(name, self._proxy.services.monotonic(), None if caller.is_operator else caller.owner)

    def _to_disk(self, name: Name, _caller: Caller, _body: Mapping[str, Any]) -> None:
        assert self._store is not None
        refused = self._store.move_to_disk(name)
        if isinstance(refused, Refused):
            raise Conflict(f"It was not moved to disk: {refused.message}. See the disk settings of parkd.")

    # What a caller sees

    async def _told(self, caller: Caller, name: Name) -> Mapping[str, Any]:
        shown = self._shown(caller)
        documents = await anyio.to_thread.run_sync(_documents, shown)
        found = next((each for each in documents if each["id"] == name), None)
        if found is None:
            raise _not_found(name)
        activity = self._proxy.runner.roster.get(name)
        mine = [] if activity is None else [name for owner, name in activity.requests if owner == caller.owner]
        return {
            **found,
            "children": [each["id"] for each in documents if each["parent"] == name],
            "requests": mine,
        }

    def _own(self, caller: Caller, name: Name) -> Shown:
        found = next((each for each in self._shown(caller) if each.name == name), None)
        if found is None:
            raise _not_found(name)
        return found

    def _shown(self, caller: Caller) -> list[Shown]:
        retention, now_s = self._proxy.runner.retention, self._proxy.services.monotonic()
        if retention is not None:
            retention.apply(now_s)
        by_name: dict[Name, list[Listed]] = {}
        for row in self._store.listed() if self._store is not None else ():
            parked = row.parked
            name = name_of(parked.id)
            if self._may_see(caller, name, parked.namespace, parked.key_digest, parked.units):
                by_name.setdefault(name, []).append(row)
        lives = {
            each.name: each
            for each in self._lives()
            if self._may_see(caller, each.name, each.namespace, each.key_digest, each.units)
        }
        shown = []
        for name in dict.fromkeys((*by_name, *lives)):
            rows = sorted(by_name.get(name, ()), key=lambda row: -row.parked.position)
            shown.append(self._one(caller, name, rows, lives.get(name), now_s))
        may_know = self._proxy.may_know_when_others_run(caller)
        return shown if may_know else as_alone(shown, len(self._proxy.lives))

    def _one(self, caller: Caller, name: Name, rows: list[Listed], live: _Live | None, now_s: float) -> Shown:
        proxy = self._proxy
        activity, wall_s = proxy.runner.roster.get(name), proxy.services.wall()
        counts = Counts() if activity is None else activity.seen_by(caller.owner if caller.shares_namespace else None)
        namespace = rows[0].parked.namespace if rows else live.namespace if live else ""
        key_digest = rows[0].parked.key_digest if rows else live.key_digest if live else b""
        may_read = proxy.config.shows_text and holds(caller, namespace)
        if activity is not None and may_read:
            counts = replace(counts, words=activity.seen_by(caller.owner).words)
        if not counts.turns and rows and not caller.shares_namespace:
            counts = replace(counts, turns=rows[0].turns or 0)
        if live is not None and (not rows or len(live.units) > rows[0].parked.position):
            units, hashes = live.units, prefix_hashes(live.units, key_digest, live.live.rows.block_tokens)
        else:
            units, hashes = rows[0].parked.units, rows[0].parked.prefix_hashes
        age_s = 0.0 if activity is None else now_s - activity.began_s
        age_s = max([age_s, *(row.age_s for row in rows)])
        idle_s = min((row.idle_s for row in rows), default=0.0)
        if caller.shares_namespace:  # others may have begun the same before, and used it since
            age_s = now_s - counts.began_s if counts.turns else 0.0
            idle_s = now_s - counts.last_s if counts.turns else 0.0
        retention = proxy.runner.retention
        hides_sharing = caller.shares_namespace and not caller.is_operator
        owner = caller.owner if hides_sharing else None
        until_s = None if retention is None else retention.kept_until_s(name, owner)
        is_pinned = any(row.is_pinned for row in rows)
        if owner is not None:
            is_pinned = retention is not None and retention.is_wanted_by(name, owner)
        kept_until_s = None if until_s is None or math.isinf(until_s) else wall_s + until_s - now_s
        return Shown(
            name,
            tuple(rows),
            units,
            tuple(hashes),
            namespace,
            key_digest,
            live is not None,
            counts,
            max(0.0, age_s),
            max(0.0, idle_s),
            kept_until_s,
            may_read,
            hides_sharing,
            is_pinned,
        )

    def _lives(self) -> list[_Live]:
        """What the seats hold, apart from what is to be forgotten."""
        found = []
        for number, live in enumerate(self._proxy.lives):
            rows = live.rows
            if rows.key is None or rows.position == 0 or live.is_unwanted:
                continue
            digest, name = rows.key.digest, None
            if rows.parked_id is not None and self._holds(rows.parked_id):
                name = name_of(rows.parked_id)
            elif self._store is not None:
                hashes = tuple(prefix_hashes(rows.units, digest, rows.block_tokens))
                name = self._store.continued(digest, rows.units, hashes)
            found.append(_Live(name or f"live-{number}", rows.units, digest, rows.key.namespace, live))
        return found

    def _holds(self, conversation_id: str) -> bool:
        return isinstance(self._store, ConversationStore) and self._store.get(conversation_id) is not None

    def _may_see(self, caller: Caller, name: Name, namespace: str, key_digest: bytes, units: Units) -> bool:
        if caller.is_operator:
            return True
        if not holds(caller, namespace):
            return False
        if not caller.shares_namespace:
            return True
        requests, activity = self._proxy.requests, self._proxy.runner.roster.get(name)
        if not requests.said_whole(caller.owner, key_digest, units):
            return False
        # What ends inside a prompt of the caller may have been left there by another key, whose prompt differs there.
        is_known = activity is not None and caller.owner in activity.by_owner
        return is_known or requests.left_whole(caller.owner, key_digest, units)

    async def _body(self, request: Request, caller: Caller) -> Mapping[str, Any]:
        """The JSON object that was sent; empty if there is no body."""
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return {}
        with self._proxy.bodies.charge(caller.owner) as charge:
            return await self._proxy.body_of(request, charge)

    def _asked(self, request: Request) -> Name:
        return name_of(request.path_params["id"])


def _documents(shown: list[Shown]) -> list[Mapping[str, Any]]:
    kin = parents(shown)
    return [document(each, kin.get(each.name)) for each in shown]


def _not_found(name: Name) -> NotFound:
    return NotFound(
        f"No conversation {name[:64]!r} of this key is live or parked. `GET /parkd/conversations` lists them.",
        param="id",
    )
