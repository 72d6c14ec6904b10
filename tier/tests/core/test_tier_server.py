"""How the canary asks an OpenAI-style server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from parkd_tier.canary import Reply
from parkd_tier.server import Server

from parkd.errors import ConfigError


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({**body, "key": self.headers.get("authorization")})
        if body["prompt"] == [1]:
            self._send(400, {"error": "no such field"})
            return
        told = {"tokens": ["token_id:5", "token_id:7"], "token_logprobs": [-0.5, -1]}
        self._send(200, {"choices": [{"logprobs": told}]})

    def _send(self, status: int, document: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_is_asked_greedily_under_a_salt(url: str) -> None:
    server = Server(url + "/v1/", "secret", wait_s=0)
    assert server.ask([10, 11], "salt", {"parkd_tier": {"record": "a"}}) == Reply(
        ("token_id:5", "token_id:7"), (-0.5, -1.0)
    )
    [asked] = Handler.asked
    assert (asked["model"], asked["prompt"], asked["cache_salt"]) == ("a-model", [10, 11], "salt")
    assert (asked["temperature"], asked["max_tokens"], asked["logprobs"]) == (0, 12, 1)
    assert asked["kv_transfer_params"] == {"parkd_tier": {"record": "a"}}
    assert asked["key"] == "Bearer secret"


def test_what_a_server_refuses_is_said(url: str) -> None:
    with pytest.raises(OSError, match=r"400 .*no such field"):
        Server(url, None, wait_s=0).ask([1], "salt", {})


@pytest.mark.parametrize("address", ["file:///etc/passwd", "127.0.0.1:8000", "http://127.0.0.1:9"])
def test_what_is_no_server_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        Server(address, None, wait_s=0)
