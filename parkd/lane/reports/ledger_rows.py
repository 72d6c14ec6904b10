"""Makes the ledger's row of a turn that has ended, from what the turn knows of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import orjson

from parkd.identity.normalise import RewriteRule
from parkd.identity.units import IMAGE_BIT
from parkd.lane.reports.cause import Earlier, Judgement, cause_of
from parkd.lane.reports.explain import Explained, PromptParts
from parkd.lane.reports.volatile import rule_for
from parkd.lane.turn import Turn
from parkd.ledger.ledger import Ledger
from parkd.ledger.turns import TEXT_CHARACTERS, LedgerTurn
from parkd.types import CacheReport, Cause, PromptIdentity, Timings, Units

CLIENT_CHARACTERS = 32
_PRODUCT = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_BROWSERS = "Mozilla"


def client_family(user_agent: str) -> str:
    """The name of a client without its version: the first product of its user agent."""
    found = _PRODUCT.match(user_agent.strip())
    if found is None:
        return ""
    return "browser" if found[0] == _BROWSERS else found[0].lower()[:CLIENT_CHARACTERS]


class LedgerWriter:
    """Notes turns in a ledger. On the event loop; rows are made on the ledger's thread, where there is time."""

    def __init__(self, ledger: Ledger, decode: Callable[[Sequence[int]], str], *, shows_text: bool) -> None:
        self._ledger = ledger
        self._decode = decode
        self._shows_text = shows_text

    def note(self, turn: Turn, conversation: str) -> None:
        """Notes a turn once; later calls do nothing."""
        if turn.is_billed or turn.explained is None:
            return
        turn.is_billed = True
        explained = turn.explained
        given = _Given(
            explained.began_s,
            explained.request_id,
            explained.owner,
            conversation,
            turn.client,
            turn.key_name,
            turn.api,
            explained.prompt,
            explained.parts,
            turn.report,
            turn.timings,
            explained.end or "",
            turn.own_earlier(),
        )
        self._ledger.note(partial(row_of, given, self._text_of, shows_text=self._shows_text))

    def _text_of(self, units: Units) -> str:
        return self._decode([int(unit) for unit in units if not unit & IMAGE_BIT])


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """A turn's facts when it ended."""

    at_s: float
    request_id: str
    owner: str
    conversation: str
    client: str
    key_name: str
    api: str
    prompt: PromptIdentity
    parts: PromptParts | None
    report: CacheReport | None
    timings: Timings
    end: str
    earlier: Sequence[Explained]


def row_of(given: _Given, decode: Callable[[Units], str], *, shows_text: bool) -> LedgerTurn:
    """The row. Slow: compares the prompt with earlier ones."""
    report, timings = given.report, given.timings
    judged = Judgement(Cause.NONE)
    earlier = [Earlier.of(each) for each in given.earlier]
    tokens, units = len(given.prompt) if report is None else report.prompt_tokens, len(given.prompt)
    if report is not None:  # prompts are compared in their units, of which another server's tokens may be several
        in_units = replace(report, reused_tokens=report.reused_tokens * units // max(1, tokens))
        judged = cause_of(given.prompt, given.parts, in_units, earlier, decode)
    read = timings.prefill_tokens
    needless = min(judged.needless_tokens * tokens // units, read)
    rule = _rule(judged, shows_text=shows_text)
    return LedgerTurn(
        at_s=given.at_s,
        request_id=given.request_id,
        owner=given.owner,
        conversation=given.conversation,
        client=given.client,
        key_name=given.key_name,
        api=given.api,
        cache="" if report is None else report.outcome.value,
        prompt_tokens=tokens,
        reused_tokens=0 if report is None else report.reused_tokens,
        read_tokens=read,
        needless_tokens=needless,
        output_tokens=timings.output_tokens,
        wait_s=timings.wait_s,
        restore_s=timings.restore_s,
        read_s=timings.prefill_s,
        needless_s=timings.prefill_s * needless / read if read else 0.0,
        decode_s=timings.decode_s,
        end=given.end,
        cause=judged.cause.value,
        why="" if report is None else report.why,
        place=judged.place,
        segment=judged.segment,
        text=judged.text[:TEXT_CHARACTERS] if shows_text else "",
        known_text=judged.known_text[:TEXT_CHARACTERS] if shows_text else "",
        rule="" if rule is None else orjson.dumps(rule_document(rule)).decode(),
    )


def rule_document(rule: RewriteRule) -> dict[str, object]:
    """As in the rules file."""
    return {
        "name": rule.name,
        "pattern": rule.pattern,
        "replacement": rule.replacement,
        "roles": list(rule.roles),
    }


def _rule(judged: Judgement, *, shows_text: bool) -> RewriteRule | None:
    if judged.volatile is None:
        return None
    found = re.search(r"\((\w+)\)", judged.segment)
    roles = (found[1],) if found is not None else ("system", "developer")
    return rule_for(judged.volatile, roles, shows_text=shows_text)
