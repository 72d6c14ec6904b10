"""A server with an OpenAI-style API and no model, on a socket: as vLLM, SGLang, LM Studio and others say it.

What it has kept of prompts is counted by its own rule: four characters of a prompt are a token, and of two prompts of
one salt it keeps whole blocks of tokens that both begin with.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHARACTERS_A_TOKEN = 4
BLOCK_TOKENS = 16
MODEL = "fake-8b"
CONTEXT_TOKENS = 40_000

Events = Iterator[dict[str, Any] | bytes]
Script = Callable[[dict[str, Any]], Events]


def model_of(owner: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": owner, **more}]}


VLLM: dict[str, Any] = {
    "/v1/models": model_of("vllm", root="/models/fake-8b", max_model_len=CONTEXT_TOKENS),
    "/version": {"version": "0.32.0"},
}
SGLANG: dict[str, Any] = {
    "/v1/models": model_of("sglang", root="org/fake-8b", max_model_len=CONTEXT_TOKENS),
    "/get_model_info": {"model_path": "org/fake-8b", "is_generation": True},
}
LLAMA: dict[str, Any] = {
    "/v1/models": model_of("llamacpp", meta={"n_ctx_train": 131072}),
    "/props": {"default_generation_settings": {"n_ctx": CONTEXT_TOKENS}, "build_info": "b9000-fake", "total_slots": 4},
}
LM_STUDIO: dict[str, Any] = {
    "/v1/models": model_of("organization_owner"),
    "/api/v0/models": {
        "data": [
            {"id": MODEL, "state": "loaded", "max_context_length": 131072, "loaded_context_length": CONTEXT_TOKENS}
        ]
    },
}
OMLX: dict[str, Any] = {"/v1/models": model_of("omlx", max_model_len=CONTEXT_TOKENS)}
OLLAMA: dict[str, Any] = {"/v1/models": model_of("library"), "/api/version": {"version": "0.21.0"}}
TGI: dict[str, Any] = {
    "/v1/models": model_of("fake"),
    "/info": {"router": "text-generation-router", "version": "3.3.6", "max_total_tokens": CONTEXT_TOKENS},
}
HOSTED: dict[str, Any] = {"/v1/models": model_of("system")}
FLAVOURS = {
    "vLLM": VLLM,
    "SGLang": SGLANG,
    "llama-server": LLAMA,
    "LM Studio": LM_STUDIO,
    "oMLX": OMLX,
    "Ollama": OLLAMA,
    "TGI": TGI,
    "OpenAI-style": HOSTED,
}


def said(text: str, **more: Any) -> dict[str, Any]:
    """A chunk of a chat with a piece of text."""
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": None}]}


def thought(text: str, name: str = "reasoning_content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {name: text}, "finish_reason": None}]}


def called(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    head = {} if name is None else {"id": f"chatcmpl-tool-{index}", "type": "function"}
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": index, **head, "function": function}]}}]}


def ended(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


@dataclass
class Kept:
    """What the server has kept of one salt."""

    prompts: list[str] = field(default_factory=list)

    def cached_tokens(self, prompt: str) -> int:
        common = max((_common(prompt, other) for other in self.prompts), default=0)
        whole = (len(prompt) - 1) // CHARACTERS_A_TOKEN  # the last token is always computed
        return min(common // CHARACTERS_A_TOKEN, whole) // BLOCK_TOKENS * BLOCK_TOKENS


def _common(one: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class FakeUpstream:
    """What a test changes: `script` is what is answered to a body, `usage` what is told of it, `refuse` an error in
    place of an answer, `tells_cached` whether it counts what it had."""

    def __init__(self, answers: Mapping[str, Any] = VLLM, *, key: str | None = None) -> None:
        self.answers = dict(answers)
        self.key = key
        self.script: Script = lambda _body: iter([said("Hello"), said(" there."), ended()])
        self.usage: Callable[[dict[str, Any], int, int, int], dict[str, Any] | None] = usage_document
        self.refuse: Callable[[dict[str, Any]], tuple[int, dict[str, str], Any] | None] = lambda _body: None
        self.posts: dict[str, Callable[[dict[str, Any]], Any]] = {}
        """Answers to other paths."""
        self.tells_cached = True
        self.ends_with_done = True
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.left: list[dict[str, Any]] = []
        """Bodies of requests whose client was gone before the answer's end."""
        self.connections: list[socket.socket] = []
        self.running = 0
        self.most_running = 0
        self._kept: dict[str | None, Kept] = {}
        self._lock = threading.Lock()
        upstream = self

        class Handler(_Handler):
            owner = upstream

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeUpstream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """It is gone, and nothing listens at its address. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(10)
            self._server.server_close()
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def prompt_of(self, body: dict[str, Any]) -> str:
        """The prompt as the server reads it: tools, then messages."""
        if "prompt" in body:
            prompt = body["prompt"]
            return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        return json.dumps(body.get("tools", [])) + "".join(json.dumps(message) for message in body["messages"])

    def note(self, body: dict[str, Any]) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them it had; it has them all from now on."""
        prompt = self.prompt_of(body)
        with self._lock:
            kept = self._kept.setdefault(body.get("cache_salt"), Kept())
            cached = kept.cached_tokens(prompt)
            kept.prompts.append(prompt)
        return len(prompt) // CHARACTERS_A_TOKEN, cached

    def forget(self) -> None:
        self._kept.clear()


def usage_document(body: dict[str, Any], prompt: int, cached: int, output: int) -> dict[str, Any]:
    document: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if cached >= 0:
        document["prompt_tokens_details"] = {"cached_tokens": cached}
    del body
    return document


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FakeUpstream

    def setup(self) -> None:
        super().setup()
        self.owner.connections.append(self.connection)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        owner = self.owner
        if not self._has_key():
            return
        if self.path in owner.answers:
            self._document(200, owner.answers[self.path])
        else:
            self._document(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._has_key():
            return
        if not self.path.startswith("/v1/"):
            known = self.path in owner.posts
            self._document(200 if known else 404, owner.posts[self.path](body) if known else {"detail": "Not Found"})
            return
        with owner._lock:
            owner.paths.append(self.path)
            owner.bodies.append(body)
        refusal = owner.refuse(body)
        if refusal is not None:
            status, headers, document = refusal
            self._document(status, document, headers)
            return
        with owner._lock:
            owner.running += 1
            owner.most_running = max(owner.most_running, owner.running)
        try:
            self._stream(body)
        except OSError:
            owner.left.append(body)
            self.close_connection = True
        finally:
            with owner._lock:
                owner.running -= 1

    def _has_key(self) -> bool:
        if self.owner.key is None or self.headers.get("authorization") == f"Bearer {self.owner.key}":
            return True
        self._document(401, {"error": {"message": "Invalid API key", "type": "auth"}})
        return False

    def _document(self, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        owner = self.owner
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        prompt, cached = owner.note(body)
        output = 0
        for event in owner.script(body):
            self._check_there()
            if isinstance(event, bytes):
                self._chunk(event)
                continue
            choice = (event.get("choices") or [{}])[0]
            text = choice.get("delta", {}).get("content") or choice.get("text")
            output += len(choice.get("token_ids") or ()) or bool(text)
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        usage = owner.usage(body, prompt, cached if owner.tells_cached else -1, output)
        if usage is not None and body.get("stream_options", {}).get("include_usage"):
            self._chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if owner.ends_with_done:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _check_there(self) -> None:
        """Raises BrokenPipeError if the client has closed the connection."""
        connection: socket.socket = self.connection
        if select.select([connection], [], [], 0)[0] and not connection.recv(1, socket.MSG_PEEK):
            raise BrokenPipeError


class Held:
    """A script that waits in the middle of its answer until it is let go, and notices when its client leaves."""

    def __init__(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        self._before, self._after = before, after
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, _body: dict[str, Any]) -> Events:
        yield from self._before
        self.reached.set()
        until_s = time.monotonic() + 20
        while not self.go_on.wait(0.01):
            assert time.monotonic() < until_s, "nobody let it go on"
            yield b": waiting\n\n"  # makes the server look whether its client is there
        yield from self._after
