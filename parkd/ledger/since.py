"""From when on: an age such as `7d`, a date, or a Unix time."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from parkd.errors import InvalidRequest

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST_S = 3660 * 86400
"""Ten years."""
_AGE = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)
_UNIX = re.compile(r"[0-9]{9,11}(\.[0-9]{1,6})?", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)


def since_s(text: str, now_s: float) -> float:
    """Unix time. Raises InvalidRequest."""
    age = _AGE.fullmatch(text)
    if age is not None:
        length_s = int(age[1]) * UNITS_S[age[2]]
        if length_s <= LONGEST_S:
            return now_s - length_s
    if _UNIX.fullmatch(text):
        return float(text)
    if _DATE.fullmatch(text):
        try:
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError:
            pass
    raise InvalidRequest(
        "`since` must be an age of at most ten years such as 90m, 24h, 7d or 4w, a date such as 2026-12-01 (UTC), or a "
        "Unix time in seconds.",
        param="since",
    )
