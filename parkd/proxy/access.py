"""Who may use the server: API keys, and checks of Host and Origin against requests from web pages. Pure."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

from parkd.errors import AmbiguousLength, Forbidden, Unauthorized
from parkd.types import NamedKey

NAMESPACE_BYTES = 16
SHOWN_CHARACTERS = 8
"""Characters of the namespace in logs: enough to tell keys apart, and nothing of the key itself."""

ACTION_HEADER = "x-parkd-action"


@dataclass(frozen=True, slots=True)
class Caller:
    namespace: str
    """The cache namespace: the one that the key file names, which several keys may share, else derived from the key;
    empty without a key."""
    name: str = ""
    """The name of the key, if it has one."""
    owner: str = ""
    """Derived from the key, and different even for keys that share a namespace. Decides who may see a request's
    report."""
    shares_namespace: bool = False
    """Other keys may be in the namespace, so that not all that is parked in it is the caller's own."""
    has_company: bool = False
    """Other keys are in the namespace now, and answered from what the caller brings. One that is alone in a namespace
    still need not have made all that is parked in it: others may have been there before."""
    is_operator: bool = False
    """May see what all keys do together, such as `/metrics`."""

    @property
    def shown(self) -> str:
        """How the log names the caller."""
        return self.name or self.namespace[:SHOWN_CHARACTERS] or "-"


def authenticate(
    headers: Mapping[str, str],
    api_keys: Sequence[str],
    named_keys: Sequence[NamedKey] = (),
    operator_keys: Sequence[str] = (),
) -> Caller:
    """The caller by its key. Without configured keys everyone is the same caller, whatever key they send, and the
    operator. Raises Unauthorized."""
    if not api_keys and not named_keys and not operator_keys:
        return Caller("", is_operator=True)
    sent = _sent_key(headers)
    if not sent:
        raise Unauthorized(
            "This server asks for an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )
    # All keys are compared, so that timing reveals neither which key matched nor how much of it.
    known = [*named_keys, *(NamedKey("", key) for key in (*api_keys, *operator_keys))]
    matches = [hmac.compare_digest(sent.encode(), key.key.encode()) for key in known]
    if not any(matches):
        raise Unauthorized("The API key is not one of this server's. Check the key that your client sends.")
    key = known[matches.index(True)]
    own = namespace_of(sent)
    is_operator = sum(hmac.compare_digest(sent.encode(), key.encode()) for key in operator_keys) > 0
    shares = key.namespace is not None
    has_company = shares and sum(other.namespace == key.namespace for other in named_keys) > 1
    return Caller(f"={key.namespace}" if shares else own, key.name, own, shares, has_company, is_operator)


def namespaces_of(
    api_keys: Sequence[str], named_keys: Sequence[NamedKey] = (), operator_keys: Sequence[str] = ()
) -> frozenset[str]:
    """The namespaces that callers may have, apart from their parts for salts."""
    named = {namespace_of(key.key) if key.namespace is None else f"={key.namespace}" for key in named_keys}
    return frozenset(named | {namespace_of(key) for key in (*api_keys, *operator_keys)}) or frozenset({""})


def check_operator(caller: Caller) -> None:
    """Raises Forbidden for a caller that may see only what its own key does."""
    if not caller.is_operator:
        raise Forbidden(
            "This page tells what all keys do, so it asks for an operator's key: send the one that parkd was started "
            "with (--operator-key), or start it with one."
        )


def narrowed(caller: Caller, salt: str | None) -> str:
    """The part of a caller's namespace for one `cache_salt`. No salt can reach another namespace, the part of another
    salt, or, where keys share the namespace, that of another key."""
    if not salt:
        return caller.namespace
    owner = caller.owner.encode() if caller.shares_namespace else b""
    text = salt.encode("utf-8", "surrogatepass")
    digest = blake2b(text, key=owner, digest_size=NAMESPACE_BYTES, person=b"parkd-salt")
    return f"{caller.namespace}/{digest.hexdigest()}"


def holds(caller: Caller, namespace: str) -> bool:
    """Whether a namespace is the caller's own, or the part of it for one salt. Where keys share it, not all in it is
    the caller's."""
    part = namespace.removeprefix(f"{caller.namespace}/")
    # Other names may begin with the caller's: a salt's part is a digest and nothing else.
    is_part = part != namespace and re.fullmatch(f"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}", part) is not None
    return namespace == caller.namespace or is_part


def namespace_of(api_key: str) -> str:
    return blake2b(api_key.encode(), digest_size=NAMESPACE_BYTES, person=b"parkd-namespace").hexdigest()


def has_two_lengths(headers: Mapping[str, str]) -> bool:
    """Whether a proxy in front may have gone by another length of the body: what follows it may then be a request that
    the proxy has never seen, so the connection must be closed behind the answer (RFC 9112, 6.1)."""
    return "content-length" in headers and "transfer-encoding" in headers


def check_length(headers: Mapping[str, str]) -> None:
    """Raises AmbiguousLength."""
    if has_two_lengths(headers):
        raise AmbiguousLength


def check_origin(headers: Mapping[str, str], *, bound_host: str, allowed_origins: Sequence[str]) -> None:
    """Keeps web pages from using a local server. Raises Forbidden.

    A page whose name was rebound to a loopback address (DNS rebinding) sends its own name as Host, and a page elsewhere
    that posts here sends its Origin. Programs send a loopback Host and no Origin.
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


def check_deliberate(headers: Mapping[str, str]) -> None:
    """For calls that change something and need no body. Raises Forbidden unless they have a header that a web page of
    another origin cannot send without asking first, which is answered with nothing that permits it."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and ACTION_HEADER not in headers:
        raise Forbidden(
            f"This call changes something, so it must have the header `{ACTION_HEADER}: 1` or "
            "`content-type: application/json`, which web pages elsewhere cannot send."
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine only."""
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
    """The host of a URL, without its port; a name that no machine has if the URL is not valid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "invalid"
