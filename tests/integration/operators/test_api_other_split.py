"""A restart with another layer split over the same park directory: parked conversations go on as if nothing had
changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.api.api_harness import running, until
from tests.integration.api.disk_harness import running_on, written
from tests.integration.api.test_api_hybrids import A1, B1, tiny
from tests.integration.operators.test_api_portable import asked_with_logprobs, ids
from tests.integration.operators.test_api_portable_commands import command

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        ("tiny-llama", None),
        ("tiny-qwen3", "int8"),
        ("tiny-gemma3", None),
        ("tiny-qwen3.5-mtp", None),
    ],
)
async def test_one_two_three_one(family: str, kv_format: str | None, tmp_path: Path) -> None:
    def engine(stages: int) -> Any:
        return tiny(tmp_path / "cache", family, devices=("cpu",) * stages, kv_format=kv_format)

    park, turn = tmp_path / "park", []
    stayed: Any = None
    for stages in (1, 2, 3, 1):
        async with running_on(park, engine(stages), disk_bytes=64 << 20) as server:
            if not turn:
                first = await server.chat(A1)
                turn = [*A1, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
                await written(server)
                await server.chat(B1)
                stayed = await asked_with_logprobs(server, turn)
                # What this turn parked is not for the next split: it begins where the first turn ended.
                await server.chat(B1)
                continue
            assert server.store is not None
            assert server.store.disk_stats().foreign_conversations == 0
            moved = await asked_with_logprobs(server, turn)
            assert moved[:2] == stayed[:2]
            assert moved[2] == "restored-disk"
            await written(server)
            here = [each for each in server.store.table.all() if each.disk is not None and each.disk.recut is None]
            assert max(each.parked.position for each in here) >= moved[3], "written anew, in this split"


async def test_a_file_of_another_split_is_put_into_a_directory(tmp_path: Path) -> None:
    """Nobody is there to cut it: the next server does, when the conversation returns."""
    file = tmp_path / "talk.parkd"
    async with running(tiny(tmp_path / "cache", "tiny-qwen3.5", devices=("cpu",)), answer_bytes=0) as there:
        first = await there.chat(A1)
        await there.settled()
        assert await command("export", ids(there)[0], file, "--url", there.url) == 0
    assert await command("import", file, "--park-dir", tmp_path / "park") == 0
    async with running_on(tmp_path / "park", tiny(tmp_path / "cache", "tiny-qwen3.5")) as here:
        again = await here.chat(A1)
        assert (again.cache, again.text) == ("restored-disk", first.text)


async def test_a_conversation_of_another_split_can_be_exported(tmp_path: Path) -> None:
    park = tmp_path / "park"
    async with running_on(park, tiny(tmp_path / "cache", "tiny-llama", devices=("cpu",))) as server:
        await server.chat(A1)
        await written(server)
    async with running_on(park, tiny(tmp_path / "cache", "tiny-llama")) as server:
        await until(lambda: bool(ids(server)))
        answer = await server.client.get(f"/parkd/conversations/{ids(server)[0]}/export")
        assert answer.status_code == 200, answer.text
