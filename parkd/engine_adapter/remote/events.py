"""Parses streamed answers: what every OpenAI-style server sends, and what each adds.

    data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]}                           thinking
    data: {"choices": [{"index": 0, "delta": {"content": "Yes."}}]}                                    text
    data: {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {...}}]}}]}      a call
    data: {"choices": [{"index": 0, "text": "Yes.", "token_ids": [9175]}]}                             of a completion
    data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}                            the end
    data: {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}
    data: [DONE]

What cannot be true is not believed: a usage that counts more cached tokens than tokens is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from parkd.engine_adapter.http.lines import error_text, field_of
from parkd.errors import UpstreamFailed

DONE = b"[DONE]"
TOKEN_NAME = "token_id:"  # noqa: S105
"""Before an id in place of a token's text."""
HALF_ESCAPE = rb"\ud"
"""In lower case, how the escape of each half of a character begins."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A generated token with its logprob. A `ScoredToken`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable ids in its place, most probable first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counts them; None: it does not say, or nothing that can be true."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def then(self, later: Usage) -> Usage:
        """What is known once the server has said `later`, too."""
        return Usage(
            *(
                before if now is None else now
                for before, now in (
                    (self.prompt_tokens, later.prompt_tokens),
                    (self.output_tokens, later.output_tokens),
                    (self.cached_tokens, later.cached_tokens),
                    (self.reasoning_tokens, later.reasoning_tokens),
                )
            )
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of an answer."""

    thinking: str = ""
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    token_ids: tuple[int, ...] | None = None
    """Of the text; None: the server does not say them."""
    prompt_ids: tuple[int, ...] | None = None
    """Those that the server has read as the prompt."""
    finish: str | None = None
    """Why the answer has ended; None: it goes on."""
    usage: Usage | None = None
    scores: tuple[Score, ...] = ()
    """Of `token_ids`, if they were asked for."""
    is_last: bool = False
    """Nothing follows."""


def parse_line(line: bytes, called: str) -> Piece | None:
    """The event of a line; None for blank lines, comments and other fields. Raises UpstreamFailed."""
    name, value = field_of(line)
    if name not in (b"data", b"error") or not value:
        return None
    if value == DONE:
        return Piece(is_last=True)
    try:
        document = _document(value)
        error = document if name == b"error" else document.get("error")
        if error:
            said = error if isinstance(error, Mapping) else {"message": error}
            raise UpstreamFailed(
                f"The {called} failed in the middle of its answer: {error_text(said)} Send the request again."
            )
        return _piece(document)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise UpstreamFailed(
            f"The {called} sent an event that cannot be read. Check that --upstream names a server with an "
            f"OpenAI-style API, and nothing between changes its answers."
        ) from problem


def _document(value: bytes) -> Any:
    """What JSON says. Half an escaped character, which a model may write, is U+FFFD, as in requests: the marks between
    the parts of an answer are surrogates in its text."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        if HALF_ESCAPE not in value.lower():
            raise
        text = json.dumps(json.loads(value), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _piece(document: Mapping[str, Any]) -> Piece:
    usage = usage_of(document.get("usage")) or usage_of_timings(document.get("timings"))
    choice = next((each for each in document.get("choices") or () if each.get("index", 0) == 0), None)
    if choice is None:
        return Piece(usage=usage)
    delta = choice.get("delta") or {}
    thinking, text = _content(delta.get("content"))
    text += _text(delta.get("refusal"))
    return Piece(
        thinking=_text(delta.get("reasoning_content") or delta.get("reasoning")) + thinking,
        text=text + _text(choice.get("text")),
        calls=tuple(_calls(delta.get("tool_calls") or ())),
        token_ids=_ids(choice.get("token_ids")),
        prompt_ids=_ids(choice.get("prompt_token_ids") or document.get("prompt_token_ids")),
        finish=choice.get("finish_reason") and str(choice["finish_reason"]),
        usage=usage,
        scores=tuple(_scores(choice.get("logprobs"))),
    )


def _scores(logprobs: Any) -> Iterable[Score]:
    """Those of a completion that names tokens by their ids (`return_tokens_as_token_ids`)."""
    if not isinstance(logprobs, Mapping) or not isinstance(logprobs.get("tokens"), list):
        return
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        best = sorted(((_token_id(name), float(each)) for name, each in (top or {}).items()), key=lambda one: -one[1])
        yield Score(_token_id(token), float(logprob), tuple(best))


def _token_id(name: Any) -> int:
    if not isinstance(name, str) or not name.startswith(TOKEN_NAME):
        raise TypeError("not the id of a token")
    return int(name.removeprefix(TOKEN_NAME))


def _content(content: Any) -> tuple[str, str]:
    """Thinking and text of a content, which some servers send as parts."""
    if not isinstance(content, list):
        return "", _text(content)
    thinking = [_text(inner.get("text")) for part in content for inner in part.get("thinking") or ()]
    return "".join(thinking), "".join(_text(part.get("text")) for part in content)


def _calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[CallPiece]:
    for place, call in enumerate(calls):
        function, index = call.get("function") or {}, call.get("index")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = orjson.dumps(arguments).decode()
        yield CallPiece(place if index is None else int(index), _text(function.get("name")), _text(arguments))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(each) for each in value)


def usage_of(usage: Any) -> Usage | None:
    """What of a usage can be true; None if there is none."""
    if not isinstance(usage, Mapping):
        return None
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cached = _count(_inner(usage, "prompt_tokens_details", "cached_tokens"))
    if cached is None:
        cached = _count(usage.get("prompt_cache_hit_tokens"))
    reasoning = _count(_inner(usage, "completion_tokens_details", "reasoning_tokens"))
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    if reasoning is not None and (output is None or reasoning > output):
        reasoning = None
    return Usage(prompt, output, cached, reasoning)


def usage_of_timings(timings: Any) -> Usage | None:
    """What a llama-server has counted so far; None if it does not say."""
    if not isinstance(timings, Mapping):
        return None
    read, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    prompt = None if read is None or cached is None else read + cached
    return Usage(prompt, _count(timings.get("predicted_n")), cached if prompt is not None else None)


def _inner(usage: Mapping[str, Any], outer: str, inner: str) -> Any:
    details = usage.get(outer)
    return details.get(inner) if isinstance(details, Mapping) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
