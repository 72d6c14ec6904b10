"""The page's files: small, from here alone, and never given to who did not ask for a page."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from starlette.requests import Request

from parkd.errors import NotFound
from parkd.proxy.page.static import FOLDER, POLICY, START, StaticFiles, wants_page

MOST_BYTES = 150 * 1024


def asked(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES
    assert StaticFiles().bytes < MOST_BYTES


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_file_names_an_address_outside(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_no_script_makes_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc", text)


def test_the_start_has_nothing_inline() -> None:
    text = (FOLDER / START).read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=", text)
    for name in re.findall(r"/parkd/page/([a-z.]+)", text):
        assert (FOLDER / name).is_file(), name


def test_the_policy_allows_what_is_served_here_and_nothing_else() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in POLICY
    assert rules["frame-ancestors"] == "'none'"


def test_a_file_comes_once_and_then_only_its_tag() -> None:
    files = StaticFiles()
    plain = files.response("main.js", asked())
    packed = files.response("main.js", asked(accept_encoding="br, gzip"))
    assert plain.body == (FOLDER / "main.js").read_bytes() == gzip.decompress(bytes(packed.body))
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.headers["content-type"].startswith("text/javascript")
    again = files.response("main.js", asked(if_none_match=plain.headers["etag"]))
    assert (again.status_code, again.body) == (304, b"")
    assert files.response("main.js", asked(if_none_match='"other"')).status_code == 200


@pytest.mark.parametrize("name", ["../static.py", "__init__.py", "", "index.html/..", "no.js"])
def test_no_other_file_is_given(name: str) -> None:
    with pytest.raises(NotFound):
        StaticFiles().response(name, asked())


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("application/json, Text/HTML; q=0.5", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("text/html;q=0", False),
        ("text/html+x", False),
    ],
)
def test_only_who_names_html_gets_a_page(accept: str, wants: bool) -> None:
    assert wants_page(accept) is wants
