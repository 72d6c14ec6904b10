"""The HTTP client for a llama-server, with a deadline for each answer.

Errors are translated only here:

    unreachable, still loading, or a TLS error            UpstreamDown
    silent for too long                                   UpstreamTimeout
    closed the connection early, or sent unexpected data  UpstreamFailed
    answered with an error (`{"error": {...}}`)           UpstreamRefused; the caller knows what it means

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

from parkd.config import Deadlines
from parkd.engine_adapter.llama_server.stream import CompletionStream, error_text
from parkd.engine_adapter.llama_server.wire import BrokenAnswer, CannotConnect, NoTls, NotTrusted, Wire, WireAnswer
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed, UpstreamTimeout

DEADLINES = Deadlines()
MOST_ANSWER_BYTES = 512 * 1024 * 1024
"""Maximum size of an answer that is not streamed: many times the tokens of a very long prompt."""
MOST_CONNECTIONS = 16
"""One for the engine's thread; the others for the workers that render and tokenise."""
IDLE_CONNECTION_S = 4.0
"""Shorter than the 5 s after which the server closes an idle connection, so that no request meets a closing one."""
LOADING = 503
"""The status of a llama-server's answers while it loads its model."""


class UpstreamRefused(UpstreamFailed):
    """The server answered with an error."""

    def __init__(self, upstream_status: int, text: str, kind: str, details: Mapping[str, Any]) -> None:
        super().__init__(f"The llama-server refused ({upstream_status}): {text} Its log may say more.")
        self.upstream_status = upstream_status
        self.text = text
        """The server's message."""
        self.kind = kind
        """`invalid_request_error`, `server_error`, `exceed_context_size_error`, ..."""
        self.details = details
        """The whole `error` object."""


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """The result of saving or restoring a slot."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `/slots` describes it."""

    id: int
    is_processing: bool
    tokens: int | None
    """Tokens in the slot; None if this server does not tell, or no request has used the slot."""
    task: int | None


class UpstreamClient:
    """A client for one llama-server. Thread-safe. Calls block; they raise the errors above."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines = DEADLINES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self._deadlines = deadlines
        self._monotonic = monotonic
        self._wire = Wire(
            self.url,
            _headers(httpx.URL(self.url), api_key),
            most_connections=MOST_CONNECTIONS,
            idle_s=IDLE_CONNECTION_S,
        )

    @property
    def connections(self) -> int:
        """Connections opened so far. A server closes its connections when it ends, so a restart increases this."""
        return self._wire.opened

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
            raise self._nonsense("/lora-adapters", "it is not a list")
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
            raise self._nonsense("/slots", "it is not a list of slots") from error

    def apply_template(self, body: Mapping[str, Any]) -> str:
        text = self._object("POST", "/apply-template", body).get("prompt")
        if not isinstance(text, str):
            raise self._nonsense("/apply-template", "it has no `prompt`")
        return text

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        tokens = self._object("POST", "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self._nonsense("/tokenize", "it has no list of `tokens`")
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        text = self._object("POST", "/detokenize", {"tokens": list(token_ids)}).get("content")
        if not isinstance(text, str):
            raise self._nonsense("/detokenize", "it has no `content`")
        return text

    def save(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "save", {"filename": filename}, "n_saved", "n_written")

    def restore(self, slot: int, filename: str) -> SlotAnswer:
        return self._slot(slot, "restore", {"filename": filename}, "n_restored", "n_read")

    def complete(self, body: Mapping[str, Any]) -> CompletionStream:
        """Starts a streamed completion, which the caller must close. Returns once the server begins to answer."""
        silence_s = self._deadlines.silence_s
        with self._translated("/completion"):
            answer = self._sent("POST", "/completion", body, silence_s)
        try:
            if answer.status != 200:
                with self._translated("/completion"):
                    raw = self._whole("/completion", answer, self._monotonic() + self._deadlines.answer_s)
                raise self._refusal("/completion", answer.status, raw)
            kind = answer.headers.get("content-type", "")
            if "text/event-stream" not in kind:
                raise self._nonsense("/completion", f"it is of type {kind or 'none'!r}, not an event stream")
        except BaseException:
            answer.close()
            raise
        return CompletionStream(
            iter(answer), answer.close, lambda: self._translated("/completion"), silence_s, self._monotonic
        )

    def close(self) -> None:
        self._wire.close()

    def _slot(self, slot: int, action: str, body: Mapping[str, Any], tokens: str, size: str) -> SlotAnswer:
        path = f"/slots/{slot}?action={action}"
        answer = self._call("POST", path, body, self._deadlines.file_s)
        if not isinstance(answer, Mapping) or not all(isinstance(answer.get(name), int) for name in (tokens, size)):
            raise self._nonsense(path, f"it lacks `{tokens}` or `{size}`")
        if answer.get("id_slot", slot) != slot:  # the server replaces an unknown slot id by another one
            raise self._nonsense(path, f"it is about slot {answer['id_slot']}")
        return SlotAnswer(answer[tokens], answer[size])

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        answer = self._call(method, path, body, self._deadlines.answer_s)
        if not isinstance(answer, Mapping):
            raise self._nonsense(path, "it is not a JSON object")
        return answer

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        until_s = self._monotonic() + deadline_s
        with self._translated(path):
            answer = self._sent(method, path, body, deadline_s)
            try:
                raw = self._whole(path, answer, until_s)
            finally:
                answer.close()
        if answer.status != 200:
            raise self._refusal(path, answer.status, raw)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise self._nonsense(path, "it is not JSON") from error

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None, silence_s: float) -> WireAnswer:
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return self._wire.send(method, path, content, connect_s=self._deadlines.connect_s, silence_s=silence_s)

    def _whole(self, path: str, answer: WireAnswer, until_s: float) -> bytes:
        """The body. The deadline applies to the whole of it, even if it arrives byte by byte."""
        parts, size = [], 0
        for part in answer:
            parts.append(part)
            size += len(part)
            if size > MOST_ANSWER_BYTES:
                raise self._nonsense(path, "it is too long")
            if self._monotonic() > until_s:
                raise self._too_slow(path)
        return b"".join(parts)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except NotTrusted as error:
            raise UpstreamDown(
                f"The certificate of the llama-server at {self.url} is not trusted ({error}). Name a file with its "
                f"authority's certificate, or with its own, in the environment variable SSL_CERT_FILE; or name the "
                f"host that the certificate is for with --upstream."
            ) from error
        except NoTls as error:
            raise UpstreamDown(
                f"The TLS handshake with the llama-server at {self.url} failed ({error}). If it speaks plain HTTP, "
                f"name it with http:// in --upstream; else look at its log, or at that of the proxy in front of it."
            ) from error
        except CannotConnect as error:
            raise UpstreamDown(
                f"The llama-server at {self.url} cannot be reached ({error}). Start it, or name another one "
                f"with --upstream."
            ) from error
        except TimeoutError as error:
            raise self._too_slow(path) from error
        except BrokenAnswer as error:
            raise UpstreamFailed(
                f"The llama-server at {self.url} did not complete its answer to {path} ({error}). "
                f"Send the request again; if that fails too, look at its log."
            ) from error

    def _too_slow(self, path: str) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"The llama-server at {self.url} did not answer {path} in time. Check that it still runs, or give it "
            f"more time with --upstream-timeout."
        )

    def _refusal(self, path: str, status: int, raw: bytes) -> UpstreamFailed:
        if status == LOADING:
            return UpstreamDown(f"The llama-server at {self.url} is loading its model. Send the request again soon.")
        try:
            error = orjson.loads(raw)["error"]
            return UpstreamRefused(status, error_text(error), str(error.get("type", "")), error)
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
            return self._nonsense(path, f"its status is {status}, without a readable error")

    def _nonsense(self, path: str, what: str) -> UpstreamFailed:
        return UpstreamFailed(
            f"The answer of {self.url}{path} is not that of a supported llama-server: {what}. Check --upstream."
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
