"""Who may ask: API keys, and the Host and Origin of requests that a web page may have caused. Pure."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

from parkd.errors import Forbidden, Unauthorized
from parkd.types import NamedKey

NAMESPACE_BYTES = 16
SHOWN_CHARACTERS = 8
"""Of the namespace, in logs: enough to tell keys apart, nothing of the key."""


@dataclass(frozen=True, slots=True)
class Caller:
    namespace: str
    """The cache namespace, the server's word for the key: one that several keys may share, or else derived from the
    key; empty without one."""
    name: str = ""
    """The key's name, if it has one."""
    owner: str = ""
    """Tells keys apart, also those that share a namespace, and nothing of the key: who may see a request's report."""

    @property
    def shown(self) -> str:
        """For the log."""
        return self.name or self.namespace[:SHOWN_CHARACTERS] or "-"


def authenticate(headers: Mapping[str, str], api_keys: Sequence[str], named_keys: Sequence[NamedKey] = ()) -> Caller:
    """Raises Unauthorized. Without configured keys everyone is the same caller, whatever key they send."""
    if not api_keys and not named_keys:
        return Caller("")
    sent = _sent_key(headers)
    if not sent:
        raise Unauthorized(
            "This server asks for an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )
    # every key is compared, so that the time tells neither which matched nor how far
    known = [*named_keys, *(NamedKey("", key) for key in api_keys)]
    matches = [hmac.compare_digest(sent.encode(), key.key.encode()) for key in known]
    if not any(matches):
        raise Unauthorized("The API key is not one of this server's. Check the key that your client sends.")
    key = known[matches.index(True)]
    own = namespace_of(sent)
    return Caller(own if key.namespace is None else f"={key.namespace}", key.name, own)


def narrowed(namespace: str, salt: str | None) -> str:
    """A client's own part of a namespace. No salt reaches another namespace, nor another salt's part."""
    if not salt:
        return namespace
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAMESPACE_BYTES, person=b"parkd-salt")
    return f"{namespace}/{digest.hexdigest()}"


def namespace_of(api_key: str) -> str:
    return blake2b(api_key.encode(), digest_size=NAMESPACE_BYTES, person=b"parkd-namespace").hexdigest()


def check_origin(headers: Mapping[str, str], *, bound_host: str, allowed_origins: Sequence[str]) -> None:
    """Keeps web pages from driving a local server. Raises Forbidden.

    A page whose name was rebound to a loopback address sends its own name as Host; a page elsewhere that posts here
    sends its Origin. Programs send no Origin and a loopback Host.
    """
    host = _name_of(f"//{headers.get('host', '')}")
    if is_loopback(bound_host) and host and not is_loopback(host):
        raise Forbidden(
            "This server listens on loopback only and answers to loopback names only. Use http://127.0.0.1 or "
            "http://localhost, or start parkd with --host."
        )
    origin = headers.get("origin")
    if origin is None or origin in allowed_origins:
        return
    name = _name_of(origin)
    if not is_loopback(name) and name != host:
        raise Forbidden(
            "Web pages, apps and browser extensions of this origin may not use this server. If they should, start "
            "parkd with --cors-origin and the origin that they send."
        )


def is_loopback(host: str) -> bool:
    """True for names and addresses that never leave this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _sent_key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _name_of(url: str) -> str:
    """The host of a URL, without its port; one that no machine has if the URL is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "invalid"
