"""Ollama's API: `POST /api/chat` and `POST /api/generate`, as lines of JSON.

    line message ... | line done, counts and durations

Both are translated to a chat of the OpenAI dialect, whose checks then serve them too. Differences of the API: streaming
is the default, images are base64 beside a message's text, tool calls have no ids and their arguments are objects, and a
call arrives whole. A request without a message or prompt only loads the model, which is always loaded here.
`keep_alive`, `context` and what `options` says of loading (`num_ctx`, `num_gpu`, ...) are without effect.

Source: Ollama's API documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from parkd.errors import InvalidRequest, ParkdError, QueueFull
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.base import ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.frames import encoded
from parkd.proxy.dialects.nested import objects, wrong
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.types import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, TurnRequest

_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "repeat_last_n", "logit_bias", "ignore_eos", "min_tokens"),
)
"""Entries of `options` that have the same name and meaning in requests of the OpenAI dialect."""
_NO_LIMIT = (-1, -2)
"""Values of `num_predict`: without end, and until the context is full. Both mean the latter here."""


class Ollama(TurnDialect):
    """What both calls share."""

    stream_type = "application/x-ndjson"

    def at_once(self, body: Mapping[str, Any], meta: ResponseMeta) -> Mapping[str, Any] | None:
        if body.get("messages") or body.get("prompt"):
            return None
        reason = "unload" if body.get("keep_alive") in (0, "0", "0s") else "load"
        return {**_head(meta), **self.piece("", ""), "done": True, "done_reason": reason}

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> OllamaEncoder:  # noqa: ARG002
        return OllamaEncoder(meta, self)

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:  # noqa: ARG002 - it is a header
        headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, QueueFull) else {}
        return ErrorAnswer(error.status, {"error": error.message}, headers)

    def piece(self, text: str, thinking: str, calls: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
        """The fields of a line that hold a part of the answer."""
        raise NotImplementedError


class OllamaChat(Ollama):
    """`POST /api/chat`."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        messages = _messages(fields.items(body, "messages"))
        tools = {"tools": list(objects(body.get("tools"), "tools"))} if body.get("tools") else {}
        return OpenAIChat().parse({**_common(body), **tools, "messages": messages}, headers)

    def piece(self, text: str, thinking: str, calls: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class OllamaGenerate(Ollama):
    """`POST /api/generate`: one prompt, through the template unless `raw` is set."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        if body.get("template"):
            raise InvalidRequest("`template` is not supported: use --chat-template-file.", param="template")
        prompt, suffix, common = fields.text(body, "prompt"), fields.text(body, "suffix"), _common(body)
        if suffix or fields.flag(body, "raw", default=False):
            limit = {} if "max_tokens" in common else {"max_tokens": fields.MAX_TOKENS}
            return OpenAICompletions().parse({**common, **limit, "prompt": prompt, "suffix": suffix}, headers)
        message: dict[str, Any] = {"role": "user", "content": prompt, "images": body.get("images")}
        system = fields.text(body, "system")
        messages = [*([{"role": "system", "content": system}] if system else []), message]
        return OpenAIChat().parse({**common, "messages": _messages(messages)}, headers)

    def piece(self, text: str, thinking: str, calls: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:  # noqa: ARG002
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaEncoder:
    """Implements `Encoder`. Calls are collected until they are whole: this API has no pieces of them."""

    def __init__(self, meta: ResponseMeta, dialect: Ollama) -> None:
        self._head = _head(meta)
        self._dialect = dialect
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}
        """By index: name and pieces of arguments."""
        self._sent: set[int] = set()
        self._last: Mapping[str, Any] | None = None

    def feed(self, event: Event) -> Iterable[bytes]:
        match event:
            case Started():
                return []
            case TextDelta(text):
                self._text.append(text)
                return [self._line(self._dialect.piece(text, ""))]
            case ReasoningDelta(text):
                self._thinking.append(text)
                return [self._line(self._dialect.piece("", text))]
            case ToolCallDelta(index, _, name, arguments):
                known = self._calls.setdefault(index, (name or "", []))
                known[1].append(arguments)
                return self._whole_calls(before=index)
            case Finished():
                calls = self._whole_calls(before=None)
                self._last = _end(event)
                return [*calls, _json_line({**self._head, **self._dialect.piece("", ""), **self._last})]
        return []

    def keep_alive(self) -> bytes:
        """A line without text: clients read every line as JSON, so that an empty one would break them."""
        return self._line(self._dialect.piece("", ""))

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        return [_json_line({"error": error.message})]

    def document(self) -> Mapping[str, Any]:
        assert self._last is not None, "asked for the document before the answer ended"
        calls = [call for index in sorted(self._calls) if (call := self._call(index)) is not None]
        whole = self._dialect.piece("".join(self._text), "".join(self._thinking), calls)
        return {**self._head, **whole, **self._last}

    def _whole_calls(self, before: int | None) -> list[bytes]:
        """A line for each call that is whole and was not sent: those before the one that is being written."""
        whole = [index for index in sorted(self._calls) if index not in self._sent and index != before]
        self._sent.update(whole)
        calls = [call for index in whole if (call := self._call(index)) is not None]
        return [self._line(self._dialect.piece("", "", [call])) for call in calls]

    def _call(self, index: int) -> Mapping[str, Any] | None:
        """None for a call that was cut: its arguments are no object yet."""
        name, pieces = self._calls[index]
        try:
            arguments = json.loads("".join(pieces) or "{}")
        except ValueError:
            return None
        return {"function": {"name": name, "arguments": arguments}} if isinstance(arguments, dict) else None

    def _line(self, piece: Mapping[str, Any]) -> bytes:
        return _json_line({**self._head, **piece, "done": False})


def _json_line(document: Mapping[str, Any]) -> bytes:
    return encoded(document) + b"\n"


def _head(meta: ResponseMeta) -> Mapping[str, Any]:
    return {"model": meta.model, "created_at": rfc3339(meta.created_s)}


def rfc3339(time_s: float) -> str:
    """A Unix time as this API writes it."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _end(finished: Finished) -> Mapping[str, Any]:
    """The fields of the last line. Durations are in nanoseconds."""
    timings, report = finished.timings, finished.report
    total_s = timings.wait_s + timings.restore_s + timings.prefill_s + timings.decode_s + timings.paused_s
    return {
        "done": True,
        "done_reason": finished.reason.value if finished.reason.is_cut else "stop",
        "total_duration": _nanoseconds(total_s),
        "load_duration": _nanoseconds(timings.wait_s + timings.restore_s),
        "prompt_eval_count": report.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(timings.prefill_s),
        "eval_count": timings.output_tokens,
        "eval_duration": _nanoseconds(timings.decode_s),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of the OpenAI dialect that mean the same."""
    options = fields.obj(body, "options")
    common: dict[str, Any] = {"model": body.get("model"), "stream": fields.flag(body, "stream", default=True)}
    common |= {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    if options.get("num_predict") not in (None, *_NO_LIMIT):
        common["max_tokens"] = options["num_predict"]
    wanted = body.get("format")
    if wanted == "json":
        common["response_format"] = {"type": "json_object"}
    elif isinstance(wanted, dict):
        common["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    elif wanted not in (None, ""):
        raise wrong("format", "`json` or a JSON schema")
    think = body.get("think")
    if isinstance(think, bool):
        common["enable_thinking"] = think
    elif isinstance(think, str) and think:
        common["reasoning_effort"] = think
    elif think not in (None, ""):
        raise wrong("think", "true, false or an effort such as `low`")
    own = ("cache_salt", "prompt_cache_key", "prompt_cache_options", "chat_template_kwargs", "steering", "lora")
    return common | {name: body[name] for name in own if name in body}


def _messages(given: Sequence[Any]) -> list[Any]:
    """The messages as the OpenAI dialect has them. Calls get ids by their place, and results those of the calls that
    are still unanswered, in their order or by `tool_name`."""
    messages: list[Any] = []
    waiting: list[tuple[str, str]] = []
    """Id and name of calls without a result."""
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            raise wrong(f"messages[{index}]", "an object with `role` and `content`")
        translated = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        if message.get("images"):
            translated["content"] = _with_images(message, f"messages[{index}]")
        if isinstance(message.get("thinking"), str) and message["thinking"]:
            translated["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            translated["tool_calls"], waiting = _calls(message, index)
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            place = next((place for place, (_, known) in enumerate(waiting) if known == name), 0)
            if waiting:
                translated["tool_call_id"], known = waiting.pop(place)
                translated.setdefault("name", name or known)
        messages.append(translated)
    return messages


def _with_images(message: Mapping[str, Any], where: str) -> list[Any]:
    images = message["images"]
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise wrong(f"{where}.images", "a list of images as base64")
    text = message.get("content")
    parts: list[Any] = [{"type": "text", "text": text}] if isinstance(text, str) and text else []
    return [{"type": "image", "source": {"type": "base64", "data": image}} for image in images] + parts


def _calls(message: Mapping[str, Any], index: int) -> tuple[list[Any], list[tuple[str, str]]]:
    calls, names = [], []
    for place, call in enumerate(objects(message["tool_calls"], f"messages[{index}].tool_calls")):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"messages[{index}].tool_calls[{place}].function", "an object with `name` and `arguments`")
        call_id, arguments = f"call_{index}_{place}", function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        calls.append({"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": text}})
        names.append((call_id, function["name"]))
    return calls, names
