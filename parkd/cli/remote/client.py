"""Asks a running parkd, and says what is wrong if there is none, if it wants a key, or if it is something else."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NoReturn
from urllib.parse import quote

import httpx

from parkd.errors import ConfigError

WAIT_S = 30.0
"""Longest silence of a server."""
FILE_WAIT_S = 120.0
"""The same where a file goes or comes: the server may read it from disk first."""
PIECE_BYTES = 1 << 20
NAME_BYTES = 200
"""Longest name of a conversation or request that is asked for: what a path may hold, with room."""
CAUSES_LIMIT = 8
"""Most errors behind an error that are looked at."""
NAME = "parkd"
"""What a server of ours says at `/`."""


class RemoteServer:
    """One server. Its methods raise ConfigError with what to do."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        headers = {"accept": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
        try:
            self._client = httpx.Client(base_url=url, headers=headers, timeout=WAIT_S, trust_env=False)
        except (httpx.InvalidURL, ValueError, UnicodeError) as error:
            raise ConfigError(f"--url {url}: {error}") from error
        if self._client.base_url.scheme not in ("http", "https") or not self._client.base_url.host:
            raise ConfigError(f"--url {url}: expected an address such as http://127.0.0.1:8080")

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Mapping[str, Any]:
        return self._told("GET", path, params=_params(query))

    def act(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return self._told(method, path, json=body or {}, headers={"x-parkd-action": "1"})

    def fetch(self, path: str, out: BinaryIO) -> None:
        """Writes the answer's bytes to `out` as they come."""
        with self._speaking(), self._client.stream("GET", path, timeout=FILE_WAIT_S) as answer:
            if not answer.is_success:
                answer.read()
                self._refuse(answer, _object(answer))
            out.writelines(answer.iter_bytes(PIECE_BYTES))

    def send(self, path: str, file: BinaryIO, size_bytes: int, content_type: str, **query: Any) -> Mapping[str, Any]:
        """Sends `size_bytes` of the file, from where it stands, and returns what is told of it."""
        headers = {"content-length": str(size_bytes), "content-type": content_type}
        pieces = iter(lambda: file.read(PIECE_BYTES), b"")
        return self._told("POST", path, content=pieces, params=_params(query), headers=headers, timeout=FILE_WAIT_S)

    def find(self, name: str) -> str:
        """The id of the one conversation that has this id, or whose id begins so."""
        known = [each["id"] for each in self.get("/parkd/conversations")["conversations"]]
        bare = name.partition(".")[0]
        found = [each for each in known if each == bare] or [each for each in known if bare and each.startswith(bare)]
        if len(found) == 1:
            return str(found[0])
        if found:
            raise ConfigError(
                f"{len(found)} conversations begin with {name!r}: {', '.join(found[:5])}. Give more of it"
            )
        raise ConfigError(f"no conversation {name!r} is live or parked at {self.url} (parkd ps lists them)")

    def _told(self, method: str, path: str, **sent: Any) -> Mapping[str, Any]:
        with self._speaking():
            answer = self._client.request(method, path, **sent)
            document = _object(answer)
            if not answer.is_success or document is None:
                self._refuse(answer, document)
            return document

    def _refuse(self, answer: httpx.Response, document: Mapping[str, Any] | None) -> NoReturn:
        """Raises ConfigError with what the server says, or with what it is."""
        self._check_product(answer, document)
        message = _message(document) or f"the server at {self.url} answered with status {answer.status_code}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            message = f"{message.rstrip('.')}. Give it with --api-key, or in PARKD_API_KEY"
        raise ConfigError(message)

    def _check_product(self, answer: httpx.Response, document: Mapping[str, Any] | None) -> None:
        """Raises ConfigError if the server is no parkd, or one that does not know the path."""
        root = _object(self._client.get("/"))
        if root is None or root.get("name") != NAME:
            raise ConfigError(f"what answers at {self.url} is no parkd: is --url right?")
        message = _message(document)
        if answer.status_code == httpx.codes.NOT_FOUND and (
            message is None or message.startswith("There is nothing at")
        ):
            raise ConfigError(f"the parkd at {self.url} is an older one that cannot tell this: update it")

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            tls = _tls_error(error)
            if isinstance(tls, ssl.SSLCertVerificationError):
                raise ConfigError(f"the certificate of {self.url} is not trusted: {tls.verify_message}") from error
            if tls is not None:
                plain = f"http{self.url.removeprefix('https')}"
                raise ConfigError(f"what answers at {self.url} speaks no TLS: is it {plain}?") from error
            raise ConfigError(f"no server answers at {self.url}: start one with `parkd`, or name its --url") from error
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            hint = " If it speaks TLS, its address begins with https://" if self.url.startswith("http:") else ""
            raise ConfigError(f"the server at {self.url} broke off, or speaks no HTTP: {error}.{hint}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"the server at {self.url} did not answer: {error}") from error


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """What of TLS is behind an error."""
    seen: BaseException | None = error
    for _ in range(CAUSES_LIMIT):
        if seen is None or isinstance(seen, ssl.SSLError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def in_path(name: str, what: str) -> str:
    """A name that the user gave, as one part of a path. Raises ConfigError, which calls it `what`, if nothing has such
    a name: a path with it would be another one, which the server would be blamed for."""
    is_part = name.strip(".") and "/" not in name and name.isprintable()
    if not is_part or len(name.encode()) > NAME_BYTES:
        raise ConfigError(f"{what} {name[:64]!r}: expected an id, at most {NAME_BYTES} printable characters without /")
    return quote(name, safe="")


def _params(query: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is asked for. Raises ConfigError for a text that no request can carry."""
    params = {name: value for name, value in query.items() if value is not None}
    for name, value in params.items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"--{name} {value[:64]!r}: expected printable characters")
    return params


def _object(answer: httpx.Response) -> Mapping[str, Any] | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _message(document: Mapping[str, Any] | None) -> str | None:
    error = None if document is None else document.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
