"""`parkd ps`, `show`, `why`, `pin`, `keep`, `forget`, `bill`, `top` against a running server, and against none."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from parkd import cli
from parkd.cli.arguments import REMOTE_COMMANDS
from parkd.cli.remote import command, tables
from parkd.config import server_address
from parkd.ledger.ledger import Ledger
from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import running_in_thread

OPENSSL = shutil.which("openssl")
SYSTEM = "You answer in short and friendly sentences, and never say more than what was asked of you. " * 4


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARKD_URL", "PARKD_API_KEY", "PARKD_PORT", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def serving(path: Path | None = None, **config: Any) -> Iterator[str]:
    ledger = None if path is None else Ledger(path / "ledger.sqlite3")
    with running_in_thread(FakeEngine(), ProxyConfig(**config), ledger=ledger) as server:
        yield server.url
    if ledger is not None:
        ledger.close()


def say(url: str, text: str, clock: str = "10:04:31", key: str = "") -> str:
    messages = [{"role": "system", "content": f"It is {clock} now. {SYSTEM}"}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    headers = {"x-api-key": key} if key else {}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    return err if code else out


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(told(capsys, *words, "--json"))


def test_conversations_are_listed_shown_pinned_and_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as url:
        assert "no conversation is live or parked" in told(capsys, "ps", "--url", url)
        say(url, "Hello?")
        (one,) = shown(capsys, "ps", "--url", url)["conversations"]
        line = told(capsys, "ps", "--url", url).splitlines()[1]
        assert line.split()[:3] == [one["id"][:12], "live", f"{one['tokens']:,}"]
        assert "pinned" in told(capsys, "pin", one["id"], "--url", url)
        assert shown(capsys, "show", one["id"][:13], "--url", url)["pinned"] is True
        assert "until it is unpinned" in told(capsys, "show", one["id"], "--url", url)
        told(capsys, "unpin", one["id"], "--url", url)
        kept = shown(capsys, "keep", one["id"], "--for", "2h", "--url", url)
        assert kept["kept_until_s"] is not None
        for wrong in ("0s", "yesterday", "2026-12-01"):
            assert "--for" in told(capsys, "keep", one["id"], "--for", wrong, "--url", url, code=2)
        assert "forgot" in told(capsys, "forget", one["id"], "--url", url)
        assert shown(capsys, "ps", "--url", url)["conversations"] == []
        assert "parkd ps lists them" in told(capsys, "forget", one["id"], "--url", url, code=2)


def test_a_key_that_shares_its_namespace_forgets_without_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(named_keys=(NamedKey("carol", "k-carol", "team"),)) as url:
        say(url, "Hello?", key="k-carol")
        asks = ("--url", url, "--api-key", "k-carol")
        (one,) = shown(capsys, "ps", *asks)["conversations"]
        assert told(capsys, "forget", one["id"], *asks) == f"forgot {one['id']}, and what was answered in it\n"


def test_an_id_may_be_its_beginning_if_that_names_one(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        say(url, "Hello?")
        say(url, "Something else?")
        assert "2 conversations begin with 'conv'" in told(capsys, "pin", "conv", "--url", url, code=2)


def test_the_bill_and_why_tell_the_cause_and_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, watts=300.0, kwh_price=0.3) as url:
        assert "no turn since 7d" in told(capsys, "bill", "--url", url)
        say(url, "Hello?")
        second = say(url, "Hello?", "10:05:02")
        text = told(capsys, "bill", "--since", "1d", "--url", url)
        assert text.startswith("2 turns since 1d")
        assert "kWh" in text
        assert "[[rule]]" in text
        line = next(line for line in text.splitlines() if line.startswith("clock"))
        assert line.split()[1] == "1"
        document = shown(capsys, "bill", "--url", url)
        assert document["rules"][0]["line"] in text, "its lines are not broken, so that they can be copied"
        assert document["total"]["turns"] == 2
        last = told(capsys, "why", "--url", url)
        assert second in last
        assert "cause" in last
        assert "clock" in last
        assert shown(capsys, "why", second, "--url", url)["explained"]["request_id"] == second
        assert "since" in told(capsys, "bill", "--since", "soon", "--url", url, code=2)
        assert "No request" in told(capsys, "why", "req_unknown", "--url", url, code=2)


def test_why_works_without_a_ledger_for_a_request_that_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        first = say(url, "Hello?")
        assert first in told(capsys, "why", first, "--url", url)
        assert "no ledger" in told(capsys, "why", "--url", url, code=2)
        assert "no ledger" in told(capsys, "bill", "--url", url, code=2)


WRONG = ("", "a\nb", "a\x1b[31mb", "\udcff", "a/b", "..", "x" * 201)
"""No id, a line's end, a terminal's control, a byte that is no UTF-8, what would be another path, and one too long."""


@pytest.mark.parametrize("wrong", WRONG)
def test_found_by_use_a_wrong_argument_is_not_blamed_on_the_server(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is one that would answer, so what is said is about the argument, in one printable line."""
    with serving(tmp_path) as url:
        say(url, "Hello?")
        asked: dict[str, tuple[str, ...]] = {
            "REQUEST": ("why", wrong),
            "ID": ("export", wrong, str(tmp_path / "talk.parkd")),
            repr(wrong)[:20]: ("show", wrong),
        }
        if not wrong.isprintable():
            asked["--since"] = ("bill", "--since", wrong)
        for named, words in asked.items():
            said = told(capsys, *words, "--url", url, code=2)
            assert named in said
            assert "server" not in said
            assert said.rstrip("\n").isprintable()
        for step in ("nan", "inf", "-1"):
            assert "--step" in told(capsys, "top", "--step", step, "--url", url, code=2)


def test_top_without_a_terminal_looks_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        say(url, "Hello?")
        text = told(capsys, "top", "--url", url)
        assert "runs   nothing" in text
        assert "live" in text
        document = json.loads(told(capsys, "top", "--once", "--json", "--url", url))
        assert document["now"]["state"] == "ok"


def test_a_server_with_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(api_keys=("k1", "k2")) as url:
        say(url, "Hello?", key="k1")
        assert "--api-key, or in PARKD_API_KEY" in told(capsys, "ps", "--url", url, code=2)
        assert len(shown(capsys, "ps", "--url", url, "--api-key", "k1")["conversations"]) == 1
        assert shown(capsys, "ps", "--url", url, "--api-key", "k2")["conversations"] == []
        monkeypatch.setenv("PARKD_API_KEY", "k1,k2")
        monkeypatch.setenv("PARKD_URL", url)
        assert len(shown(capsys, "ps")["conversations"]) == 1


def test_the_address_comes_from_the_environment() -> None:
    assert server_address({}) == ("http://127.0.0.1:8080", None)
    assert server_address({"PARKD_PORT": "9", "PARKD_API_KEY": " a , b"}) == ("http://127.0.0.1:9", "a")
    assert server_address({"PARKD_PORT": "x", "PARKD_URL": "http://h"}) == ("http://h", None)


@pytest.mark.parametrize("name", [name for name in REMOTE_COMMANDS if name != "keep"])
def test_no_server(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    words = [name, *(["x"] if name in ("show", "pin", "unpin", "forget") else [])]
    text = told(capsys, *words, "--url", f"http://127.0.0.1:{port}", code=2)
    assert "start one with `parkd`" in text


@pytest.mark.parametrize("name", [name for name in REMOTE_COMMANDS if name != "keep"])
def test_found_by_use_a_server_without_tls_is_said_to_have_none(
    name: str, capsys: pytest.CaptureFixture[str], plain: str
) -> None:
    words = [name, *(["x"] if name in ("show", "pin", "unpin", "forget") else [])]
    text = told(capsys, *words, "--url", plain.replace("http:", "https:"), code=2)
    assert f"speaks no TLS: is it {plain}?" in text


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with answering(b"{}", b"{}") as url:
        yield url


@pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificate, is not installed")
def test_found_by_use_a_certificate_that_is_not_trusted_and_tls_that_was_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    made = [str(OPENSSL), "req", *words, "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(b"{}", b"{}", tls=context) as url:
        text = told(capsys, "ps", "--url", url.replace("http:", "https:"), code=2)
        assert "is not trusted" in text
        assert "https://" in told(capsys, "ps", "--url", url, code=2)


@pytest.mark.parametrize("url", ["not an address", "ftp://x", "http://", "127.0.0.1:8080", "http://[::1"])
def test_an_address_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--url" in told(capsys, "ps", "--url", url, code=2)


@pytest.mark.parametrize("key", ["secret\u00e9", "secret\n"])
def test_a_key_that_cannot_be_sent_is_not_repeated(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "ps", "--url", "http://127.0.0.1:9", "--api-key", key, code=2)
    assert text.count("--api-key") == 1
    assert "secret" not in text


@contextlib.contextmanager
def answering(root: bytes, other: bytes, status: int = 404, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Some other HTTP server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = root if self.path == "/" else other
            self.send_response(200 if self.path == "/" else status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] - clients that speak otherwise
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_another_product_and_an_older_parkd(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"Ollama is running", b"404 page not found") as url:
        assert "is no parkd" in told(capsys, "ps", "--url", url, code=2)
    with answering(b"<html>", b"<html>", 200) as url:
        assert "is no parkd" in told(capsys, "ps", "--url", url, code=2)
    refused = b'{"error": {"message": "There is nothing at /parkd/conversations. Ask for ..."}}'
    with answering(b'{"name": "parkd"}', refused) as url:
        assert "older one" in told(capsys, "ps", "--url", url, code=2)


def conversation(**fields: Any) -> dict[str, Any]:
    return {
        "id": "0123456789abcdef",
        "live": False,
        "parent": None,
        "shared_tokens": 0,
        "tokens": 41_000,
        "bytes": {"ram": 3 << 30, "disk": 0, "own": 5},
        "checkpoints": 0,
        "age_s": 5.0,
        "idle_s": 200_000.0,
        "turns": 3,
        "hits": 2,
        "value": 1.0,
        "saves_s": 1.0,
        "pinned": False,
        "kept_until_s": None,
        **fields,
    }


def drawn(shown: Any, width: int, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False, **options).print(shown)
    return out.getvalue()


def test_tables_fit_the_terminal_and_indent_children() -> None:
    words = {"system": "", "user": "A long question about a red book " * 9}
    told = {
        "conversations": [
            conversation(id="bbbb", parent="aaaa", shared_tokens=300, first_words=words),
            conversation(id="aaaa", live=True, first_words=words),
        ],
        "left_off": 3,
    }
    for width in (80, 100, 140):
        lines = drawn(tables.conversations(told), width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[1].startswith("aaaa")
        assert lines[2].startswith("  bbbb")
        assert "41,000" in lines[1]
        assert "3.0 GiB" in lines[1]
        assert "A l" in lines[1]
        assert lines[-1] == "and 3 more"


def test_colours_are_for_terminals_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"conversations": [conversation(live=True)], "left_off": 0}
    assert "\x1b[" not in drawn(tables.conversations(told), 100)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in drawn(tables.conversations(told), 100, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in drawn(tables.conversations(told), 100, force_terminal=True)


def test_text_of_prompts_steers_no_terminal_and_is_no_markup() -> None:
    evil = "\x1b]0;owned\x07\x1b[31m[bold red]x[/] \u202e\x9b1m"
    words = {"system": evil, "user": evil}
    one = conversation(first_words=words, children=[], requests=[])
    text = drawn(tables.conversations({"conversations": [one], "left_off": 0}), 140)
    text += drawn(tables.conversation(one, []), 140)
    assert not any(mark in text for mark in ("\x1b", "\x07", "\x9b", "\u202e"))
    assert "[bold red]x[/]" in text


def test_a_circle_of_parents_loses_nobody_who_has_a_root() -> None:
    one, other = conversation(id="a", parent="gone"), conversation(id="b", parent="a")
    assert [(each["id"], depth) for each, depth in tables.in_tree([other, one])] == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.02, "20 ms"), (90, "90 s"), (600, "10 min"), (9000, "2 h"), (1e6, "12 d")]
)
def test_ages(seconds: float | None, text: str) -> None:
    assert tables.age(seconds) == text


def test_every_remote_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(command.HELP) == set(REMOTE_COMMANDS)
    for name in REMOTE_COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert f"parkd {name}" in capsys.readouterr().out
