"""The query fields of parkd's own addresses: one that is not known is refused, since what it meant would be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from parkd.errors import InvalidRequest

OWN = "/parkd/"
FIELDS = {
    "/parkd/turns": ("since", "limit", "conversation", "request_id"),
    "/parkd/bill": ("since",),
    "/parkd/budget": ("ram_mib",),
    "/parkd/conversations/import": ("into",),
}
SHOWN_CHARACTERS = 64


def known_fields(path: str) -> tuple[str, ...] | None:
    """The fields that a route takes; None: any, since other servers' clients send what theirs take."""
    return FIELDS.get(path, ()) if path.startswith(OWN) else None


def check_fields(names: Iterable[str], known: tuple[str, ...] | None) -> None:
    """Raises InvalidRequest for a field that the route does not know, or that stands there twice."""
    if known is None:
        return
    for name, times in Counter(names).items():
        shown = name[:SHOWN_CHARACTERS]
        if name not in known:
            takes = f"takes {', '.join(f'`{each}`' for each in known)}" if known else "takes none"
            raise InvalidRequest(f"{shown!r} is no field of this address's query, which {takes}.", param=shown)
        if times > 1:
            raise InvalidRequest(f"`{shown}` stands in the query {times} times. Send it once.", param=shown)
