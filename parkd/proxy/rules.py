"""`/parkd/rules`: tries a rewrite rule on what the caller's key sent, and switches one on in the running server.

Whoever may switch one on changes what all keys send, so it takes an operator's key, or a server without keys that only
this machine reaches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from parkd.config.rewrite_rules import rule_of
from parkd.errors import ConfigError, Forbidden, InvalidRequest, NotFound
from parkd.identity.normalise import RewriteRule
from parkd.lane.reports.ledger_rows import rule_document
from parkd.lane.reports.rule_trial import tried
from parkd.proxy.access import Caller, check_deliberate, check_operator, is_loopback
from parkd.proxy.bill import rule_line
from parkd.proxy.guard import Handler
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers

PATTERN_CHARACTERS = 2000
"""Longest pattern, and replacement, that is taken over HTTP."""
UNROLLED_LIMIT = 50_000
"""Most characters, classes and escapes of such a pattern with its counted repetitions written out, as the library does:
a hundred milliseconds of compiling. Repetitions inside repetitions could take seconds, or all memory."""
_PIECE = re.compile(
    r"(?P<item>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\((?:\?[:=!>])?)|(?P<close>\))|\{(?:\d*,)?(?P<count>\d+),?\}|(?P<other>.)",
    re.DOTALL,
)


def unrolled(pattern: str) -> int:
    """The pieces of a pattern with its counted repetitions written out."""
    totals, last = [0], 0
    for piece in _PIECE.finditer(pattern):
        if piece["open"]:
            totals.append(0)
            last = 0
        elif piece["close"]:
            last = totals.pop() if len(totals) > 1 else 0
            totals[-1] += last
        elif piece["count"]:
            more = last * (int(piece["count"]) - 1)
            totals[-1] += max(0, more)
            last += max(0, more)
        elif piece["item"] or piece["other"] not in "?+*|":
            last = 1
            totals[-1] += 1
    return sum(totals)


class RuleEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        return [("POST", "/parkd/rules/try", self.trial), ("POST", "/parkd/rules", self.add)]

    async def trial(self, request: Request, request_id: str) -> ASGIApp:
        caller, rule = await self._asked(request)
        tokenizer = self._proxy.services.engine.tokenizer
        requests = [(one.request_id, one.prompt) for one in self._proxy.requests.latest_of(caller.owner)]
        work = partial(
            tried,
            rule,
            requests,
            lambda units: tokenizer.decode([int(unit) for unit in units]),
            lambda text: len(tokenizer.encode(text)),
        )
        try:
            trials = await self._proxy.prompts.run(caller.owner, work)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="rule") from None
        body = {
            **_told(rule),
            "requests": len(trials),
            "saved_tokens": sum(each.saved_tokens for each in trials),
            "by_request": [{"request_id": each.request_id, "saved_tokens": each.saved_tokens} for each in trials],
        }
        return JSONResponse(body, headers=id_headers(request_id))

    async def add(self, request: Request, request_id: str) -> ASGIApp:
        caller, rule = await self._asked(request)
        check_operator(caller)
        config, add = self._proxy.config, self._proxy.services.add_rule
        has_keys = bool(config.api_keys or config.named_keys or config.operator_keys)
        if not has_keys and not is_loopback(config.host):
            raise Forbidden(
                "A server without keys that others can reach takes no rules over HTTP. Start parkd with "
                "--operator-key, or put the rule in the file of --rewrite-rules."
            )
        if add is None:
            raise NotFound("This server renders no templates, so that rules have nothing to change.")
        try:
            count = add(rule)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="rule") from None
        return JSONResponse({**_told(rule), "rules": count}, headers=id_headers(request_id))

    async def _asked(self, request: Request) -> tuple[Caller, RewriteRule]:
        check_deliberate(request.headers)
        caller = self._proxy.caller_of(request)
        with self._proxy.bodies.charge(caller.owner) as charge:
            body = await self._proxy.body_of(request, charge)
        return caller, _rule(body)


def _rule(body: Mapping[str, Any]) -> RewriteRule:
    """Raises InvalidRequest."""
    entry = body.get("rule")
    if not isinstance(entry, dict):
        raise InvalidRequest("`rule` must be an object with a `pattern`, as in a rules file.", param="rule")
    if any(isinstance(value, str) and len(value) > PATTERN_CHARACTERS for value in entry.values()):
        raise InvalidRequest(f"The texts of a rule have at most {PATTERN_CHARACTERS} characters.", param="rule")
    if unrolled(str(entry.get("pattern"))) > UNROLLED_LIMIT:
        raise InvalidRequest(
            f"The counted repetitions of the pattern come to more than {UNROLLED_LIMIT} pieces. Count fewer: `+` and "
            "`*` have no count.",
            param="rule",
        )
    try:
        return rule_of(entry, "rule")
    except ConfigError as error:
        raise InvalidRequest(error.message, param="rule") from None


def _told(rule: RewriteRule) -> Mapping[str, Any]:
    document = rule_document(rule)
    return {"rule": document, "line": rule_line(document)}
