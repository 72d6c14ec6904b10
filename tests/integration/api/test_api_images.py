"""Pictures over HTTP, in all dialects: read once, never taken for others, counted, and refused with reasons."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parkd_engine.families.presets.shapes import PRESETS
from PIL import Image

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.identity import images as identity_images
from parkd.state import EngineConfig, ImageFacts
from tests.fakes.engine import FakeEngine
from tests.fakes.images import FakeImages
from tests.integration.api.api_harness import Running, body_of, running
from tests.integration.api.disk_harness import running_on

pytestmark = pytest.mark.anyio
TINY_WITH_IMAGES = [name for name in PRESETS if name.startswith("tiny") and name.endswith(("-vl", "-vl-moe"))]
LONG = "A server holds one conversation in memory. " * 12
Parts = Sequence[str | bytes]
"""What is said: texts and pictures' files."""


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat_parts(said: Parts) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "high"}}
        for part in said
    ]


def anthropic_parts(said: Parts) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(part).decode()},
        }
        for part in said
    ]


def responses_parts(said: Parts) -> list[dict[str, Any]]:
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": data_url(part)}
        for part in said
    ]


class Dialect:
    """One way to say the same: turns are what a user says, and between two of them what was answered."""

    def __init__(self, path: str, body: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.path = path
        self.body = body

    async def ask(self, server: Running, *turns: Parts | str) -> tuple[str, int, int]:
        """The answer, and the prompt's tokens, reused and all."""
        response = await server.client.post(self.path, json={**self.body(turns), "temperature": 0})
        assert response.status_code == 200, response.text
        document = response.json()
        await server.settled()
        usage = document["usage"]
        if "choices" in document:
            text = document["choices"][0]["message"]["content"]
            return text, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        if "output" in document:
            text = document["output"][-1]["content"][0]["text"]
            return text, usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        reused = usage["cache_read_input_tokens"]
        whole = usage["input_tokens"] + reused + usage["cache_creation_input_tokens"]
        return document["content"][0]["text"], reused, whole


def _chat(turns: Sequence[Any]) -> dict[str, Any]:
    return body_of(
        [
            {"role": "assistant", "content": turn}
            if isinstance(turn, str)
            else {"role": "user", "content": chat_parts(turn)}
            for turn in turns
        ]
    )


def _anthropic(turns: Sequence[Any]) -> dict[str, Any]:
    messages = [
        {"role": "assistant", "content": turn}
        if isinstance(turn, str)
        else {"role": "user", "content": anthropic_parts(turn)}
        for turn in turns
    ]
    return {"model": "any", "max_tokens": 8, "messages": messages}


def _responses(turns: Sequence[Any]) -> dict[str, Any]:
    items = [
        {"role": "assistant", "content": [{"type": "output_text", "text": turn}]}
        if isinstance(turn, str)
        else {"role": "user", "content": responses_parts(turn)}
        for turn in turns
    ]
    return {"model": "any", "max_output_tokens": 8, "input": items}


DIALECTS = {
    "chat": Dialect("/v1/chat/completions", _chat),
    "anthropic": Dialect("/v1/messages", _anthropic),
    "responses": Dialect("/v1/responses", _responses),
}
EVERY_DIALECT = pytest.mark.parametrize("dialect", list(DIALECTS.values()), ids=list(DIALECTS))


def picture(seed: int, width: int = 60, height: int = 40) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@EVERY_DIALECT
@pytest.mark.parametrize("family", TINY_WITH_IMAGES)
async def test_a_b_a(family: str, dialect: Dialect, tmp_path: Path) -> None:
    """With pictures in each turn. What comes back is restored, pictures and all, and the tower reads new ones only."""
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=1024, batch_tokens=128)
    engine = TorchEngine.load(ModelConfig(f"random:{family}", tmp_path, layout=layout))
    a1: Parts = ["Look: ", picture(1), LONG, picture(2, 100, 30), " What is it?"]
    b1: Parts = ["Look: ", picture(1), LONG, picture(3, 100, 30), " What is it?"]
    more: Parts = ["And this? ", picture(4)]
    # Without the memory of answers, so that prompts are what the tokenizer alone makes of them.
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        first, reused, prompt = await dialect.ask(server, a1)
        assert (reused, engine.images_encoded) == (0, 2)
        other, shared, _ = await dialect.ask(server, b1)
        # Another picture of the same size in the same text: all before it may be had, nothing behind.
        assert shared < prompt // 2 + 200
        assert engine.images_encoded == (3 if shared else 4)
        count = engine.images_encoded
        again, reused, _ = await dialect.ask(server, a1)
        assert (again, reused, engine.images_encoded) == (first, prompt - 1, count)
        second, reused, longer = await dialect.ask(server, a1, first, more)
        assert reused >= prompt - 1
        assert engine.images_encoded == count + 1
        await dialect.ask(server, b1)
        third, reused, _ = await dialect.ask(server, a1, first, more)
        assert (third, reused, engine.images_encoded) == (second, longer - 1, count + 1)
    assert first != other
    engine.close()
    cold = TorchEngine.load(ModelConfig(f"random:{family}", tmp_path, layout=layout))
    async with running(cold, answer_bytes=0) as server:  # type: ignore[arg-type]
        assert (await dialect.ask(server, a1, first, more))[:2] == (second, 0)
        assert cold.images_encoded == 3
    cold.close()


@pytest.mark.parametrize("family", TINY_WITH_IMAGES)
async def test_dialects_share_one_path(family: str, tmp_path: Path) -> None:
    """The same picture packed otherwise, in another dialect: the same conversation."""
    layout = EngineConfig(devices=("cpu",), context_tokens=1024, batch_tokens=128)
    engine = TorchEngine.load(ModelConfig(f"random:{family}", tmp_path, layout=layout))
    packed = io.BytesIO()
    Image.open(io.BytesIO(picture(1))).save(packed, "WEBP", lossless=True)
    async with running(engine) as server:  # type: ignore[arg-type]
        text, _, prompt = await DIALECTS["chat"].ask(server, ["See ", picture(1), LONG])
        for dialect in DIALECTS.values():
            assert await dialect.ask(server, ["See ", packed.getvalue(), LONG]) == (text, prompt - 1, prompt)
        body = _anthropic([["See ", picture(1), LONG]])
        counted = await server.client.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": prompt}
        assert engine.images_encoded == 1
        _, _, longer = await DIALECTS["chat"].ask(server, ["See ", picture(1), picture(2), LONG])
        reader = engine.images
        assert reader is not None
        image = {"type": "image"}
        shown = [{"type": "text", "text": "See "}, image, image, {"type": "text", "text": LONG}]
        text = engine.template.render([{"role": "user", "content": shown}], (), {}).text
        text = text.replace(reader.tokens.placeholder, reader.tokens.wrapped)
        pictures = sum(reader.facts(picture(seed)).tokens - 1 for seed in (1, 2))
        assert longer == len(engine.tokenizer.encode(text)) + pictures
    engine.close()


@pytest.mark.parametrize("fixed_bytes", [0, 64])
async def test_a_picture_of_the_same_length_is_never_a_hit(fixed_bytes: int) -> None:
    """Replays vllm-mlx#197, mlx-vlm#1933 and LMCache#4086: files that begin alike and are as long as each other."""
    engine = FakeEngine(reads_images=True, fixed_bytes=fixed_bytes)
    one, two = (b"PIC" + b"same" * 200 + end for end in (b"1", b"2"))
    chat = DIALECTS["chat"]
    async with running(engine) as server:
        first, _, prompt = await chat.ask(server, [LONG, one, LONG])
        response = await server.client.post(chat.path, json=_chat([[LONG, two, LONG]]))
        await server.settled()
        reused = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reused <= len("<|im_start|>user\n" + LONG)
        assert len(engine.images_read) == 2
        explained = await server.client.get(f"/parkd/explain/{response.headers['x-request-id']}")
        divergence = explained.json()["divergence"]
        assert (divergence["text"], divergence["known_text"]) == ("image 1", "another image")
        assert "differs from token" in response.json()["timings"]["why"]
        assert "image 1 of message 1" in response.json()["timings"]["why"]
        again = await chat.ask(server, [LONG, one, LONG])
        assert again == (first, prompt - 1, prompt)
        assert len(engine.images_read) == 2


async def test_pictures_survive_a_restart(tmp_path: Path) -> None:
    """The units on disk tell pictures apart: what comes back is not read again, and another picture is."""
    chat, files = DIALECTS["chat"], [b"PIC" + b"same" * 100 + end for end in (b"1", b"2")]
    async with running_on(tmp_path / "park", FakeEngine(reads_images=True)) as server:
        first, _, prompt = await chat.ask(server, [LONG, files[0], LONG])
    async with running_on(tmp_path / "park", FakeEngine(reads_images=True)) as server:
        again, reused, _ = await chat.ask(server, [LONG, files[0], LONG])
        assert (again, reused, server.engine.images_read) == (first, prompt - 1, [])
        _, reused, _ = await chat.ask(server, [LONG, files[1], LONG])
        assert reused <= len("<|im_start|>user\n" + LONG)
        assert len(server.engine.images_read) == 1


async def test_pictures_in_a_tools_result() -> None:
    engine = FakeEngine(reads_images=True)
    shot = b"PIC of a screen"
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": anthropic_parts(["Here: ", shot])}
    body = {
        "model": "any",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ],
    }
    async with running(engine) as server:
        for reads in (1, 1):
            response = await server.client.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
            await server.settled()
            assert len(engine.images_read) == reads


@EVERY_DIALECT
async def test_a_model_of_text_says_so(dialect: Dialect) -> None:
    async with running(FakeEngine()) as server:
        response = await server.client.post(dialect.path, json=dialect.body([["See ", picture(1)]]))
        assert response.status_code == 400
        assert "reads text only" in response.json()["error"]["message"]
        assert (await server.client.get("/props")).json()["modalities"]["vision"] is False


@EVERY_DIALECT
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/cat.png", "fetches nothing"),
        ("file:///etc/passwd", "fetches nothing"),
        ("data:image/svg+xml,<svg/>", "without base64"),
        ("data:image/png;base64,???", "not valid base64"),
        (data_url(b"no picture"), "it is no picture"),
    ],
)
async def test_what_is_no_picture_is_refused_with_advice(dialect: Dialect, url: str, says: str) -> None:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if "responses" in dialect.path:
        part = {"type": "input_image", "image_url": url}
    elif "messages" in dialect.path:
        part = {"type": "image", "source": {"type": "url", "url": url}}
    body = dialect.body([["x"]])
    holder = body["input" if "input" in body else "messages"][0]
    holder["content"] = [*holder["content"], part]
    async with running(FakeEngine(reads_images=True)) as server:
        response = await server.client.post(dialect.path, json=body)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert says in message
        assert "content[1]" in message
        assert (await server.client.get("/props")).json()["modalities"]["vision"] is True


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "system", "content": chat_parts([b"PIC"])}, {"role": "user", "content": "x"}], "role 'system'"),
        ([{"role": "user", "content": chat_parts([b"PIC"] * 4)}], "at most 3 are allowed"),
    ],
)
async def test_pictures_that_have_no_place_are_refused(
    messages: list[dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_images, "MAX_IMAGES", 3)
    async with running(FakeEngine(reads_images=True)) as server:
        response = await server.client.post("/v1/chat/completions", json=body_of(messages))
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]
        await server.chat([{"role": "user", "content": "<|image|> is a word where there are no images"}])
        with_one = await server.chat([{"role": "user", "content": chat_parts(["<|image|>, and an image: ", b"PIC"])}])
        alone = await server.chat([{"role": "user", "content": chat_parts([", and an image: ", b"PIC"])}])
        spelled = with_one.usage["prompt_tokens"] - alone.usage["prompt_tokens"]
        assert spelled == len("<|image|>"), "Found by use 9: it is letters there too"


async def test_pictures_are_not_unpacked_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's loop is this thread."""
    engine = FakeEngine(reads_images=True)
    threads: list[int] = []

    def facts(reader: FakeImages, data: bytes) -> ImageFacts:
        threads.append(threading.get_ident())
        return ImageFacts(b"d" * 32, len(data))

    monkeypatch.setattr(FakeImages, "facts", facts)
    async with running(engine) as server:
        await DIALECTS["chat"].ask(server, ["x", b"PIC", "y"])
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_files_are_not_kept_behind_their_turn() -> None:
    """What is remembered of requests names pictures and holds none."""
    async with running(FakeEngine(reads_images=True)) as server:
        response = await server.client.post("/v1/chat/completions", json=_chat([["x", b"PIC" * 50, "y"]]))
        await server.settled()
        remembered = server.server.proxy.requests.get(response.headers["x-request-id"], "")
        found = remembered or next(iter(server.server.proxy.requests._requests.values()))
        [image] = found.prompt.images
        assert (image.data, image.stop - image.start) == (b"", 150)
