"""States that their engine writes to files: taken up by the store, and given up with their conversation."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from parkd.errors import EngineFailure
from parkd.store.files.park_directory import open_directory
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import until
from tests.integration.api.disk_harness import running_on, written
from tests.integration.api.test_api_switching import never_parked, opening, rows_left_by, turn_after

pytestmark = pytest.mark.anyio

engine_with_files = partial(FakeOpaqueEngine, in_files=True)


class FailingFs:
    """The named operation fails as long as it is told to."""

    def __init__(self, path: Path, operation: str) -> None:
        self._files = open_directory(path)
        self._operation = operation
        self.fails = False

    def __getattr__(self, name: str):
        if name == self._operation and self.fails:
            return self._fail
        return getattr(self._files, name)

    def _fail(self, *_: object) -> None:
        raise OSError(28, "no space left")


async def test_memory_holds_no_state_and_the_disk_holds_it_once(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park", engine_with_files()) as server:
        a1 = opening("a", 4000)
        first = await server.chat(a1)
        await server.chat(opening("b"))
        await written(server)
        stats = server.store.stats()
        assert (stats.conversations, stats.row_bytes, stats.checkpoint_bytes) == (2, 0, 0)
        files = [path.stat() for path in (tmp_path / "park").iterdir() if path.suffix in (".extent", ".manifest")]
        taken = sum(-(-file.st_size // 4096) * 4096 for file in files)
        assert taken <= server.store.disk_stats().bytes_in_use <= 1.2 * taken
        second = await server.chat(turn_after(a1, first.text, "And then?"))
        assert (second.cache, second.reused) == ("restored-disk", len(rows_left_by(server, a1, first.text)))
        assert second.text == never_parked(turn_after(a1, first.text, "And then?"))


async def test_a_state_exact_at_its_end_alone_resumes_there_only(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park", engine_with_files(fixed_bytes=40)) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("restored-disk", len(rows_left_by(server, a1, first.text)))
        await server.chat(opening("b"))
        edited = await server.chat(turn_after(a1, first.text, "What else?"))
        assert edited.reused == len(rows_left_by(server, a1, first.text)), (
            "A1's own file, which A2's does not supersede"
        )
        assert edited.text == never_parked(turn_after(a1, first.text, "What else?"))


async def test_the_disk_budget_holds_and_what_goes_is_gone_from_memory_too(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park", engine_with_files(), disk_bytes=400_000) as server:
        prompts = [opening(name, 2000) for name in "abcdefgh"]
        for messages in prompts:
            await server.chat(messages)
            assert server.store.disk_stats().bytes_in_use <= 400_000
        await written(server)
        extents = list((tmp_path / "park").glob("*.extent"))
        assert 2 <= len(extents) == server.store.stats().conversations < 8
        last = await server.chat(turn_after(prompts[-2], "x", "More?"))
        assert last.cache == "restored-disk"
        first = await server.chat(turn_after(prompts[0], "x", "More?"))
        assert first.reused < 60, "only what all prompts share"


@pytest.mark.parametrize("operation", ["create", "rename", "sync"])
async def test_without_a_manifest_there_is_no_conversation(tmp_path: Path, operation: str) -> None:
    files = FailingFs(tmp_path / "park", operation)
    async with running_on(tmp_path / "park", engine_with_files(), files=files) as server:
        files.fails = True
        a1 = opening("a")
        first = await server.chat(a1)
        await until(lambda: server.store.disk_stats().write_failures_total > 0)
        await until(lambda: server.store.stats().conversations == 0)
        assert not list((tmp_path / "park").glob("*.extent"))
        await server.chat(opening("b", system="You are brief."))
        a2 = turn_after(a1, first.text, "And?")
        second = await server.chat(a2)
        assert second.reused < 60, "only what B's prompt shares"
        assert second.text == never_parked(a2)
        files.fails = False


async def test_a_file_that_nobody_named_is_removed_at_the_start(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park", engine_with_files()) as server:
        await server.chat(opening("a"))
    stray = tmp_path / "park" / f"{7:016x}.extent"
    stray.write_bytes(os.urandom(5000))
    async with running_on(tmp_path / "park", engine_with_files()) as server:
        assert not stray.exists()
        assert server.store.disk_stats().conversations == 1


async def test_an_engine_that_cannot_write_parks_nothing(tmp_path: Path) -> None:
    def hook(step: str, _number: int) -> None:
        if step == "capture":
            raise EngineFailure("the disk is full")

    async with running_on(tmp_path / "park", engine_with_files(hook=hook)) as server:
        await server.chat(opening("a"))
        await server.settled()
        await until(lambda: server.store.disk_stats().bytes_in_use == 0)
        assert server.store.stats().conversations == 0
