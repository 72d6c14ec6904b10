"""Everything that is said to a llama-server over HTTP, with a deadline on each answer.

Errors are translated here and nowhere else:

    it cannot be reached, or is still loading      UpstreamDown
    it is silent for too long                      UpstreamTimeout
    it breaks off, or answers what is no JSON      UpstreamFailed
    it says no (`{"error": {...}}`)                UpstreamRefused, of which the caller knows what it means

API: llama.cpp, `tools/server/README.md`.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import orjson

from parkd.engine_adapter.llama_server.stream import CompletionStream, error_text
from parkd.errors import UpstreamDown, UpstreamFailed, UpstreamTimeout

MOST_ANSWER_BYTES = 512 * 1024 * 1024
"""Of an answer that is one document: the tokens of a very long prompt fit many times over."""
MOST_CONNECTIONS = 16
"""The engine's thread has one; the others are of workers that render and tokenise."""
IDLE_CONNECTION_S = 4.0
"""Shorter than the 5 s after which the server closes one, so that no request meets it closing."""
LOADING = 503
"""What a llama-server answers while it loads its model."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; each bounds a whole answer but the last, which bounds the silence inside one."""

    connect_s: float = 5.0
    answer_s: float = 60.0
    """Templates, tokens, properties and the state of slots."""
    file_s: float = 300.0
    """Saving and restoring a slot: so long may its disk take."""
    silence_s: float = 600.0
    """Between two events of a completion: so long may reading one batch of a prompt take."""


class UpstreamRefused(UpstreamFailed):
    """The server understood and said no."""

    def __init__(self, upstream_status: int, text: str, kind: str, details: Mapping[str, Any]) -> None:
        super().__init__(f"The llama-server refused ({upstream_status}): {text} Its log may say more.")
        self.upstream_status = upstream_status
        self.text = text
        """In the server's words."""
        self.kind = kind
        """`invalid_request_error`, `server_error`, `exceed_context_size_error`, ..."""
        self.details = details
        """The whole `error` object."""


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """What a slot's action did."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `/slots` describes it."""

    id: int
    is_processing: bool
    tokens: int | None
    """That it holds; None where this server does not say, or no request has used the slot."""
    task: int | None


class UpstreamClient:
    """One llama-server. Thread-safe. Waits; what a failure means is the caller's to know."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines = Deadlines(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self._deadlines = deadlines
        self._monotonic = monotonic
        self._connections = 0
        self._headers = _headers(httpx.URL(self.url), api_key)
        self._urls: dict[str, httpx.URL] = {}
        """By path: there are few."""
        # Not a client of the library: redirects, cookies and its other services cost a third of each request's time.
        self._http = httpx.HTTPTransport(
            limits=httpx.Limits(max_connections=MOST_CONNECTIONS, keepalive_expiry=IDLE_CONNECTION_S),
            trust_env=False,  # a proxy named for the internet has no part between two processes of one machine
        )

    @property
    def connections(self) -> int:
        """Opened so far. A server that ended has closed its own, so what talks to its successor is a new one."""
        return self._connections

    def properties(self) -> Mapping[str, Any]:
        return self._object("GET", "/props")

    def models(self) -> Mapping[str, Any]:
        """The first entry of `/v1/models`: name and `meta`."""
        document = self._object("GET", "/v1/models")
        data = document.get("data")
        if not isinstance(data, list) or not data or not isinstance(data[0], Mapping):
            raise self._nonsense("/v1/models", "it lists no model")
        return data[0]

    def adapters(self) -> list[Mapping[str, Any]]:
        """LoRA adapters: `id`, `path` and `scale` of each."""
        listed = self._call("GET", "/lora-adapters", None, self._deadlines.answer_s)
        if not isinstance(listed, list):
            raise self._nonsense("/lora-adapters", "it is no list")
        return listed

    def slots(self) -> list[SlotState]:
        listed = self._call("GET", "/slots", None, self._deadlines.answer_s)
        try:
            return [
                SlotState(
                    int(each["id"]), bool(each["is_processing"]), each.get("n_prompt_tokens"), each.get("id_task")
                )
                for each in listed
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise self._nonsense("/slots", "it is no list of slots") from error

    def apply_template(self, body: Mapping[str, Any]) -> str:
        text = self._object("POST", "/apply-template", body).get("prompt")
        if not isinstance(text, str):
            raise self._nonsense("/apply-template", "it holds no `prompt`")
        return text

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        tokens = self._object("POST", "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self._nonsense("/tokenize", "it holds no list of `tokens`")
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        text = self._object("POST", "/detokenize", {"tokens": list(token_ids)}).get("content")
        if not isinstance(text, str):
            raise self._nonsense("/detokenize", "it holds no `content`")
        return text

    def save(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "save", {"filename": filename}, "n_saved", "n_written")

    def restore(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "restore", {"filename": filename}, "n_restored", "n_read")

    def complete(self, body: Mapping[str, Any]) -> CompletionStream:
        """Begins a streamed completion; the caller closes it. Returns once the server has begun to answer."""
        silence_s = self._deadlines.silence_s
        timeout = httpx.Timeout(silence_s, connect=self._deadlines.connect_s)
        request = self._request("POST", "/completion", body, timeout)
        with self._translated("/completion"):
            response = self._sent(request)
        try:
            if response.status_code != 200:
                with self._translated("/completion"):
                    raw = self._whole(response, self._monotonic() + self._deadlines.answer_s)
                raise self._refusal("/completion", response.status_code, raw)
            kind = response.headers.get("content-type", "")
            if "text/event-stream" not in kind:
                raise self._nonsense("/completion", f"it is of type {kind or 'none'!r}, not an event stream")
        except BaseException:
            response.close()
            raise
        return CompletionStream(
            response.iter_bytes(), response.close, lambda: self._translated("/completion"), silence_s, self._monotonic
        )

    def close(self) -> None:
        self._http.close()

    def _slot(self, slot: int, action: str, body: Mapping[str, Any], tokens: str, size: str) -> SlotAnswer:
        path = f"/slots/{slot}?action={action}"
        answer = self._call("POST", path, body, self._deadlines.file_s)
        if not isinstance(answer, Mapping) or not all(isinstance(answer.get(name), int) for name in (tokens, size)):
            raise self._nonsense(path, f"it does not tell `{tokens}` and `{size}`")
        if answer.get("id_slot", slot) != slot:  # an id that it does not have is taken for another one
            raise self._nonsense(path, f"it speaks of slot {answer['id_slot']}")
        return SlotAnswer(answer[tokens], answer[size])

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        answer = self._call(method, path, body, self._deadlines.answer_s)
        if not isinstance(answer, Mapping):
            raise self._nonsense(path, "it is no JSON object")
        return answer

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        until_s = self._monotonic() + deadline_s
        timeout = httpx.Timeout(deadline_s, connect=self._deadlines.connect_s)
        request = self._request(method, path, body, timeout)
        with self._translated(path):
            response = self._sent(request)
            try:
                raw = self._whole(response, until_s)
            finally:
                response.close()
        if response.status_code != 200:
            raise self._refusal(path, response.status_code, raw)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise self._nonsense(path, "it is no JSON") from error

    def _sent(self, request: httpx.Request) -> httpx.Response:
        """Sent once more where no answer began: the server may close a connection in the moment it is used again."""
        try:
            response = self._http.handle_request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            response = self._http.handle_request(request)
        response.request = request
        return response

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: httpx.Timeout) -> httpx.Request:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.url + path)
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        extensions = {"trace": self._trace, "timeout": timeout.as_dict()}
        return httpx.Request(method, url, headers=self._headers, content=content, extensions=extensions)

    def _trace(self, event: str, _info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connections += 1

    def _whole(self, response: httpx.Response, until_s: float) -> bytes:
        """The body, within the deadline also if it comes byte by byte."""
        parts, size = [], 0
        for part in response.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > MOST_ANSWER_BYTES:
                raise self._nonsense(response.url.path, "it is too long")
            if self._monotonic() > until_s:
                raise self._too_slow(response.url.path)
        return b"".join(parts)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise UpstreamDown(
                f"The llama-server at {self.url} cannot be reached ({error}). Start it, or name another one "
                f"with --upstream."
            ) from error
        except httpx.TimeoutException as error:
            raise self._too_slow(path) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise UpstreamFailed(
                f"The llama-server at {self.url} broke off its answer to {path} ({error or type(error).__name__}). "
                f"Send the request again; if that fails too, look at its log."
            ) from error

    def _too_slow(self, path: str) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"The llama-server at {self.url} did not answer {path} in time. Look whether it still runs, or allow it "
            f"more with --upstream-timeout."
        )

    def _refusal(self, path: str, status: int, raw: bytes) -> UpstreamFailed:
        if status == LOADING:
            return UpstreamDown(f"The llama-server at {self.url} is loading its model. Send the request again soon.")
        try:
            error = orjson.loads(raw)["error"]
            return UpstreamRefused(status, error_text(error), str(error.get("type", "")), error)
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
            return self._nonsense(path, f"it has status {status} and no error that can be read")

    def _nonsense(self, path: str, what: str) -> UpstreamFailed:
        return UpstreamFailed(
            f"What answers at {self.url}{path} is not a llama-server that parkd knows: {what}. Check --upstream."
        )


def _headers(url: httpx.URL, api_key: str | None) -> httpx.Headers:
    """Of every request; a name and password in the address stand for a key."""
    headers = {"accept": "*/*", "content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    elif url.userinfo:
        headers["authorization"] = f"Basic {b64encode(unquote_to_bytes(url.userinfo)).decode()}"
    return httpx.Headers(headers)
