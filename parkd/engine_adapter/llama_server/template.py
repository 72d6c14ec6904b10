"""Renders the server's chat template in this process, where that gives the same text as the server.

    first request of a kind     the server renders it; this process renders it too, and trusts the kind if both texts
                                are equal
    kind is trusted             rendered in this process. The server renders it too while it reads the prompt; nothing
                                of the answer is sent before its text is found equal
    texts differ after all      the request fails, and the server renders everything from then on

So a turn does not begin with a round trip to the server, and only prompts that the server itself would render are
answered.

A llama-server adds the beginning-of-sequence token to a chat by itself, and removes it from the template's text. parkd
sends prompts as ids, so it is added to the text again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import jinja2
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from parkd.engine_adapter.base import Rendered
from parkd.engine_adapter.llama_server.client import UpstreamClient, UpstreamRefused
from parkd.errors import InvalidRequest, ParkdError, UpstreamFailed

log = logging.getLogger(__name__)

MOST_KINDS = 256
"""Most kinds of requests that are remembered of a namespace of keys, by 16 bytes each. The server renders requests of
any further kind."""
KIND_BYTES = 16
_CLOCKS = ("strftime_now", "date_string", "datetime")
"""Names in templates that write the date, which may differ between two renderings."""

_PRIVATE = range(0xF0000, 0x10F800, 0x800)
"""Where blocks of private characters begin, each with room for all surrogates."""

Kind = bytes


class UpstreamTemplate:
    """A `ChatTemplate`. Thread-safe."""

    def __init__(self, client: UpstreamClient, first_text: str, here: HereTemplate | None = None) -> None:
        """`first_text` begins every prompt: the text of the beginning-of-sequence token, or nothing. Without `here`,
        the server renders everything."""
        self._client = client
        self._first_text = first_text
        self._here = _Here(here)
        self._trusted: dict[Kind, bool] = {}

    def apart(self) -> UpstreamTemplate:
        """The same, which trusts no kind yet: for another namespace of keys, which must not learn by time what kinds
        of requests this one sent, and has its own room for them. If one finds that texts differ, all know."""
        other = UpstreamTemplate(self._client, self._first_text)
        other._here = self._here
        return other

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """The prompt text, with a proof if only this process has rendered it. Raises InvalidRequest,
        UpstreamFailed."""
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        if tools:
            body["tools"] = list(tools)
        if kwargs:
            body["chat_template_kwargs"] = dict(kwargs)
        here = self._here.template
        if here is None:
            return Rendered(self._asked(body))
        kind = kind_of(body)
        trusted = self._trusted.get(kind)
        text = None if trusted is False else self._opened(here.render(body))
        if trusted and text is not None:
            return Rendered(text, partial(self._prove, body, text))
        asked = self._asked(body)
        if trusted is None and len(self._trusted) < MOST_KINDS:
            self._trusted[kind] = text == asked
        return Rendered(asked)

    def _asked(self, body: Mapping[str, Any]) -> str:
        try:
            text = self._opened(self._rendered_there(body))
        except UpstreamRefused as refused:
            raise InvalidRequest(
                f"The llama-server's chat template cannot take these messages: {refused.text}", param="messages"
            ) from refused
        assert text is not None
        return text

    def _rendered_there(self, body: Mapping[str, Any]) -> str:
        """The server's text. Surrogates in it, which a request cannot hold, travel as private characters that it does
        not contain."""
        try:
            return self._client.apply_template(body)
        except orjson.JSONEncodeError:
            document = json.dumps(body, ensure_ascii=False)
        used = {ord(char) & ~0x7FF for char in document}
        base = next((base for base in _PRIVATE if base not in used), None)
        if base is None:
            raise InvalidRequest("The messages contain too many different private characters.", param="messages")
        away = {code: base + code - 0xD800 for code in range(0xD800, 0xE000)}
        text = self._client.apply_template(json.loads(document.translate(away)))
        return text.translate({there: code for code, there in away.items()})

    def _opened(self, text: str | None) -> str | None:
        return text if text is None or text.startswith(self._first_text) else self._first_text + text

    def _prove(self, body: Mapping[str, Any], text: str) -> None:
        try:
            asked = self._asked(body)
        except InvalidRequest:
            self._distrust()
            raise
        if asked != text:
            self._distrust()
            raise UpstreamFailed(
                "The llama-server rendered this prompt differently than parkd, so it renders all prompts from now "
                "on. Send the request again."
            )

    def _distrust(self) -> None:
        if self._here.template is not None:
            log.warning(
                "parkd renders the chat template differently than the llama-server, which renders it from now on"
            )
        self._here.template = None


@dataclass(slots=True)
class _Here:
    template: HereTemplate | None
    """None once it is not trusted."""


class HereTemplate:
    """A chat template that is rendered in this process, in a sandbox. Thread-safe."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """`names` are template variables: `bos_token`, `eos_token`. Raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._names = dict(names)

    @classmethod
    def of(cls, source: str, names: Mapping[str, str]) -> HereTemplate | None:
        """The template; None if jinja2 cannot parse it, or if it depends on more than the request."""
        if not source or any(word in source for word in _CLOCKS):
            return None
        try:
            return cls(source, names)
        except jinja2.TemplateError:
            return None

    def render(self, body: Mapping[str, Any]) -> str | None:
        """The text; None if the template fails, since the server then reports the error."""
        try:
            return self._template.render(
                {
                    **self._names,
                    **body.get("chat_template_kwargs", {}),
                    "messages": body["messages"],
                    "tools": body.get("tools"),
                    "add_generation_prompt": body["add_generation_prompt"],
                }
            )
        except ParkdError:  # not the template's: its client has left, or it takes too long
            raise
        except Exception:  # a template is a program with the request as input: it may raise anything
            return None


def kind_of(body: Mapping[str, Any]) -> Kind:
    """A digest of what a template is likely to branch on: which roles follow each other, the fields of messages, tools,
    settings."""
    messages: list[Mapping[str, Any]] = body["messages"]
    roles = [message.get("role") for message in messages]
    held = {
        repr((message.get("role"), name, type(value), bool(value)))
        for message in messages
        for name, value in message.items()
    }
    settings = json.dumps(body.get("chat_template_kwargs", {}), sort_keys=True, default=str)
    followed = set(map(repr, zip([None, *roles], [*roles, None], strict=True)))
    kind = repr((sorted(followed), sorted(held), "tools" in body, settings, body["add_generation_prompt"]))
    return blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=KIND_BYTES).digest()


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
