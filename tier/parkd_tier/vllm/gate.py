"""Whether state may be restored yet, and the requests of the canary that find it out.

Until a canary has passed for exactly these weights, settings, versions and devices, every look-up is a miss but those
of the canary itself. What it found is kept as FINGERPRINT.proof in the directory, and so holds until something changes.

A request of the canary says so in its `kv_transfer_params`, and proves with the token in the directory that whoever
sends it may read what is there:

    record NAME   the state that this request leaves is kept under a name
    replay NAME   look-ups find, position by position, what was kept under that name
    verdict       whether it passed
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parkd.store.chunks import Key
from parkd_tier.canary import PARAMS_KEY, Verdict
from parkd_tier.opening import Proof

log = logging.getLogger(__name__)

MOST_RECORDED = 16
WAIT_S = 30.0
"""Longest wait of a replay for what it replays to be on disk."""
TOLD_LIMIT_CHARS = 500

Place = tuple[int, int]
"""Position of a chunk's end, and its group of layers."""


@dataclass(frozen=True)
class Role:
    """What a request of the canary is."""

    record: str = ""
    replay: str = ""
    began_s: float = 0.0


class Gate:
    """`keep` is called with a verdict that is to outlive the process."""

    def __init__(
        self,
        token: str,
        proof: Proof | None,
        keep: Callable[[Verdict], None],
        *,
        is_needed: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._keep = keep
        self._is_needed = is_needed
        self._monotonic = monotonic
        self._recorded: OrderedDict[str, Mapping[Place, Key]] = OrderedDict()
        self._replayed = 0
        self.is_open = not is_needed or (proof is not None and proof.passed)
        if not is_needed:
            return
        if proof is None:
            log.warning(
                "nothing is restored yet: no canary has passed for this model, vLLM and device. Run parkd-tier canary "
                "once this server answers"
            )
        elif not proof.passed:
            log.warning("nothing is restored: the canary failed (%s)", proof.told)

    def role(self, params: Mapping[str, object] | None) -> Role | None:
        """What the canary wants of a request; None for everybody else's. A verdict is noted at once."""
        said = (params or {}).get(PARAMS_KEY)
        if not isinstance(said, dict) or not hmac.compare_digest(str(said.get("token", "")), self._token):
            return None
        verdict = said.get("verdict")
        if isinstance(verdict, dict):
            self._judge(Verdict(verdict.get("passed") is True, str(verdict.get("told", ""))[:TOLD_LIMIT_CHARS]))
        return Role(str(said.get("record", "")), str(said.get("replay", "")), self._monotonic())

    def record(self, role: Role, places: Mapping[Place, Key]) -> None:
        if role.record:
            self._recorded[role.record] = dict(places)
            while len(self._recorded) > MOST_RECORDED:
                self._recorded.popitem(last=False)

    def stand_in(self, role: Role, place: Place) -> Key | None:
        """The key of what a replay finds at a place; None if there is nothing."""
        return self._recorded.get(role.replay, {}).get(place)

    def knows(self, role: Role) -> bool:
        """What it replays has been recorded."""
        return role.replay in self._recorded

    def waits(self, role: Role) -> bool:
        """A replay may still wait for what it replays."""
        return self._monotonic() < role.began_s + WAIT_S

    def note_replayed(self, chunks: int) -> None:
        self._replayed += chunks

    def _judge(self, verdict: Verdict) -> None:
        if verdict.passed and not self._replayed:
            verdict = Verdict(False, "no state was restored for the canary")
        if verdict.passed:
            log.info("the canary has passed: %s", verdict.told)
        else:
            log.warning("the canary failed, and nothing is restored: %s", verdict.told)
        self.is_open = verdict.passed or not self._is_needed
        self._keep(verdict)


def encoded(verdict: Verdict, at_s: float) -> bytes:
    return json.dumps({"passed": verdict.passed, "told": verdict.told, "at_s": at_s}).encode()
