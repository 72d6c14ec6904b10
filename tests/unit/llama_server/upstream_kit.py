"""A llama-server without a model, behind respx: its answers have the shape of those recorded in `recorded.json`.

The next token is a function of all ids before it, so a slot that holds the wrong ones answers wrongly.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import orjson
import respx

from parkd.config.values import Deadlines, UpstreamConfig
from parkd.engine_adapter.http import client
from parkd.engine_adapter.http.wire import BrokenAnswer, CannotConnect
from parkd.engine_adapter.llama_server.engine import LlamaServerEngine
from tests.fakes.text import END_TOKEN_ID, FIRST_SPECIAL_ID, FakeTemplate, FakeTokenizer

URL = "http://upstream.test:8181"
RECORDED = Path(__file__).with_name("recorded.json")
ROW_BYTES = 16
BASE_BYTES = 40
CHECKPOINT_BYTES = 8000
"""Of each checkpoint that a server appends to its files."""
CHECKPOINT_TAIL = 4
"""Tokens between the end of a prompt and its last checkpoint."""
END_ODDS = 61
TEMPLATE = "<|im_start|>{{ role }}<|im_end|> as the fake template has it, {% tools %}"

Answer = Callable[[httpx.Request], httpx.Response]


@contextmanager
def routed(**options: Any) -> Iterator[respx.Router]:
    """A router in place of every llama-server. `options` are those of `respx.mock`."""
    with respx.mock(assert_all_called=False, **options) as router, mock.patch.object(client, "Wire", RouterWire):
        yield router


class RouterWire:
    """A `Wire` through the library that respx knows; the errors that it plays become the wire's."""

    def __init__(self, url: str, headers: Mapping[str, str], *, most_connections: int, idle_s: float) -> None:
        assert most_connections > 1
        assert idle_s > 0
        self._url, self._headers = url, headers
        self._http = httpx.HTTPTransport()
        self.opened = 0

    def send(
        self, method: str, path: str, content: bytes | None, *, connect_s: float, silence_s: float
    ) -> RouterAnswer:
        waits = {"timeout": {"connect": connect_s, "read": silence_s}}
        request = httpx.Request(method, self._url + path, headers=self._headers, content=content, extensions=waits)
        with wire_errors():
            return RouterAnswer(self._http.handle_request(request))

    def close(self) -> None:
        self._http.close()


class RouterAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self.status, self.headers, self._response = response.status_code, response.headers, response
        self.close = response.close

    def __iter__(self) -> Iterator[bytes]:
        with wire_errors():
            yield from self._response.iter_bytes()


@contextmanager
def wire_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise CannotConnect(str(error)) from error
    except httpx.TimeoutException as error:
        raise TimeoutError from error
    except httpx.HTTPError as error:
        raise BrokenAnswer(str(error)) from error


@dataclass
class FakeSlot:
    ids: list[int] = field(default_factory=list)
    task: int | None = None
    processing: bool = False
    checkpoints: list[int] = field(default_factory=list)
    was_restored: bool = False
    """And not used since."""


class Events(httpx.SyncByteStream):
    """A body that is made while it is read; `left` is called when the reader lets it go."""

    def __init__(self, parts: Iterable[bytes], left: Callable[[], None] = lambda: None) -> None:
        self._parts = parts
        self._left = left

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts

    def close(self) -> None:
        self._left()


class FakeLlama:
    """What a test changes: `answers` replaces the answer to a path, `cut` what a completion sends, `marker` the run."""

    def __init__(self, slot_dir: Path, *, slots: int = 2, context_tokens: int = 4096, batch: int = 64) -> None:
        self.slot_dir = slot_dir
        self.slots = [FakeSlot() for _ in range(slots)]
        self.context_tokens = context_tokens
        self.batch = batch
        self.rewinds = True
        """False: a model with recurrent state, of which a slot can only go on at its end or at a checkpoint."""
        self.takes_checkpoints = False
        """And appends them to its files, as servers do today."""
        self.lags = False
        """A model with windows, of which a restored slot goes on at its last checkpoint even where nothing differs."""
        self.row_bytes = ROW_BYTES
        self.marker = "run-1"
        self.model_path = "/models/fake.gguf"
        self.adapters: list[dict[str, Any]] = []
        self.answers: dict[str, Answer] = {}
        self.cut: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda events: events
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Of completions."""
        self.read_tokens = 0
        self.tokenizer = FakeTokenizer()
        self.template = TEMPLATE
        """As `/props` tells it; one that cannot be compiled leaves the rendering to the server."""
        self.script: str | None = None
        """What every answer says; None: what the ids make of it."""
        self._tasks = 0

    def mount(self, router: respx.Router) -> None:
        router.route(url__startswith=URL).mock(side_effect=self._answer)

    def knows_its_model(self) -> None:
        """Its model's file is one that parkd can read, of full attention alone."""
        name, value = b"general.architecture", b"fake"
        path = self.slot_dir.parent / "fake.gguf"
        text = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
        self.model_path = str(path)

    def restart(self) -> None:
        self.marker += "+"
        self.slots = [FakeSlot() for _ in self.slots]
        self._tasks = 0

    def engine(self, **deadlines: float) -> LlamaServerEngine:
        config = UpstreamConfig(URL, self.slot_dir, self.slot_dir / "cache", deadlines=Deadlines(**deadlines))
        return LlamaServerEngine.load(config)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        action = request.url.params.get("action")
        name = action or path
        self.calls.append(name)
        if name in self.answers:
            return self.answers[name](request)
        body = orjson.loads(request.content) if request.content else {}
        if action:
            return self.act_on_slot(int(path.split("/")[2]), action, body)
        return {
            "/props": lambda: ok(self.properties()),
            "/v1/models": lambda: ok({"data": [{"id": "fake.gguf", "meta": {"n_vocab": 258, "size": 0}}]}),
            "/lora-adapters": lambda: ok(self.adapters),
            "/slots": lambda: ok([self._state(i, slot) for i, slot in enumerate(self.slots)]),
            "/apply-template": lambda: self._template(body),
            "/tokenize": lambda: ok({"tokens": self._tokens(body)}),
            "/detokenize": lambda: ok({"content": self.tokenizer.decode(body["tokens"])}),
            "/completion": lambda: self.complete(body),
        }[path]()

    def properties(self) -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": self.context_tokens, "params": {}},
            "total_slots": len(self.slots),
            "model_path": self.model_path,
            "media_marker": self.marker,
            "chat_template": self.template,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "build_info": "b1-fake",
        }

    def _state(self, number: int, slot: FakeSlot) -> dict[str, Any]:
        state: dict[str, Any] = {"id": number, "n_ctx": self.context_tokens, "is_processing": slot.processing}
        if slot.task is not None:
            state |= {"id_task": slot.task, "n_prompt_tokens": len(slot.ids)}
        return state

    def _template(self, body: dict[str, Any]) -> httpx.Response:
        try:
            rendered = FakeTemplate().render(
                body["messages"], body.get("tools", ()), {}, add_generation_prompt=body["add_generation_prompt"]
            )
        except Exception as error:
            return refusal(500, str(error), "server_error")
        return ok({"prompt": rendered.text})

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if body.get("parse_special"):
            return self.tokenizer.encode(body["content"])
        return list(body["content"].encode())

    def act_on_slot(self, number: int, action: str, body: dict[str, Any]) -> httpx.Response:
        slot = self.slots[number % len(self.slots)]
        path = self.slot_dir / body.get("filename", "")
        if action == "save":
            data = slot_file(slot.ids, slot.checkpoints, slots=len(self.slots), row_bytes=self.row_bytes)
            path.write_bytes(data)
            return ok({"id_slot": number, "filename": path.name, "n_saved": len(slot.ids), "n_written": len(data)})
        slot.ids, slot.checkpoints = [], []
        try:
            data = path.read_bytes()
            count = struct.unpack_from("<i", data, 20)[0]
            ids = list(struct.unpack_from(f"<{count}i", data, 24))
            if struct.unpack_from("<II", data, 28 + 4 * count) != (len(self.slots), self.row_bytes):
                raise ValueError("n_stream mismatch")
            slot.checkpoints = appended(data, BASE_BYTES + self.row_bytes * count)
            slot.ids, slot.was_restored = ids, True
        except (OSError, struct.error, ValueError):
            return refusal(400, "Unable to restore slot: No available space in KV cache or invalid slot save file")
        return ok({"id_slot": number, "filename": path.name, "n_restored": len(slot.ids), "n_read": len(data)})

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        self.bodies.append(body)
        if len(body["prompt"]) >= self.context_tokens:
            return refusal(400, "request exceeds the available context size", "exceed_context_size_error")
        slot = self.slots[body["id_slot"]]
        self._tasks += 1
        slot.task, slot.processing = self._tasks, True

        def left() -> None:
            slot.processing = False

        events = self.cut(self._events(body, slot))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Events(events, left))

    def _events(self, body: dict[str, Any], slot: FakeSlot) -> Iterator[bytes]:
        prompt: list[int] = body["prompt"]
        cached = 0
        if body["cache_prompt"]:
            while cached < min(len(slot.ids), len(prompt) - 1) and slot.ids[cached] == prompt[cached]:
                cached += 1
        if not self.rewinds and (cached < len(slot.ids) or (self.lags and slot.was_restored)):
            cached = max((place for place in slot.checkpoints if place <= cached), default=0)
        slot.ids, slot.was_restored = prompt[:cached], False
        if self.takes_checkpoints:
            places = {*slot.checkpoints, cached, len(prompt) - CHECKPOINT_TAIL}
            slot.checkpoints = sorted(
                place for place in places if 0 < place <= max(cached, len(prompt) - CHECKPOINT_TAIL)
            )
        while True:
            yield sse(reading(len(prompt), cached, len(slot.ids)))
            if len(slot.ids) == len(prompt):
                break
            stop = min(len(prompt), len(slot.ids) + self.batch)
            self.read_tokens += stop - len(slot.ids)
            slot.ids = prompt[:stop]
        yield b": ping\n\n"
        script = None if self.script is None else [*self.tokenizer.encode(self.script), END_TOKEN_ID]
        held = b""
        for predicted in range(1, max(1, body["n_predict"]) + 1):
            token = next_token(slot.ids) if script is None else script[predicted - 1]
            held += b"" if token >= FIRST_SPECIAL_ID else bytes([token])
            try:
                text, held = held.decode(), b""
            except UnicodeDecodeError:
                text = None  # half a character: nothing is sent
            if text is not None and body["n_predict"]:
                yield sse(token_event(text, token, predicted))
            if token == END_TOKEN_ID:
                yield sse(ended("eos", predicted, cached))
                return
            if predicted < body["n_predict"]:
                slot.ids = [*slot.ids, token]
        slot.processing = False
        yield sse(ended("limit", predicted, cached))


def next_token(ids: list[int]) -> int:
    value = zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))
    return END_TOKEN_ID if value % END_ODDS == 0 else b"abcdefghijklmnop qrstuvwxyz "[value % 28]


def expected_answer(prompt: list[int], limit: int) -> str:
    """What a server that holds the prompt and nothing else says."""
    ids, text = list(prompt), ""
    for _ in range(limit):
        token = next_token(ids)
        if token == END_TOKEN_ID:
            break
        text += chr(token)
        ids.append(token)
    return text


def slot_file(ids: list[int], checkpoints: Sequence[int] = (), *, slots: int = 1, row_bytes: int = ROW_BYTES) -> bytes:
    numbers = [-1, 1, len(ids), *ids, 0]
    head = b"qsgg" + struct.pack("<II", 4, len(numbers)) + struct.pack(f"<{len(numbers)}i", *numbers)
    head += struct.pack("<II", slots, row_bytes)
    size = BASE_BYTES + row_bytes * len(ids)
    state = head + zlib.crc32(head).to_bytes(4, "little") * ((size - len(head)) // 4)
    return state + b"".join(struct.pack("<i", place).ljust(CHECKPOINT_BYTES, b"c") for place in checkpoints)


def appended(data: bytes, start: int) -> list[int]:
    """The checkpoints behind the state in a slot file."""
    return [struct.unpack_from("<i", data, at)[0] for at in range(start, len(data), CHECKPOINT_BYTES)]


def sse(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def reading(total: int, cached: int, processed: int) -> dict[str, Any]:
    progress = {"total": total, "cache": cached, "processed": processed, "time_ms": 0}
    return {"index": 0, "content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": progress}


def token_event(text: str, token: int, predicted: int) -> dict[str, Any]:
    return {"index": 0, "content": text, "tokens": [token], "stop": False, "id_slot": -1, "tokens_predicted": predicted}


def ended(stop_type: str, predicted: int, cached: int) -> dict[str, Any]:
    timings = {"cache_n": cached, "prompt_n": 1}
    return {
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": stop_type,
        "timings": timings,
        "tokens_predicted": predicted,
    }


def ok(document: Any) -> httpx.Response:
    return httpx.Response(200, json=document)


def refusal(status: int, message: str, kind: str = "invalid_request_error") -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": status, "message": message, "type": kind}})
