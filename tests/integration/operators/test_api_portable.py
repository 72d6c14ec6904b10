"""A conversation leaves a server in a file, and goes on at another as if it had never moved."""

from __future__ import annotations

import base64
import io
import select
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from parkd.portable.parts import read_header, verify
from parkd.proxy.config import ProxyConfig
from parkd.proxy.portable import CONTENT_TYPE
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import MIB, Messages, Running, running, until
from tests.integration.api.disk_harness import running_on, written
from tests.integration.api.test_api_hybrids import A1, B1, tiny
from tests.integration.lives.life_engines import KINDS
from tests.unit.engine.kit.vision_models import png

pytestmark = pytest.mark.anyio
LONG: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of parking. " * 40}]
OTHER: Messages = [{"role": "user", "content": "Something else altogether. " * 30}]
IN_MEMORY = [name for name in KINDS if name != "file"]


def ids(server: Running) -> list[str]:
    assert server.store is not None
    return [each.id for each in sorted(server.store.table.all(), key=lambda each: -each.parked.position)]


async def exported(server: Running, conversation_id: str, **headers: str) -> bytes:
    answer = await server.client.get(f"/parkd/conversations/{conversation_id}/export", headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) == int(answer.headers["content-length"])
    return answer.content


async def landed(server: Running, data: bytes, into: str | None = None, **headers: str) -> httpx.Response:
    asked = {} if into is None else {"into": into}
    headers = {"content-type": CONTENT_TYPE, **headers}
    return await server.client.post("/parkd/conversations/import", content=data, params=asked, headers=headers)


async def asked_with_logprobs(server: Running, messages: Messages) -> tuple[Any, Any, str, int]:
    """Text, logprobs, where the state came from and how much of it was reused."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = await server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    choice, timings = document["choices"][0], document["timings"]
    return choice["message"]["content"], choice["logprobs"], timings["cache"], timings["cache_n"]


@pytest.mark.parametrize("kind", IN_MEMORY)
async def test_a_conversation_goes_on_elsewhere(kind: str) -> None:
    async with running(KINDS[kind](), answer_bytes=0) as there:
        first = await there.chat(LONG)
        await until(lambda: bool(ids(there)))  # some copy behind the reply
        data = await exported(there, ids(there)[0])
        turn = [*LONG, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        await there.chat(OTHER)
        stayed = await there.chat(turn)
    async with running(KINDS[kind](), answer_bytes=0) as here:
        answer = await landed(here, data)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        assert here.store is not None
        parked = here.store.get(document["id"])
        assert parked is not None
        assert parked.position == document["tokens"]
        moved = await here.chat(turn)
    assert stayed.cache == moved.cache == "restored-ram"
    assert moved.reused == stayed.reused > 800
    assert moved.text == stayed.text


@pytest.mark.parametrize(
    ("family", "there_stages", "here_stages", "kv_format"),
    [
        ("tiny-llama", 2, 2, None),
        ("tiny-llama", 1, 3, None),
        ("tiny-llama", 3, 1, "int8"),
        ("tiny-gemma3", 2, 1, None),
        ("tiny-qwen3.5", 1, 2, None),
        ("tiny-qwen3.5-mtp", 2, 3, None),
        ("tiny-deepseek-v3", 2, 1, None),
        ("tiny-gpt-oss", 1, 2, "int8"),
    ],
)
async def test_a_real_model_says_the_same_with_the_same_logprobs(
    family: str, there_stages: int, here_stages: int, kv_format: str | None, tmp_path: Path
) -> None:
    """Rows, windows, recurrent state and draft heads; across layer splits, and in eight bits."""

    def engine(stages: int) -> Any:
        return tiny(tmp_path, family, devices=("cpu",) * stages, kv_format=kv_format)

    async with running(engine(there_stages), answer_bytes=0) as there:
        first = await there.chat(A1)
        await there.settled()
        data = await exported(there, ids(there)[0])
        turn = [*A1, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        await there.chat(B1)
        stayed = await asked_with_logprobs(there, turn)
    async with running(engine(here_stages), answer_bytes=0) as here:
        answer = await landed(here, data)
        assert answer.status_code == 200, answer.text
        assert answer.json()["recut"] == (there_stages != here_stages)
        moved = await asked_with_logprobs(here, turn)
        assert moved == stayed
        assert moved[2] == "restored-ram"
        await here.settled()
        back = await exported(here, answer.json()["id"])
    async with running(engine(there_stages), answer_bytes=0) as there:
        assert (await landed(there, back)).status_code == 200
        assert await asked_with_logprobs(there, turn) == stayed


async def test_a_conversation_with_an_image_moves(tmp_path: Path) -> None:
    """Its units are of the image's digest, so that the same picture is found again, and only that."""

    def said(seed: int) -> Messages:
        url = "data:image/png;base64," + base64.b64encode(png(seed, 64, 64)).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it? " * 60}]
        return [{"role": "user", "content": parts}]

    async with running(tiny(tmp_path, "tiny-qwen3.5-vl"), answer_bytes=0) as there:
        first = await there.chat(said(3))
        await there.settled()
        data = await exported(there, ids(there)[0])
    async with running(tiny(tmp_path, "tiny-qwen3.5-vl", devices=("cpu",)), answer_bytes=0) as here:
        assert (await landed(here, data)).status_code == 200
        again = await here.chat(said(3))
        assert (again.text, again.cache) == (first.text, "restored-ram")
        assert (await here.chat(said(4))).cache == "cold"


async def test_from_disk_to_disk(tmp_path: Path) -> None:
    async with running_on(tmp_path / "there") as there:
        first = await there.chat(LONG)
        await written(there)
    async with running_on(tmp_path / "there") as there:
        data = await exported(there, ids(there)[0])
    async with running_on(tmp_path / "here") as here:
        assert (await landed(here, data)).status_code == 200
        await written(here)
    async with running_on(tmp_path / "here") as here:
        again = await here.chat(LONG)
        assert (again.cache, again.text) == ("restored-disk", first.text)


async def test_a_state_that_stays_in_a_file_moves_too(tmp_path: Path) -> None:
    def engine() -> FakeEngine:
        return FakeOpaqueEngine(in_files=True)

    async with running_on(tmp_path / "there", engine()) as there:
        first = await there.chat(LONG)
        await written(there)
        data = await exported(there, ids(there)[0])
    async with running_on(tmp_path / "here", engine()) as here:
        assert (await landed(here, data)).status_code == 200
        await written(here)
        again = await here.chat(LONG)
        assert (again.text, again.cache) == (first.text, "restored-disk"), "a file is on disk"
    async with running_on(tmp_path / "here", engine()) as here:
        assert (await here.chat(LONG)).cache == "restored-disk"
    files = list((tmp_path / "here").glob("*.extent"))
    assert files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


# Whose it is

KEYS = ProxyConfig(
    api_keys=("k-ann", "k-ben"),
    operator_keys=("k-op",),
    named_keys=(NamedKey("carol", "k-carol", "team"), NamedKey("dave", "k-dave", "team"), NamedKey("eve", "k-eve")),
)


async def said(server: Running, key: str, messages: Messages) -> tuple[str, str]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = await server.client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    await server.settled()
    return answer.json()["choices"][0]["message"]["content"], answer.json()["timings"]["cache"]


async def status_of_export(server: Running, key: str, conversation_id: str) -> int:
    path = f"/parkd/conversations/{conversation_id}/export"
    return (await server.client.get(path, headers={"x-api-key": key})).status_code


async def test_a_key_exports_its_own_and_an_operator_all() -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        await said(server, "k-ann", LONG)
        [anns] = ids(server)
        assert await status_of_export(server, "k-ann", anns) == 200
        assert await status_of_export(server, "k-ben", anns) == 404
        assert await status_of_export(server, "k-op", anns) == 200
        assert await status_of_export(server, "k-ann", "nothing") == 404
        await said(server, "k-carol", OTHER)
        [carols] = [each for each in ids(server) if each != anns]
        assert await status_of_export(server, "k-carol", carols) == 200
        assert await status_of_export(server, "k-dave", carols) == 404, "what another key of the namespace said"
        assert (await server.client.get(f"/parkd/conversations/{anns}/export")).status_code == 401


async def test_a_key_imports_for_itself_and_an_operator_for_all() -> None:
    async with running(FakeEngine(), answer_bytes=0) as server:
        await server.chat(LONG)
        await server.settled()
        data = await exported(server, ids(server)[0])
    async with running(FakeEngine(), config=KEYS, answer_bytes=0) as server:

        async def landing(key: str, into: str | None = None) -> int:
            return (await landed(server, data, into, **{"x-api-key": key})).status_code

        assert await landing("k-ann") == 200
        assert (await said(server, "k-ann", LONG))[1] == "restored-ram"
        assert (await said(server, "k-ben", LONG))[1] == "cold"
        assert await landing("k-ann", "eve") == 403
        assert await landing("k-carol") == 403, "it would answer dave too"
        assert await landing("k-op", "nobody") == 400
        assert await landing("k-op", "eve") == 200
        assert (await said(server, "k-eve", LONG))[1] == "restored-ram"
        assert await landing("k-op", "team") == 200
        assert (await said(server, "k-dave", LONG))[1] == "restored-ram"


@pytest.mark.parametrize(("others", "status"), [((), 200), ((NamedKey("dave", "k-dave", "team"),), 403)])
async def test_found_by_use_a_key_that_is_alone_in_a_namespace_imports(
    others: tuple[NamedKey, ...], status: int
) -> None:
    data = await conversation()
    keys = ProxyConfig(named_keys=(NamedKey("carol", "k-carol", "team"), NamedKey("eve", "k-eve"), *others))
    async with running(FakeEngine(), config=keys) as server:
        assert (await landed(server, data, **{"x-api-key": "k-carol"})).status_code == status


async def test_a_web_page_elsewhere_cannot_import() -> None:
    """It can send a body without asking first only as text or as a form."""
    data = await conversation()
    async with running(FakeEngine()) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
            assert (await landed(server, data, **{"content-type": kind})).status_code == 403
        kept = {"content-type": "application/octet-stream", "x-parkd-action": "1"}
        assert (await landed(server, data, **kept)).status_code == 200


async def test_only_an_operator_imports_what_is_more_than_numbers() -> None:
    async with running(FakeOpaqueEngine(), config=KEYS) as server:
        assert (await landed(server, b"x", **{"x-api-key": "k-ann"})).status_code == 403
        assert (await landed(server, b"x", **{"x-api-key": "k-op"})).status_code == 422


async def test_steered_state_keeps_what_steered_it() -> None:
    engine: Callable[[], FakeEngine] = lambda: FakeEngine(steering={"calm": 1.5})  # noqa: E731
    async with running(engine(), answer_bytes=0) as there:
        await there.chat(LONG)
        await there.settled()
        data = await exported(there, ids(there)[0])
        await there.chat(LONG, steering={"calm": 0.5})
        await there.settled()
        chosen = next(each for each in ids(there) if each != ids(there)[0])
        statuses = [
            (await there.client.get(f"/parkd/conversations/{each}/export")).status_code
            for each in (chosen, ids(there)[0])
        ]
        assert sorted(statuses) == [200, 409]
    async with running(engine(), answer_bytes=0) as here:
        assert (await landed(here, data)).status_code == 200
        assert (await here.chat(LONG)).cache == "restored-ram"
    async with running(FakeEngine(), answer_bytes=0) as plain:
        assert (await landed(plain, data)).status_code == 200
        assert (await plain.chat(LONG)).cache == "cold", "nothing steers here"


# What is refused


async def conversation(**engine: Any) -> bytes:
    async with running(FakeEngine(**engine), answer_bytes=0) as server:
        await server.chat(LONG)
        await server.settled()
        return await exported(server, ids(server)[0])


async def test_every_damage_is_refused_and_leaves_nothing() -> None:
    """Cut anywhere, longer, or with any bit changed: nothing of it is parked, and nothing stays reserved."""
    data = await conversation(fixed_bytes=40)
    random = np.random.default_rng(4)
    async with running(FakeEngine(fixed_bytes=40)) as server:
        assert server.store is not None
        before = server.store.stats()
        cuts = [0, 1, 64, 107, 300, len(data) // 2, len(data) - 1]
        damaged = [data[:cut] for cut in cuts] + [data + b"\0", data * 2]
        for at in [*range(0, 120, 5), *random.integers(120, len(data), 40).tolist(), len(data) - 1]:
            changed = bytearray(data)
            changed[at] ^= 1 << int(random.integers(0, 8))
            damaged.append(bytes(changed))
        for each in damaged:
            answer = await landed(server, each)
            assert answer.status_code in (409, 413, 422), (answer.status_code, answer.text)
        assert server.store.stats().bytes_in_use == before.bytes_in_use
        assert not server.store.table.all()
        assert (await landed(server, data)).status_code == 200


async def test_what_differs_from_its_checksum_is_not_exported() -> None:
    async with running(FakeEngine(), answer_bytes=0) as server:
        await server.chat(LONG)
        await server.settled()
        assert server.store is not None
        table, [known] = server.store.table, ids(server)
        parked = server.store.get(known)
        assert parked is not None
        table.blocks.buffers(parked.blocks[1], 256, writeable=True)[0][7] ^= 1
        answer = await server.client.get(f"/parkd/conversations/{known}/export")
        assert answer.status_code == 409
        assert "differs from its checksum" in answer.text
        assert server.store.stats().leased == 0


async def test_other_weights_formats_and_layouts_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with running(tiny(tmp_path, "tiny-llama"), answer_bytes=0) as there:
        await there.chat(A1)
        await there.settled()
        data = await exported(there, ids(there)[0])
    for family, settings, reason in (
        ("tiny-qwen3", {}, "other weights"),
        ("tiny-llama", {"kv_format": "int8"}, "format of rows"),
    ):
        async with running(tiny(tmp_path, family, **settings)) as here:
            answer = await landed(here, data)
            assert answer.status_code == 409
            assert reason in answer.text
            assert here.store is not None
            assert not here.store.table.all()
    async with running(FakeEngine(stages=2)) as here:
        assert "other weights" in (await landed(here, data)).text
    fake = await conversation(stages=2)
    async with running(FakeEngine(stages=3)) as here:
        answer = await landed(here, fake)
        assert answer.status_code == 409
        assert "layers 0 to 1" in answer.text


async def test_what_finds_no_room_is_refused_and_nobody_is_evicted() -> None:
    data = await conversation()
    async with running(FakeEngine(), budget_bytes=44 * 1024) as server:
        await server.chat([{"role": "user", "content": "A short one. " * 8}])
        await server.settled()
        known = ids(server)
        assert known
        answer = await landed(server, data)
        assert answer.status_code == 507, answer.text
        assert "--conversation-cache-mib" in answer.text
        assert ids(server) == known
        assert server.store is not None
        assert server.store.stats().captures_in_flight == 0


async def test_a_slow_client_keeps_no_room_of_others() -> None:
    """An import that has not arrived reserves nothing of the store, and an export that nobody takes leases nothing."""
    data = await conversation()
    config = ProxyConfig(api_keys=("k-ann", "k-ben"))

    async with running(FakeEngine(), config=config, answer_bytes=0, send_buffer_bytes=4096) as server:
        assert server.store is not None
        started, ended = anyio.Event(), anyio.Event()

        async def slowly() -> Any:
            yield data[: len(data) // 2]
            started.set()
            await ended.wait()
            yield data[len(data) // 2 :]

        async with anyio.create_task_group() as tasks:

            async def upload() -> None:
                answer = await server.client.post(
                    "/parkd/conversations/import",
                    content=slowly(),
                    headers={"x-api-key": "k-ann", "content-type": CONTENT_TYPE},
                )
                assert answer.status_code == 200

            tasks.start_soon(upload)
            await started.wait()
            stats = server.store.stats()
            assert (stats.captures_in_flight, stats.bytes_in_use) == (0, 0)
            again = await landed(server, data, **{"x-api-key": "k-ann"})
            assert again.status_code == 503, "one of a key at a time"
            assert (await landed(server, data, **{"x-api-key": "k-ben"})).status_code == 200
            ended.set()
        assert server.store.stats().conversations == 2
        assert server.store.stats().leased == 0


async def test_a_client_that_stops_sending_is_left() -> None:
    data = await conversation()
    config = ProxyConfig(api_keys=("k-ann", "k-ben"), body_silence_s=0.3)
    async with running(FakeEngine(), config=config, answer_bytes=0) as server:
        over, began = anyio.Event(), anyio.Event()

        async def stalling() -> Any:
            yield data[:200]
            began.set()
            await over.wait()
            yield data[200:]

        kinds = {"x-api-key": "k-ann", "content-type": CONTENT_TYPE}
        async with anyio.create_task_group() as tasks:

            async def upload() -> None:
                with suppress(httpx.HTTPError):  # it is answered, and then nobody reads on
                    answer = await server.client.post("/parkd/conversations/import", content=stalling(), headers=kinds)
                    assert answer.status_code == 408

            tasks.start_soon(upload)
            await began.wait()
            with anyio.fail_after(10):
                while (await landed(server, data, **{"x-api-key": "k-ann"})).status_code == 503:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            over.set()
        assert len(ids(server)) == 1


async def test_a_client_that_takes_nothing_is_left() -> None:
    """Its place is free again, and nothing was leased meanwhile."""
    config = ProxyConfig(api_keys=("k-ann", "k-ben"), body_silence_s=2.0)
    long: Messages = [{"role": "user", "content": "Tell me of parking. " * 400}]
    engine = FakeEngine(context_tokens=16384)
    async with running(engine, config=config, answer_bytes=0, send_buffer_bytes=4096) as server:
        assert server.store is not None
        await said(server, "k-ann", long)
        [known] = ids(server)
        host, port = server.client.base_url.host, server.client.base_url.port
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect((host, port or 80))
        with closing(deaf):
            path = f"/parkd/conversations/{known}/export"
            deaf.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nx-api-key: k-ann\r\n\r\n".encode())
            await until(lambda: bool(select.select([deaf], [], [], 0)[0]))  # the answer has begun
            assert await status_of_export(server, "k-ann", known) == 503
            assert server.store.stats().leased == 0
            with anyio.fail_after(15):
                while await status_of_export(server, "k-ann", known) == 503:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert await status_of_export(server, "k-ann", known) == 200


async def test_a_client_that_leaves_leaves_nothing() -> None:
    data = await conversation()
    async with running(FakeEngine(), answer_bytes=0) as server:
        assert server.store is not None
        host, port = server.client.base_url.host, server.client.base_url.port
        for _ in range(10):
            stream = await anyio.connect_tcp(host, port or 80)
            lines = f"host: {host}\r\ncontent-length: {len(data)}\r\ncontent-type: {CONTENT_TYPE}"
            head = f"POST /parkd/conversations/import HTTP/1.1\r\n{lines}\r\n\r\n"
            await stream.send(head.encode() + data[: len(data) // 3])
            await stream.aclose()
        with anyio.fail_after(10):
            while (await landed(server, data)).status_code == 503:  # noqa: ASYNC110 - what is waited for is elsewhere
                await anyio.sleep(0.05)
        assert server.store.stats().conversations == 1


async def test_both_leave_a_line_in_the_log_without_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "parkd.requests"):
        data = await conversation()
        async with running(FakeEngine(), config=KEYS) as server:
            assert (await landed(server, data, **{"x-api-key": "k-op"})).status_code == 200
            known = ids(server)[0]
    lines = [record.getMessage() for record in caplog.records]
    assert any("exported=conversation-1 tokens=" in line for line in lines)
    assert any(f"imported={known} tokens=" in line for line in lines)
    assert not any("parking" in line for line in lines)


async def test_what_is_exported_is_complete_and_has_no_name_of_its_server() -> None:
    async with running(FakeEngine(), config=KEYS, budget_bytes=8 * MIB) as server:
        await said(server, "k-ann", LONG)
        data = await exported(server, ids(server)[0], **{"x-api-key": "k-ann"})
        parked = server.store.get(ids(server)[0]) if server.store is not None else None
        assert parked is not None
        assert parked.namespace.encode() not in data
        assert parked.key_digest not in data
        assert parked.id.encode() not in data
        file = io.BytesIO(data)
        header = read_header(file, len(data))
        verify(file, header)
        assert header.units.tolist() == parked.units.tolist()
        assert header.model == server.engine.info.model_name
