"""Conversations that leave memory, and servers that stop and start: what is reused, and that answers stay right."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path

import anyio
import pytest

from parkd.errors import ConfigError
from parkd.state import Grain
from parkd.store.files.fs import UnlinkedFs
from parkd.store.files.park_directory import open_directory
from parkd.types import CacheOutcome
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api import disk_harness
from tests.integration.api.api_harness import MIB, Gate, until
from tests.integration.api.disk_harness import Running, running_on, written
from tests.integration.api.test_api_switching import never_parked, opening, rows_left_by, turn_after

pytestmark = pytest.mark.anyio

FILES = partial(FakeOpaqueEngine, in_files=True)


@pytest.fixture(autouse=True, params=[FakeEngine, FakeOpaqueEngine, FILES], ids=["rows", "opaque", "file"])
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk too, whole states are kept like rows."""
    monkeypatch.setitem(globals(), "FakeEngine", request.param)
    monkeypatch.setattr(disk_harness, "FakeEngine", request.param)


def from_memory(server: Running) -> str:
    """What is said of what need not be read from disk first. A file is on disk however often it was used."""
    return "restored-disk" if server.engine.info.layout.grain is Grain.FILE else "restored-ram"


async def test_a_restarted_server_restores_from_disk(tmp_path: Path) -> None:
    """A1, stop, start, A2: the prefix comes from disk, and the answer is that of a conversation that never left."""
    a1 = opening("a")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(a1)
        left = rows_left_by(server, a1, first.text)
    a2 = turn_after(a1, first.text, "And then?")
    async with running_on(tmp_path / "park") as server:
        second = await server.chat(a2)
        assert second.cache == "restored-disk"
        assert second.headers["x-parkd-cache"] == "restored-disk"
        assert second.reused == len(left)
        assert second.text == never_parked(a2)
        again = await server.chat(a2)
        assert (again.cache, again.text) == ("live", second.text)
        await server.chat(opening("b"))
        third = await server.chat(turn_after(a2, second.text, "More."))
        assert third.cache == from_memory(server)


async def test_a_stop_writes_what_waits(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park") as server:
        await server.chat(opening("a"))
    suffixes = [path.suffix for path in (tmp_path / "park").iterdir()]
    assert sorted(suffixes) == ["", "", ".extent", ".layout", ".manifest"], "the lock and the marker are two of them"


async def test_a_stop_puts_down_when_each_was_last_used(tmp_path: Path) -> None:
    park = tmp_path / "park"
    async with running_on(park) as server:
        await server.chat(opening("a"))
        await written(server)
    (manifest,) = park.glob("*.manifest")
    os.utime(manifest, (1e9, 1e9))
    async with running_on(park) as server:
        assert manifest.stat().st_mtime == 1e9, "nothing used it yet"
        await server.chat(opening("a"))
        await written(server)
    assert max(path.stat().st_mtime for path in park.glob("*.manifest")) > 1.6e9


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park") as server:
        await server.chat(opening("a"))
    assert stat.S_IMODE((tmp_path / "park").stat().st_mode) == 0o700
    for path in (tmp_path / "park").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    files = open_directory(tmp_path / "park")
    with pytest.raises(ConfigError, match=f"in use by another parkd \\(process {os.getpid()}\\)"):
        open_directory(tmp_path / "park")
    files.close()
    open_directory(tmp_path / "park").close()


async def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not parkd's"):
        open_directory(tmp_path)


async def test_other_weights_match_nothing(tmp_path: Path) -> None:
    """Report 12: the same name, other weights."""
    a1 = opening("a")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(a1)
    other = FakeEngine()
    other.info = type(other.info)(**{**vars(other.info), "fingerprint": b"other weights 16"})
    async with running_on(tmp_path / "park", other) as server:
        answer = await server.chat(turn_after(a1, first.text, "And then?"))
        assert (answer.cache, answer.reused) == ("cold", 0)
        assert server.store.disk_stats().foreign_conversations == 1


async def test_another_layer_split_matches_nothing(tmp_path: Path) -> None:
    """Report 12: the same weights, other stages."""
    a1 = opening("a")
    async with running_on(tmp_path / "park", FakeEngine(stages=2)) as server:
        first = await server.chat(a1)
    async with running_on(tmp_path / "park", FakeEngine(stages=3)) as server:
        a2 = turn_after(a1, first.text, "And then?")
        answer = await server.chat(a2)
        assert (answer.cache, answer.reused) == ("cold", 0)
        assert answer.text == never_parked(a2, stages=3)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
async def test_damage_on_disk_reads_cold_with_the_right_text(tmp_path: Path, damage: str) -> None:
    """Reports 11 and 50: what can't be read is a miss, for this conversation only, and later answers are right."""
    a1, b1 = opening("a"), opening("b", system="You are brief.")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(a1)
        await written(server)
        (extent,) = (tmp_path / "park").glob("*.extent")
        other = await server.chat(b1)
    data = bytearray(extent.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        extent.unlink()
    else:
        extent.write_bytes(data if damage == "flip" else data[:-4096])
    async with running_on(tmp_path / "park") as server:
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        assert second.reused < 40  # the head of the template that both share
        assert second.text == never_parked(a2)
        b2 = turn_after(b1, other.text, "And?")
        answer = await server.chat(b2)
        assert answer.text == never_parked(b2)
        # A whole state may have come to RAM already, for the head of the template that it shares with A.
        assert answer.cache in ("restored-disk", "restored-ram" if server.engine.info.layout.is_opaque else "")
        third = await server.chat(turn_after(a2, second.text, "More."))
        assert third.cache == from_memory(server)
        await written(server)
        assert not extent.exists()


async def test_memory_is_a_cache_of_what_is_on_disk(tmp_path: Path) -> None:
    """More conversations than memory holds, round and round: each comes back whole, most of them from disk."""
    async with running_on(tmp_path / "park", slots=2) as server:
        talks = {name: opening(name, 900, system=f"{name}: be brief.") for name in "abcde"}
        caches = []
        for _ in range(3):
            for name in talks:
                answer = await server.chat(talks[name])
                caches.append(answer.cache)
                assert answer.text == never_parked(talks[name])
                talks[name] = turn_after(talks[name], answer.text, "Next.")
                stats = server.store.stats()
                assert stats.bytes_allocated <= stats.budget_bytes
                await written(server)
        assert set(caches[:5]) <= {"cold", "live"}
        assert caches[5:] == ["restored-disk"] * 10
        assert server.store.disk_stats().bytes_in_use <= 64 * MIB


async def test_without_a_directory_nothing_stays(tmp_path: Path) -> None:
    if FakeEngine().info.layout.grain is Grain.FILE:
        pytest.skip("a state in a file has a directory")
    files = UnlinkedFs(tmp_path)
    async with running_on(tmp_path, files=files, slots=1) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        await written(server)
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        assert (second.cache, second.text) == ("restored-disk", never_parked(a2))
        assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a test's own directory
        assert server.store.disk_stats().bytes_in_use > 0


async def test_a_waiting_turn_is_read_from_disk_meanwhile(tmp_path: Path) -> None:
    """Promotion starts while the request waits for the lane."""
    a1 = opening("a")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(a1)
    gate = Gate("chunk")
    async with running_on(tmp_path / "park", FakeEngine(hook=gate)) as server:
        answers = {}

        async def ask(name: str, messages: list) -> None:
            answers[name] = await server.chat(messages)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "b", opening("b", system="You are brief."))
            await gate.wait_reached()
            a2 = turn_after(a1, first.text, "And then?")
            tasks.start_soon(ask, "a", a2)

            def long_ones():
                there = server.store.inspect().conversations.values()
                return [each for each in there if each.is_in_ram and each.position > 1000]

            await until(long_ones)
            reads = server.store.disk_stats().reads_total
            await until(lambda: any(each.awaited for each in long_ones()))
            gate.opened.set()
        # A whole state was used from RAM before, for the head of the template that B shares with it.
        assert answers["a"].cache == (from_memory(server) if server.engine.info.layout.is_opaque else "restored-disk")
        assert answers["a"].text == never_parked(a2)
        assert server.store.disk_stats().reads_total == reads


async def test_reading_is_chosen_where_it_is_cheaper_than_the_disk(tmp_path: Path) -> None:
    """Report 54: a disk slower than the model is not read."""
    a1 = opening("a")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(a1)
    async with running_on(tmp_path / "park") as server:
        costs = server.server.proxy.costs
        for tier in (CacheOutcome.RESTORED_RAM, CacheOutcome.RESTORED_DISK):
            for _ in range(100):
                costs.note_move(tier, 1 << 30, float(1 << 30))  # a byte a second
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        assert (second.cache, second.text) == ("cold", never_parked(a2))
        assert "cheaper" in second.timings["why"]
        assert server.store.disk_stats().reads_total == 0
