"""A client for one server, with a deadline for each answer.

Errors are translated only here:

    unreachable, still loading, or a TLS error            UpstreamDown
    silent for too long                                   UpstreamTimeout
    closed the connection early, or sent unexpected data  UpstreamFailed
    answered with an error (`{"error": {...}}`)           UpstreamRefused; the caller knows what it means
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import orjson

from parkd.config import Deadlines
from parkd.engine_adapter.http.lines import EventLines, error_text
from parkd.engine_adapter.http.wire import BrokenAnswer, CannotConnect, Hold, NoTls, NotTrusted, Wire, WireAnswer
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed, UpstreamTimeout

DEADLINES = Deadlines()
MOST_ANSWER_BYTES = 512 * 1024 * 1024
"""Maximum size of an answer that is not streamed: many times the tokens of a very long prompt."""
IDLE_CONNECTION_S = 4.0
"""Shorter than the 5 s after which most servers close an idle connection, so that no request meets a closing one."""
WRONG_KEY = (401, 403)
"""Statuses of answers to a request without the server's key."""
LOADING = 503
"""The status of a llama-server's answers while it loads its model."""


class UpstreamRefused(UpstreamFailed):
    """The server answered with an error."""

    def __init__(
        self,
        upstream_status: int,
        text: str,
        kind: str,
        details: Mapping[str, Any],
        called: str = "llama-server",
        retry_after: str = "",
    ) -> None:
        super().__init__(f"The {called} refused ({upstream_status}): {text} Its log may say more.")
        self.upstream_status = upstream_status
        self.text = text
        """The server's message."""
        self.kind = kind
        """`invalid_request_error`, `server_error`, `exceed_context_size_error`, ..."""
        self.details = details
        """The whole `error` object."""
        self.retry_after = retry_after
        """The header of that name."""


class HttpClient:
    """Thread-safe. Calls block; they raise the errors above."""

    def __init__(
        self,
        url: str,
        *,
        called: str,
        most_connections: int,
        api_key: str | None = None,
        deadlines: Deadlines = DEADLINES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`called` is what errors call the server."""
        self.url = url.rstrip("/")
        self.called = called
        self._deadlines = deadlines
        self._monotonic = monotonic
        self._wire = Wire(
            self.url,
            _headers(httpx.URL(self.url), api_key),
            most_connections=most_connections,
            idle_s=IDLE_CONNECTION_S,
        )

    @property
    def connections(self) -> int:
        """Connections opened so far. A server closes its connections when it ends, so a restart increases this."""
        return self._wire.opened

    def object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """A JSON object that the server answers with."""
        answer = self.call(method, path, body, self._deadlines.answer_s)
        if not isinstance(answer, Mapping):
            raise self.nonsense(path, "it is not a JSON object")
        return answer

    def call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        """The JSON value that the server answers with. The deadline is for the whole of it."""
        until_s = self._monotonic() + deadline_s
        with self._translated(path):
            answer = self._sent(method, path, body, deadline_s)
            try:
                raw = self._whole(path, answer, until_s)
            finally:
                answer.close()
        if answer.status != 200:
            raise self.refusal(path, answer.status, answer.headers.get("retry-after") or "", raw)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise self.nonsense(path, "it is not JSON") from error

    def events(self, path: str, body: Mapping[str, Any], hold: Hold | None = None) -> EventLines:
        """Sends a request that is answered by a stream of events, which the caller must close. Returns once the server
        begins to answer."""
        silence_s = self._deadlines.silence_s
        with self._translated(path):
            answer = self._sent("POST", path, body, silence_s, hold)
        try:
            if answer.status != 200:
                with self._translated(path):
                    raw = self._whole(path, answer, self._monotonic() + self._deadlines.answer_s)
                raise self.refusal(path, answer.status, answer.headers.get("retry-after") or "", raw)
            kind = answer.headers.get("content-type", "")
            if "text/event-stream" not in kind:
                raise self.nonsense(path, f"it is of type {kind or 'none'!r}, not an event stream")
        except BaseException:
            answer.close()
            raise
        return EventLines(
            iter(answer), answer.close, lambda: self._translated(path), silence_s, self._monotonic, self.called
        )

    def close(self) -> None:
        self._wire.close()

    def refusal(self, path: str, status: int, retry_after: str, raw: bytes) -> UpstreamFailed:
        """The error for an answer with another status than 200. `retry_after` is its header of that name."""
        if status == LOADING:
            return UpstreamDown(f"The {self.called} at {self.url} is loading its model. Send the request again soon.")
        try:
            error = orjson.loads(raw)["error"]
            text = error_text(error)
            if status in WRONG_KEY:
                text += " Name the key that it was started with by --upstream-api-key or PARKD_UPSTREAM_API_KEY."
            return UpstreamRefused(status, text, str(error.get("type", "")), error, self.called, retry_after)
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
            return self.nonsense(path, f"its status is {status}, without a readable error")

    def nonsense(self, path: str, what: str) -> UpstreamFailed:
        return UpstreamFailed(
            f"The answer of {self.url}{path} is not that of a supported {self.called}: {what}. Check --upstream."
        )

    def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, silence_s: float, hold: Hold | None = None
    ) -> WireAnswer:
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        held = {} if hold is None else {"hold": hold}
        return self._wire.send(method, path, content, connect_s=self._deadlines.connect_s, silence_s=silence_s, **held)

    def _whole(self, path: str, answer: WireAnswer, until_s: float) -> bytes:
        """The body. The deadline applies to the whole of it, even if it arrives byte by byte."""
        parts, size = [], 0
        for part in answer:
            parts.append(part)
            size += len(part)
            if size > MOST_ANSWER_BYTES:
                raise self.nonsense(path, "it is too long")
            if self._monotonic() > until_s:
                raise self._too_slow(path)
        return b"".join(parts)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except NotTrusted as error:
            raise UpstreamDown(
                f"The certificate of the {self.called} at {self.url} is not trusted ({error}). Name a file with its "
                f"authority's certificate, or with its own, in the environment variable SSL_CERT_FILE; or name the "
                f"host that the certificate is for with --upstream."
            ) from error
        except NoTls as error:
            raise UpstreamDown(
                f"The TLS handshake with the {self.called} at {self.url} failed ({error}). If it speaks plain HTTP, "
                f"name it with http:// in --upstream; else look at its log, or at that of the proxy in front of it."
            ) from error
        except CannotConnect as error:
            raise UpstreamDown(
                f"The {self.called} at {self.url} cannot be reached ({error}). Start it, or name another one "
                f"with --upstream."
            ) from error
        except TimeoutError as error:
            raise self._too_slow(path) from error
        except BrokenAnswer as error:
            raise UpstreamFailed(
                f"The {self.called} at {self.url} did not complete its answer to {path} ({error}). "
                f"Send the request again; if that fails too, look at its log."
            ) from error

    def _too_slow(self, path: str) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"The {self.called} at {self.url} did not answer {path} in time. Check that it still runs, or give it "
            f"more time with --upstream-timeout."
        )


def _headers(url: httpx.URL, api_key: str | None) -> dict[str, str]:
    """The headers of every request. A user name and password in the address are sent if there is no key. Raises
    ModelError."""
    headers = {"accept": "*/*", "content-type": "application/json"}
    if api_key is not None:
        if not api_key.isascii() or not api_key.isprintable():
            raise ModelError(
                "--upstream-api-key contains characters that no key may contain, such as a newline. Remove them."
            )
        headers["authorization"] = f"Bearer {api_key}"
    elif url.userinfo:
        headers["authorization"] = f"Basic {b64encode(unquote_to_bytes(url.userinfo)).decode()}"
    return headers
