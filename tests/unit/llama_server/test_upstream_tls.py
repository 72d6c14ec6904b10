"""A llama-server behind TLS: what is trusted, and what is said of a server that is not, or that breaks off."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parkd.config import Deadlines, UpstreamConfig
from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.llama_server.start import connect
from parkd.errors import ModelError, UpstreamDown, UpstreamFailed

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificates, is not installed")
PROPERTIES = {"total_slots": 1}
CUT_PATH = "/v1/models"
"""Answered with less than announced, and the end of the connection."""
WAIT_S = 5.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps(PROPERTIES).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body) + (self.path == CUT_PATH)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == CUT_PATH

    def log_message(self, *_: object) -> None:
        """A test's output says enough."""


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Makes a certificate that signs itself, for one `subjectAltName`: the files of the certificate and of its key."""

    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("certificate")
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=llama-server", "-addext", f"subjectAltName={name}"]
        words += ["-out", str(certificate), "-keyout", str(key)]
        subprocess.run([str(OPENSSL), "req", *words], check=True, capture_output=True)
        return certificate, key

    return make


@contextmanager
def serving(certificate: Path, key: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(WAIT_S)


@contextmanager
def speaking(answer: bytes | None) -> Iterator[str]:
    """A server that answers the client's first words with these, and closes; None: it only listens."""

    def serve() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken:
                taken.recv(65536)
                taken.sendall(answer or b"")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        if answer is not None:
            thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    if answer is not None:
        thread.join(WAIT_S)


@contextmanager
def client_of(url: str, **deadlines: float) -> Iterator[UpstreamClient]:
    client = UpstreamClient(url, deadlines=Deadlines(**deadlines))
    try:
        yield client
    finally:
        client.close()


def test_a_certificate_that_is_named_is_trusted_and_its_connection_kept(
    certified: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certified("IP:127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(certificate, key) as url, client_of(url) as client:
        for _ in range(3):
            assert client.properties() == PROPERTIES
        assert client.connections == 1
        with pytest.raises(UpstreamFailed, match="did not complete its answer to /v1/models"):
            client.models()
        assert client.properties() == PROPERTIES
        assert client.connections == 2


def test_a_certificate_of_nobody_known_is_refused_with_what_to_do(
    certified: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    with serving(*certified("IP:127.0.0.1")) as url:
        with client_of(url) as client, pytest.raises(UpstreamDown, match=r"\(self.signed certificate\).*SSL_CERT_FILE"):
            client.properties()
        with pytest.raises(ModelError, match="SSL_CERT_FILE"):
            connect(UpstreamConfig(url, slot_dir=tmp_path, cache_dir=tmp_path))


def test_a_certificate_of_another_host_is_refused(
    certified: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certified("DNS:elsewhere.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    refused = pytest.raises(UpstreamDown, match=r"not valid for '127\.0\.0\.1'\).*the certificate is for")
    with serving(certificate, key) as url, client_of(url) as client, refused:
        client.properties()


@pytest.mark.parametrize("answer", [b"", b"\x16\x03\x03", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_handshake_that_breaks_off_is_told_as_one(answer: bytes) -> None:
    broken = pytest.raises(UpstreamDown, match=r"The TLS handshake .* failed.*http://")
    with speaking(answer) as url, client_of(url) as client, broken:
        client.properties()


def test_a_handshake_without_an_end_has_a_deadline() -> None:
    late = pytest.raises(UpstreamDown, match=r"cannot be reached .*timed out")
    with speaking(None) as url, client_of(url, connect_s=0.2) as client, late:
        client.properties()
