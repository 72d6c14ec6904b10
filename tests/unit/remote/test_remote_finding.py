"""What a server is, by what it answers; and what its refusals mean."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from parkd.engine_adapter.http.client import UpstreamRefused
from parkd.engine_adapter.http.wire import Hold
from parkd.engine_adapter.remote.client import meaning_of
from parkd.engine_adapter.remote.finding import found_in
from parkd.engine_adapter.remote.watching import LeaveWatcher
from parkd.errors import (
    ContextOverflow,
    InvalidRequest,
    ModelError,
    ParkdError,
    QueueFull,
    UpstreamDown,
    UpstreamFailed,
)
from tests.fakes.openai_server import CONTEXT_TOKENS, FLAVOURS, HOSTED, MODEL, VLLM, model_of


@pytest.mark.parametrize("name", FLAVOURS)
def test_each_kind_is_told_by_its_own_answers(name: str) -> None:
    found = found_in(FLAVOURS[name], None)
    assert (found.flavour.name, found.model) == (name, MODEL)
    knows_length = name not in ("Ollama", "OpenAI-style")
    assert found.context_tokens == (CONTEXT_TOKENS if knows_length else 0)


def test_versions_and_places_are_told_where_they_are() -> None:
    assert (found_in(VLLM, None).version, found_in(VLLM, None).root) == ("0.32.0", "/models/fake-8b")
    assert found_in(FLAVOURS["SGLang"], None).root == "org/fake-8b"
    assert found_in(HOSTED, None).version == ""


@pytest.mark.parametrize("junk", [[], "text", 5, None, {"data": 5}, {"version": 5}, {"router": None}])
def test_answers_of_another_shape_say_nothing(junk: Any) -> None:
    paths = ("/version", "/props", "/get_model_info", "/info", "/api/version", "/api/v0/models")
    answers = {**dict.fromkeys(paths, junk), "/v1/models": model_of("who knows", max_model_len=True)}
    found = found_in(answers, None)
    assert (found.flavour.name, found.context_tokens, found.version) == ("OpenAI-style", 0, "")


def test_a_model_is_named_or_the_only_one() -> None:
    two = {"/v1/models": {"data": [{"id": "a"}, {"id": "b"}, "junk", {"name": "c"}]}}
    with pytest.raises(ModelError, match=r"2 models \(a, b\)"):
        found_in(two, None)
    assert found_in(two, "b").model == "b"
    assert found_in(two, "not listed").model == "not listed"
    with pytest.raises(ModelError, match="lists no model"):
        found_in({"/v1/models": {"data": []}}, None)


def refused(status: int, text: str, kind: str = "", retry_after: str = "", **details: Any) -> UpstreamRefused:
    return UpstreamRefused(status, text, kind, details, "server", retry_after)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(400, "bad", param="top_p"), InvalidRequest),
        (refused(422, "bad"), InvalidRequest),
        (refused(401, "no"), UpstreamFailed),
        (refused(404, "no"), UpstreamFailed),
        (refused(429, "busy"), QueueFull),
        (refused(503, "soon"), UpstreamDown),
        (refused(529, "soon"), UpstreamDown),
        (refused(500, "boom"), UpstreamFailed),
    ],
)
def test_a_refusal_means_to_the_client_what_it_is(error: UpstreamRefused, expected: type[ParkdError]) -> None:
    assert type(meaning_of(error, 10, 0)) in (expected, UpstreamRefused)
    assert isinstance(meaning_of(error, 10, 0), expected)


@pytest.mark.parametrize(
    ("status", "told"),
    [(302, "--upstream"), (401, "--upstream-api-key"), (403, "--upstream-api-key"), (404, "--upstream")],
)
def test_a_refusal_of_an_address_or_a_key_names_the_setting(status: int, told: str) -> None:
    error = meaning_of(refused(status, "no."), 0, 0)
    assert f"{told} " in error.message or f"{told}." in error.message
    assert "Its log may say more" not in error.message


def test_who_refuses_says_which_field_and_when_to_come_again() -> None:
    assert meaning_of(refused(400, "bad", param="top_p"), 1, 0).param == "top_p"
    for said, expected in (("7", 7), ("0", 1), ("99999", 120), ("soon", 5), ("", 5)):
        busy = meaning_of(refused(429, "busy", retry_after=said), 1, 0)
        assert isinstance(busy, QueueFull)
        assert busy.retry_after_s == expected


@pytest.mark.parametrize(
    ("text", "kind", "known", "limit"),
    [
        ("This model's maximum context length is 8192 tokens. You requested 9000", "", 0, 8192),
        ("the request exceeds the available context size (4,096)", "", 0, 4096),
        ("too long", "context_length_exceeded", 16384, 16384),
    ],
)
def test_an_overflow_is_one_however_it_is_said(text: str, kind: str, known: int, limit: int) -> None:
    error = meaning_of(refused(400, text, kind), 9000, known)
    assert isinstance(error, ContextOverflow)
    assert error.context_tokens == limit
    assert error.prompt_tokens > limit


def test_a_request_is_cut_off_when_its_client_leaves_and_no_other() -> None:
    watcher, holds, flags = LeaveWatcher(0.005), [Hold(), Hold()], [threading.Event(), threading.Event()]
    for hold, flag in zip(holds, flags, strict=True):
        watcher.follow(hold, flag)
    flags[1].set()
    until_s = time.monotonic() + 10
    while not holds[1].is_cut:
        assert time.monotonic() < until_s
        time.sleep(0.002)
    assert not holds[0].is_cut
    watcher.leave(holds[0])
    watcher.leave(holds[0])
    flags[0].set()  # nobody follows it any more
    time.sleep(0.05)
    assert not holds[0].is_cut
    watcher.close()
