"""Reads a request's body as a JSON object, within limits. Whatever a client sends, it causes at most a 4xx answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import anyio.to_thread
import orjson
from starlette.requests import Request

from parkd.errors import BodyStalled, BodyTooLarge, InvalidRequest
from parkd.identity.surrogates import mended_bytes
from parkd.proxy.bodies import LARGE_BODY_BYTES, Charge

MOST_VALUES = 2 * 1024 * 1024
"""Most commas and opening brackets in a body, including those in strings: a bound for the number of values. A prompt
that fits any context has fewer. Parsing holds the interpreter lock and so stops all streams: 60 MiB of empty lists took
14 s."""
LEAST_BODY_BYTES_A_S = 1024
"""The lowest average rate at which a body may arrive, besides the longest allowed silence. No real client is slower."""
DEPTH_LIMIT = 100
"""Deepest nesting of objects and lists. The tool schemas of agents reach about twenty levels."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's `x-request-id` if it is safe in a header and a log line, else a new id."""
    sent = headers.get("x-request-id", "")
    return sent if _REQUEST_ID.fullmatch(sent) else f"req_{secrets.token_hex(12)}"


def id_headers(request_id: str) -> dict[str, str]:
    """Headers with the request's id, under the names that OpenAI's and Anthropic's clients read."""
    return {"x-request-id": request_id, "request-id": request_id}


async def read_body(request: Request, limit_bytes: int, silence_s: float, charge: Charge) -> bytes:
    """Reads the body, and charges its bytes to `charge` as they arrive.

    Raises InvalidRequest if it is compressed; BodyTooLarge as soon as that is known, at the latest after `limit_bytes`;
    QueueFull if all bodies together are too large; ClientDisconnect; and BodyStalled if nothing arrives for `silence_s`
    or the average rate is too low, since a body that is charged keeps others out.
    """
    charge.check(check_body(request, limit_bytes, "plain JSON"))
    body = bytearray()
    async for piece in body_pieces(request, limit_bytes, silence_s, LEAST_BODY_BYTES_A_S):
        charge.reach(len(body) + len(piece))
        body += piece
    return bytes(body)


def check_body(request: Request, limit_bytes: int, form: str) -> int:
    """The length that the request declares for its body; 0 if it declares none. Raises InvalidRequest if the body is
    compressed (`form`: what it should be), and BodyTooLarge."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"The body is compressed ({encoding[:20]!r}). Send it as {form}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    return int(declared) if declared.isdecimal() else 0


async def body_pieces(
    request: Request, limit_bytes: int, silence_s: float, least_bytes_a_s: int
) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises BodyTooLarge, ClientDisconnect, and BodyStalled if nothing arrives for `silence_s`
    or the average rate is lower than `least_bytes_a_s`."""
    size, pieces = 0, aiter(request.stream())
    began_s = anyio.current_time()
    while True:
        due_s = began_s + silence_s + size / least_bytes_a_s
        piece = await _next_piece(pieces, silence_s, due_s, least_bytes_a_s)
        if piece is None:
            return
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        yield piece


async def _next_piece(
    pieces: AsyncIterator[bytes], silence_s: float, due_s: float, least_bytes_a_s: int
) -> bytes | None:
    """The next piece of the body; None at the end. Raises BodyStalled if none arrives within `silence_s`, or by `due_s`
    on the event loop's clock."""
    now_s = anyio.current_time()
    with anyio.move_on_after(min(silence_s, due_s - now_s)):
        return await anext(pieces, None)
    if due_s < now_s + silence_s:
        raise BodyStalled(f"The body arrived at less than {least_bytes_a_s} bytes a second. Send the request again.")
    raise BodyStalled(f"No part of the body arrived for {silence_s:g} s. Send the request again.")


async def parse_object(body: bytes) -> Mapping[str, Any]:
    """The body as a JSON object, parsed in a worker thread if it is large. Raises InvalidRequest, and BodyTooLarge for
    too many values."""
    return await anyio.to_thread.run_sync(_parsed, body) if len(body) >= LARGE_BODY_BYTES else _parsed(body)


def _parsed(body: bytes) -> Mapping[str, Any]:
    if len(body) > MOST_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise BodyTooLarge(
            f"The body has more than {MOST_VALUES} commas and brackets. Send less, or split the request."
        )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = _parsed_mended(body, error)
    if not isinstance(document, dict):
        raise InvalidRequest("The body must be a JSON object.")
    check_depth(document)
    return document


def _parsed_mended(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """The document, if all that orjson refuses in it are surrogates without a partner, which become U+FFFD. Raises
    InvalidRequest otherwise."""
    try:
        return orjson.loads(mended_bytes(body))
    except ValueError:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def check_depth(document: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a document that is nested so deeply that recursive code could fail on it."""
    level: list[Any] = [document]
    for _ in range(DEPTH_LIMIT):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"The body is nested more than {DEPTH_LIMIT} levels deep. Send a flatter one.")


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit_bytes} bytes. Send less, or split the request.")
