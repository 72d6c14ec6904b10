"""Absolute request targets (`GET http://host/path HTTP/1.1`), as clients that believe in a proxy send them, are served
as if their path alone had been sent."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

SCHEMES = (b"http://", b"https://")


class AbsoluteTargets:
    """Splits them into path and `host`, which counts instead of the header (RFC 9112, 3.2.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"].lower().startswith(SCHEMES):
            authority, slash, rest = scope["raw_path"].partition(b"://")[2].partition(b"/")
            host = authority.rpartition(b"@")[2]
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            raw_path = slash + rest or b"/"
            path = unquote(raw_path.decode("ascii"))
            scope = {**scope, "path": path, "raw_path": raw_path, "headers": [(b"host", host), *headers]}
        await self._app(scope, receive, send)
