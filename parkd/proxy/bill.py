"""`/parkd/turns` and `/parkd/bill`: what the ledger tells. A key is told of its own turns, an operator's key of all.
Text is only told to the key that sent it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from parkd.errors import InvalidRequest, NotFound
from parkd.ledger.bill import Price
from parkd.ledger.ledger import ROWS_LIMIT, Ledger, LedgerLost
from parkd.ledger.since import since_s
from parkd.ledger.turns import LedgerTurn
from parkd.proxy.access import Caller
from parkd.proxy.guard import Handler
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers
from parkd.store.records import name_of

DEFAULT_SINCE = "7d"
DEFAULT_ROWS = 50
ANSWER_DEADLINE_S = 10.0
"""Longest wait for the ledger's thread."""
PROPOSALS_LIMIT = 20
"""Most proposed rules in one bill."""

T = TypeVar("T")


class BillEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        config = proxy.config
        self._price = Price(config.watts, config.kwh_price)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        return [("GET", "/parkd/turns", self.turns), ("GET", "/parkd/bill", self.bill)]

    async def turns(self, request: Request, request_id: str) -> ASGIApp:
        caller, asked = self._proxy.caller_of(request), request.query_params
        since = self._since(asked.get("since", DEFAULT_SINCE))
        conversation = asked.get("conversation")
        found = await _answer(
            self._ledger().turns(
                since,
                _limit(asked.get("limit", str(DEFAULT_ROWS))),
                owner=_owner(caller),
                conversation=None if conversation is None else name_of(conversation),
                request_id=asked.get("request_id"),
            )
        )
        return _json({"since_s": since, "turns": [turn_document(turn, caller) for turn in found]}, request_id)

    async def bill(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._proxy.caller_of(request)
        since, ledger = self._since(request.query_params.get("since", DEFAULT_SINCE)), self._ledger()
        owner = _owner(caller)
        sums = await _answer(ledger.sums(since, owner=owner))
        # A rule may quote a prompt, so each key is shown only those for its own.
        rules = await _answer(ledger.rules(since, owner=caller.owner))
        body = {
            "since_s": since,
            "total": sums["total"][0].document(self._price),
            **{
                f"by_{name}": [{name: one.group, **one.document(self._price)} for one in sums[name]]
                for name in ("cause", "client", "day")
            },
            "rules": [
                {
                    "rule": orjson.loads(rule),
                    "line": rule_line(orjson.loads(rule)),
                    "turns": turns,
                    "needless_tokens": tokens,
                    "needless_s": round(seconds, 3),
                    "request_id": name,
                }
                for rule, turns, tokens, seconds, name in rules[:PROPOSALS_LIMIT]
            ],
        }
        return _json(body, request_id)

    def _since(self, text: str) -> float:
        return since_s(text, self._proxy.services.wall())

    def _ledger(self) -> Ledger:
        ledger = self._proxy.services.ledger
        if ledger is None or ledger.is_lost:
            raise _none()
        return ledger


def turn_document(turn: LedgerTurn, caller: Caller) -> Mapping[str, Any]:
    is_own = turn.owner == caller.owner
    differs = None
    if turn.place is not None:
        differs = {"token": turn.place, "segment": turn.segment}
        if is_own and (turn.text or turn.known_text):
            differs |= {"text": turn.text, "known_text": turn.known_text}
    return {
        "at_s": turn.at_s,
        "request_id": turn.request_id,
        "conversation": turn.conversation or None,
        "client": turn.client,
        "key": turn.key_name,
        "api": turn.api,
        "cache": turn.cache or None,
        "prompt_tokens": turn.prompt_tokens,
        "reused_tokens": turn.reused_tokens,
        "read_tokens": turn.read_tokens,
        "needless_tokens": turn.needless_tokens,
        "output_tokens": turn.output_tokens,
        "seconds": {
            "wait": turn.wait_s,
            "restore": turn.restore_s,
            "read": turn.read_s,
            "needless": turn.needless_s,
            "decode": turn.decode_s,
        },
        "needless_s": turn.needless_s,
        "end": turn.end,
        "cause": turn.cause or None,
        "why": turn.why,
        "differs": differs,
        "rule": orjson.loads(turn.rule) if is_own and turn.rule else None,
    }


def rule_line(rule: Mapping[str, Any]) -> str:
    """The lines of a rule in a rules file. JSON's strings and lists are also TOML's."""
    return "\n".join(["[[rule]]", *(f"{name} = {_toml(value)}" for name, value in rule.items())])


def _toml(value: Any) -> str:
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")


def _owner(caller: Caller) -> str | None:
    """Whose turns it may see; None: all."""
    return None if caller.is_operator else caller.owner


def _limit(text: str) -> int:
    """Raises InvalidRequest."""
    if not text.isascii() or not text.isdecimal() or len(text) > 4 or not 0 < int(text) <= ROWS_LIMIT:
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {ROWS_LIMIT}.", param="limit")
    return int(text)


async def _answer(future: Future[T]) -> T:
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await asyncio.wrap_future(future)
    except (LedgerLost, TimeoutError):
        raise _none() from None


def _none() -> NotFound:
    return NotFound(
        "This server keeps no ledger: it was started with --ledger off, or its file could not be used, which its log "
        "explains."
    )


def _json(document: Mapping[str, Any], request_id: str) -> Response:
    headers = {**id_headers(request_id), "cache-control": "no-store"}
    return Response(orjson.dumps(document), headers=headers, media_type="application/json")
