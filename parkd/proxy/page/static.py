"""The files of the page: read once, compressed once, sent under a strict content policy.

They contain nothing of any conversation, so they need no key. What they show they ask for, with the key that the user
gives them.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from parkd.errors import NotFound

FOLDER = Path(__file__).parent / "files"
START = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing from elsewhere, nothing inline, and no text that becomes markup."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "Accept, Accept-Encoding",
}
_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class StaticFile:
    kind: str
    plain: bytes
    packed: bytes
    """The same, by gzip."""
    tag: str
    """Changes with the content."""

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        data = path.read_bytes()
        tag = f'"{blake2b(data, digest_size=_TAG_BYTES).hexdigest()}"'
        return cls(TYPES[path.suffix], data, gzip.compress(data, 9, mtime=0), tag)


class StaticFiles:
    """All files of one folder, by name."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Raises OSError."""
        self._files: Mapping[str, StaticFile] = {
            path.name: StaticFile.read(path) for path in sorted(folder.iterdir()) if path.suffix in TYPES
        }

    @property
    def bytes(self) -> int:
        """Of all files, as they are."""
        return sum(len(file.plain) for file in self._files.values())

    def response(self, name: str, request: Request) -> Response:
        """Raises NotFound."""
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"The page has no file {name[:64]!r}. It begins at /.")
        headers = {**HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.packed, headers={**headers, "content-encoding": "gzip"}, media_type=file.kind)
        return Response(file.plain, headers=headers, media_type=file.kind)


def wants_page(accept: str) -> bool:
    """Whether a client asks for HTML by name, as browsers do. Programs accept anything, or JSON."""
    kinds = (part.split(";") for part in accept.split(","))
    return any(kind.strip().lower() == "text/html" and not _refused(rest) for kind, *rest in kinds)


def _refused(parameters: list[str]) -> bool:
    return any(parameter.replace(" ", "").lower() in ("q=0", "q=0.0", "q=0.00", "q=0.000") for parameter in parameters)
