"""Keys, Host and Origin, and what goes into headers."""

from __future__ import annotations

import pytest

from parkd.errors import Forbidden, Unauthorized
from parkd.proxy.access import (
    Caller,
    authenticate,
    check_deliberate,
    check_origin,
    holds,
    is_loopback,
    namespace_of,
    narrowed,
)
from parkd.proxy.requests import request_id_of
from parkd.proxy.sse import cache_headers, header_text
from parkd.types import CacheOutcome, CacheReport, NamedKey


def test_the_namespace_tells_keys_apart_and_nothing_of_the_key() -> None:
    first = authenticate({"authorization": "Bearer one"}, ("one", "two"))
    second = authenticate({"x-api-key": "two"}, ("one", "two"))
    assert first.namespace != second.namespace
    assert first.namespace == namespace_of("one")
    assert "one" not in first.shown
    assert authenticate({"authorization": "Bearer anything"}, ()).namespace == ""


def test_keys_of_one_namespace_share_a_cache_and_nothing_else() -> None:
    named = (NamedKey("anna", "one", "team"), NamedKey("ben", "two", "team"), NamedKey("carl", "three"))
    anna, ben, carl, plain = (
        authenticate({"x-api-key": key}, ("four",), named) for key in ("one", "two", "three", "four")
    )
    assert anna.namespace == ben.namespace
    assert len({anna.owner, ben.owner, carl.owner, plain.owner}) == 4
    assert len({anna.namespace, carl.namespace, plain.namespace}) == 3
    assert (anna.shown, carl.shown) == ("anna", "carl")
    with pytest.raises(Unauthorized):
        authenticate({"x-api-key": "anna"}, ("four",), named)


def test_a_salt_narrows_and_never_reaches_another_namespace() -> None:
    callers = [Caller(space) for space in ("", "=team", "=team2", namespace_of("one"))]
    salts = [None, "a", "b", "/a", "2"]
    assert narrowed(Caller("=team"), "") == "=team"
    assert len({narrowed(caller, salt) for caller in callers for salt in salts}) == len(callers) * len(salts)


@pytest.mark.parametrize("headers", [{}, {"authorization": "one"}, {"authorization": "Bearer ONE"}, {"x-api-key": "é"}])
def test_a_wrong_key_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        authenticate(headers, ("one",))


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8080"},
        {"host": "127.0.0.1"},
        {"host": "[::1]:8080"},
        {"host": "LOCALHOST", "origin": "http://127.0.0.1:3000"},
        {},
    ],
)
def test_local_programs_and_pages_may_ask(headers: dict[str, str]) -> None:
    check_origin(headers, bound_host="127.0.0.1", allowed_origins=())


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "[bad"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "http://["},
        {"host": "localhost", "origin": "chrome-extension://abc"},
    ],
)
def test_other_pages_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden) as refused:
        check_origin(headers, bound_host="127.0.0.1", allowed_origins=("https://ui.example",))
    assert "--cors-origin" in refused.value.message or "origin" not in headers


def test_a_server_for_others_takes_any_name_and_the_pages_it_allows() -> None:
    check_origin({"host": "box.lan"}, bound_host="0.0.0.0", allowed_origins=())
    check_origin({"host": "box.lan", "origin": "http://box.lan"}, bound_host="0.0.0.0", allowed_origins=())
    page = {"host": "box.lan", "origin": "https://ui.example"}
    check_origin(page, bound_host="0.0.0.0", allowed_origins=("https://ui.example",))
    extension = {"host": "localhost", "origin": "chrome-extension://abc"}
    check_origin(extension, bound_host="127.0.0.1", allowed_origins=("chrome-extension://abc",))
    with pytest.raises(Forbidden):
        check_origin(page, bound_host="0.0.0.0", allowed_origins=())


@pytest.mark.parametrize(
    "headers", [{"content-type": "application/json; charset=utf-8"}, {"x-parkd-action": "1"}, {"x-parkd-action": ""}]
)
def test_what_a_page_elsewhere_cannot_send_unasked_is_deliberate(headers: dict[str, str]) -> None:
    check_deliberate(headers)


@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {"content-type": "application/json-no"}, {"x-parkd": "1"}]
)
def test_what_any_page_can_send_is_not(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden, match="x-parkd-action"):
        check_deliberate(headers)


def test_loopback_is_told_by_address_not_by_spelling() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.1", "localhost.com", "127.0.0.1.evil.example")))


def test_any_reason_fits_a_header() -> None:
    assert header_text("é\r\nset-cookie: x ☃") == "é  set-cookie: x ?"
    report = CacheReport(CacheOutcome.LIVE, 10, 7, "differs\nthere")
    assert cache_headers(report) == {
        "x-parkd-cache": "live",
        "x-parkd-reused-tokens": "7",
        "x-parkd-why": "differs there",
    }
    assert cache_headers(None) == {"x-parkd-cache": "pending"}


def test_a_request_id_is_the_clients_only_if_harmless() -> None:
    assert request_id_of({"x-request-id": "abc-1.2_3"}) == "abc-1.2_3"
    for sent in ("", "a b", "x" * 129, "a\nb"):
        assert request_id_of({"x-request-id": sent}).startswith("req_")


def test_what_a_salt_narrows_is_still_the_callers_and_no_other_name_is() -> None:
    team = Caller("=team")
    assert holds(team, "=team")
    assert holds(team, narrowed(team, "salt"))
    assert not holds(team, "=team/other")
    assert not holds(team, "=team2")
    assert not holds(team, narrowed(Caller("=team2"), "salt"))
    assert not holds(Caller("=team/other"), "=team")
