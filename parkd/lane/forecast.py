"""What turns are expected to need, by what turns before them took: the schedule's only knowledge of time.

A turn's prompt is read at measured speed from where it would start. Its answer is expected to be as long as those of
its class; one that is longer already, to become twice as long.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from parkd.engine_adapter.base import EngineInfo
from parkd.lane.cost import CostMeter
from parkd.lane.schedule import Work
from parkd.lane.turn import Turn, output_limit
from parkd.types import TurnClass, TurnRequest

SIDE_TOKENS = 256
"""A request for no longer an answer, and without tools, is a side job."""
FIRST_ANSWER_TOKENS = 300.0
"""What an answer is expected to have before there was one."""
FIRST_TOKEN_S = 0.03
"""What a token is expected to take before one was measured."""
NEWEST_WEIGHT = 0.2
LEAST_SWITCH_S = 0.01
"""Parking and restoring takes some steps on two threads, however small the state is."""
TIERS = {"flex": TurnClass.BATCH, "batch": TurnClass.BATCH, "priority": TurnClass.INTERACTIVE}
"""`service_tier` of a request. Others do not choose a class."""
CLASS_FIELD = "parkd_class"
"""In a request's `metadata`: the name of its class."""


def class_of(body: Any, request: TurnRequest, key: str, rules: tuple[tuple[str, TurnClass], ...] = ()) -> TurnClass:
    """The class of a request: as the operator's rules say of its key, else as its body asks, else by what it asks for.
    `rules` are patterns of names of keys; the first that fits counts."""
    for pattern, kind in rules:
        if key and fnmatchcase(key, pattern):
            return kind
    metadata = body.get("metadata")
    named = metadata.get(CLASS_FIELD) if isinstance(metadata, dict) else None
    if isinstance(named, str) and named in {kind.value for kind in TurnClass}:
        return TurnClass(named)
    tier = body.get("service_tier")
    if isinstance(tier, str) and tier in TIERS:
        return TIERS[tier]
    most = request.max_output_tokens
    return TurnClass.SIDE if most is not None and most <= SIDE_TOKENS and not request.tools else TurnClass.INTERACTIVE


class Forecast:
    """Running means. Lives on the event loop."""

    def __init__(self, info: EngineInfo, costs: CostMeter, max_output_tokens: int | None = None) -> None:
        self._info = info
        self._costs = costs
        self._max_output_tokens = max_output_tokens
        self._answer_tokens = dict.fromkeys(TurnClass, FIRST_ANSWER_TOKENS)
        self._token_s = FIRST_TOKEN_S
        self._switch_factor = 1.0
        """How much longer switches take than the bandwidth promises."""

    def work(self, turn: Turn) -> Work:
        """What the turn needs from now on."""
        first_s, said = self._first_s(turn), 0 if turn.answer is None else turn.answer.output_tokens
        left = self._tokens_left(turn, said)
        switch_s = max(LEAST_SWITCH_S, self._switch_factor * self._moving_s(turn, said))
        can_pause = self._info.can_pause
        return Work(turn.kind, first_s, first_s + left * self._token_s, switch_s, can_pause=can_pause)

    def note_answer(self, turn: Turn) -> None:
        """Learns from an answer that has ended."""
        timings = turn.timings
        if timings.output_tokens:
            mean = self._answer_tokens[turn.kind]
            self._answer_tokens[turn.kind] = mean + NEWEST_WEIGHT * (timings.output_tokens - mean)
        if timings.output_tokens > 1 and timings.decode_s > 0:
            token_s = timings.decode_s / (timings.output_tokens - 1)
            self._token_s += NEWEST_WEIGHT * (token_s - self._token_s)

    def note_switch(self, turn: Turn, seconds: float) -> None:
        """Learns from a pause how long parking and restoring took."""
        promised_s = self._moving_s(turn, 0 if turn.answer is None else turn.answer.output_tokens)
        if promised_s > 0:
            self._switch_factor += NEWEST_WEIGHT * (seconds / promised_s - self._switch_factor)

    def _first_s(self, turn: Turn) -> float:
        costs, length = self._costs.measured, len(turn.prompt)
        if turn.answer is not None:
            return 0.0 if turn.answer.output_tokens else self._token_s
        if turn.report is None:
            return turn.start_cost_s if turn.start_cost_s is not None else costs.reading_s(0, length)
        progress = None if turn.explained is None else turn.explained.progress
        at = turn.report.reused_tokens + (0 if progress is None else progress.read_tokens)
        return costs.reading_s(at, length) + self._token_s

    def _tokens_left(self, turn: Turn, said: int) -> float:
        limit = output_limit(turn.request.max_output_tokens, self._max_output_tokens)
        expected = self._answer_tokens[turn.kind]
        units = self._info.most_units
        room = int(expected) + said if units is None else units - len(turn.prompt)
        most = max(0, (room if limit is None else min(limit, room)) - said)
        return min(most, expected - said if said < expected else said)

    def _moving_s(self, turn: Turn, said: int) -> float:
        layout = self._info.layout
        size = (len(turn.prompt) + said) * layout.row_bytes + layout.fixed_bytes
        return 2 * self._costs.measured.moving_s(size, from_disk=False)
