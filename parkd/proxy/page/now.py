"""What happens at this moment, as `/parkd/now` and `/parkd/events` tell it. Builds documents from values; changes and
waits for nothing.

A key is told of its own turns and conversations; an operator's of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parkd.lane.live_conversation import LiveConversation
from parkd.lane.live_rows import LiveRows
from parkd.lane.turn import Turn
from parkd.proxy.access import Caller, holds
from parkd.proxy.proxy import Proxy
from parkd.store.records import name_of

READ_DIGITS = 1
TokensIn = Callable[[int], int]
"""Tokens of so many units, which are characters before some servers."""


def document(proxy: Proxy, caller: Caller) -> Mapping[str, Any]:
    """Of what `caller` may see."""
    lane, now_s, tokens_in = proxy.lane, proxy.services.monotonic(), proxy.services.engine.tokens_in
    running = (*lane.running_turns, *lane.paused_turns)
    return {
        "state": "lost" if proxy.lost is not None else "stopping" if lane.closed else "ok",
        "model": proxy.model_id,
        "context_tokens": proxy.services.engine.info.context_tokens,
        "shows_text": proxy.config.shows_text,
        "keeps_ledger": proxy.keeps_ledger,
        "is_operator": caller.is_operator,
        "running": [_running(turn, now_s, tokens_in) for turn in running if is_seen(turn, caller)],
        "waiting": [
            _waiting(turn, place, now_s, caller, tokens_in)
            for place, turn in enumerate(lane.queue, 1)
            if is_seen(turn, caller)
        ],
        "queue_limit": proxy.config.max_queue,
        "seats": _seats(proxy, caller),
        "from_disk": _from_disk(proxy, now_s) if caller.is_operator else None,
        "budget": budget_line(proxy) if caller.is_operator else None,
    }


def is_seen(turn: Turn, caller: Caller) -> bool:
    """Whether the caller may be told of the turn."""
    return caller.is_operator or (turn.explained is not None and turn.explained.owner == caller.owner)


def _running(turn: Turn, now_s: float, tokens_in: TokensIn) -> Mapping[str, Any]:
    report, answer = turn.report, turn.answer
    progress = None if turn.explained is None else turn.explained.progress
    shown: dict[str, Any] = {
        **_turn(turn, tokens_in),
        "phase": "starting",
        "cache": None if report is None else report.outcome.value,
        "reused_tokens": 0 if report is None else report.reused_tokens,
        "why": "" if report is None else report.why,
        "runs_s": _rounded(now_s - (turn.began_s or now_s)),
        "reading": None,
        "answer": None,
    }
    if progress is not None:
        shown["phase"] = "reading"
        shown["reading"] = {
            "read_tokens": tokens_in(progress.read_tokens),
            "total_tokens": tokens_in(progress.total_tokens),
            "tokens_per_s": _rounded(progress.tokens_per_s),
            "left_s": _rounded(progress.left_s),
        }
    if answer is not None:
        shown["phase"] = "answering"
        first_s = answer.first_token_at_s
        decode_s = 0.0 if first_s is None else now_s - first_s - turn.timings.paused_s
        tokens = tokens_in(answer.output_tokens)
        shown["answer"] = {
            "tokens": tokens,
            "limit_tokens": turn.request.max_output_tokens,
            "tokens_per_s": _rounded((tokens - 1) / decode_s) if decode_s > 0 and tokens > 1 else None,
            "first_token_s": None if first_s is None else _rounded(first_s - turn.arrived_s),
        }
    if turn.is_aside:
        shown["phase"] = "paused"
    return shown


def _waiting(turn: Turn, place: int, now_s: float, caller: Caller, tokens_in: TokensIn) -> Mapping[str, Any]:
    # The place tells how many turns of other keys wait before it.
    return {
        **_turn(turn, tokens_in),
        "place": place if caller.is_operator else None,
        "waits_s": _rounded(now_s - turn.queued_s),
    }


def _turn(turn: Turn, tokens_in: TokensIn) -> Mapping[str, Any]:
    told = turn.report.prompt_tokens if turn.report is not None else tokens_in(len(turn.prompt))
    return {"request_id": turn.request_id, "client": turn.caller, "prompt_tokens": told}


def _seats(proxy: Proxy, caller: Caller) -> list[Mapping[str, Any]]:
    """The live conversations, by seat. Where keys share a namespace, as far as the caller's own requests went. Where
    there are others, while a turn of the caller runs: else they would tell when others do."""
    shown: list[Mapping[str, Any]] = []
    running = proxy.lane.running
    if not proxy.may_know_when_others_run(caller) and (running is None or not is_seen(running, caller)):
        return shown
    for number, live in enumerate(proxy.lives):
        tokens = _seen_tokens(proxy, live, caller)
        if tokens or caller.is_operator:
            whole = tokens == live.rows.position
            parked = name_of(live.rows.parked_id) if whole and live.rows.parked_id else None
            shown.append({"seat": number, "tokens": tokens, "conversation": parked})
    return shown


def _seen_tokens(proxy: Proxy, live: LiveConversation, caller: Caller) -> int:
    rows: LiveRows = live.rows
    if rows.key is None:
        return 0
    if caller.is_operator:
        return rows.position
    if not holds(caller, rows.key.namespace):
        return 0
    if not caller.shares_namespace:
        return rows.position
    own: Iterable[tuple[int, Any]] = proxy.requests.own_parts(caller.owner, rows.key, [rows.units])
    return max((tokens for tokens, _ in own), default=0)


def _from_disk(proxy: Proxy, now_s: float) -> Mapping[str, Any] | None:
    """How far a conversation is read from disk, for a turn that runs or waits; None: none is."""
    under_way = None if proxy.disk is None else proxy.disk.under_way
    if under_way is None:
        return None
    return {
        "read_bytes": under_way.read_bytes,
        "total_bytes": under_way.total_bytes,
        "left_s": _rounded(under_way.left_s(now_s)),
    }


def budget_line(proxy: Proxy) -> Mapping[str, Any] | None:
    """Bytes of the two tiers, in short; None without parking."""
    store = proxy.services.store
    if store is None:
        return None
    ram, disk = store.stats(), store.disk_stats() if store.has_disk else None
    return {
        "conversations": ram.conversations if disk is None else len(store.table.all()),
        "ram": {"limit_bytes": ram.budget_bytes, "used_bytes": ram.bytes_in_use},
        "disk": None if disk is None else {"limit_bytes": disk.budget_bytes, "used_bytes": disk.bytes_in_use},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), READ_DIGITS)
