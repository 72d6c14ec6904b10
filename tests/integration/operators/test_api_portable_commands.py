"""`parkd export` and `parkd import`, against a server and against a park directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from parkd.cli import main, portable
from parkd.errors import ConfigError
from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import running
from tests.integration.api.disk_harness import running_on, written
from tests.integration.operators.test_api_portable import KEYS, LONG, ids, said

pytestmark = pytest.mark.anyio
ENGINES: dict[str, Callable[[], FakeEngine]] = {
    "rows": FakeEngine,
    "linear": partial(FakeEngine, fixed_bytes=40),
    "opaque": partial(FakeOpaqueEngine, fixed_bytes=40),
    "file": partial(FakeOpaqueEngine, in_files=True),
}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def command(*words: object) -> int:
    name, *rest = map(str, words)
    return await anyio.to_thread.run_sync(portable.run, name, rest)


async def test_the_server_and_the_key_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, directory = tmp_path / "talk.parkd", tmp_path / "park"
    monkeypatch.setenv("PARKD_API_KEY", "k-ann, k-eve")
    async with running(FakeEngine(), config=KEYS, answer_bytes=0) as server:
        monkeypatch.setenv("PARKD_URL", server.url)
        first, _ = await said(server, "k-ann", LONG)
        assert await command("export", ids(server)[0], file) == 0
    async with running(FakeEngine(), config=KEYS, answer_bytes=0) as server:
        monkeypatch.setenv("PARKD_URL", server.url)
        assert await command("import", file) == 0
        assert await said(server, "k-ann", LONG) == (first, "restored-ram")
    # Whose it is in a directory is told, not taken from there.
    assert await command("import", file, "--park-dir", directory) == 0
    async with running_on(directory, FakeEngine()) as server:
        assert (await server.chat(LONG)).cache == "restored-disk"


async def test_from_server_to_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.parkd"
    async with running(FakeEngine(), config=KEYS, answer_bytes=0) as there:
        first, _ = await said(there, "k-ann", LONG)
        asked = ("export", ids(there)[0], file, "--url", there.url)
        with pytest.raises(ConfigError, match="API key"):
            await command(*asked)
        assert not names_in(tmp_path), "nothing is left of what failed"
        assert await command(*asked, "--api-key", "k-ann") == 0
        assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="--force"):
            await command(*asked, "--api-key", "k-ann")
        assert await command(*asked, "--api-key", "k-ann", "--force") == 0
        with pytest.raises(ConfigError, match="No conversation"):
            await command("export", "nothing", tmp_path / "no", "--url", there.url, "--api-key", "k-ann")
    async with running(FakeEngine(), config=KEYS, answer_bytes=0) as here:
        assert await command("import", file, "--url", here.url, "--api-key", "k-op", "--into", "eve") == 0
        assert await said(here, "k-eve", LONG) == (first, "restored-ram")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ConfigError, match="bytes of"):
            await command("import", file, "--url", here.url, "--api-key", "k-op")
    with pytest.raises(ConfigError, match="no server answers"):
        await command("export", "any", tmp_path / "no", "--url", "http://127.0.0.1:9")
    assert "imported" in capsys.readouterr().out


@pytest.mark.parametrize("kind", list(ENGINES))
async def test_from_directory_to_directory(kind: str, tmp_path: Path) -> None:
    file, there, here = tmp_path / "talk.parkd", tmp_path / "there", tmp_path / "here"
    async with running_on(there, ENGINES[kind]()) as server:
        first = await server.chat(LONG)
        await written(server)
        [known] = ids(server)
        with pytest.raises(ConfigError, match="in use"):
            await command("export", known, file, "--park-dir", there)
    assert await command("export", known, file, "--park-dir", there) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert await command("import", file, "--park-dir", here) == 0
    assert {path.stat().st_mode & 0o777 for path in here.iterdir()} == {0o600}
    async with running_on(here, ENGINES[kind]()) as server:
        again = await server.chat(LONG)
        assert (again.cache, again.text) == ("restored-disk", first.text)
    # What was offline and what was online is the same conversation.
    async with running_on(tmp_path / "third", ENGINES[kind]()) as server:
        assert await command("import", file, "--url", server.url) == 0
        assert (await server.chat(LONG)).text == first.text


async def test_an_operator_says_whose_it_is(tmp_path: Path) -> None:
    keys = ProxyConfig(named_keys=(NamedKey("carol", "k-carol", "team"), NamedKey("eve", "k-eve")))
    listed = tmp_path / "keys"
    listed.write_text("carol:k-carol:team\neve:k-eve\n")
    listed.chmod(0o600)
    file = tmp_path / "talk.parkd"
    async with running(FakeEngine(), answer_bytes=0) as there:
        await there.chat(LONG)
        await there.settled()
        assert await command("export", ids(there)[0], file, "--url", there.url) == 0
    for number, (into, answered, not_answered) in enumerate(
        [("team", "k-carol", "k-eve"), ("carol", "k-carol", "k-eve"), ("k-eve", "k-eve", "k-carol")]
    ):
        here = tmp_path / f"here{number}"
        assert await command("import", file, "--park-dir", here, "--into", into, "--api-key-file", listed) == 0
        async with running_on(here, config=keys) as server:
            assert (await said(server, answered, LONG))[1] == "restored-disk"
            assert (await said(server, not_answered, LONG))[1] == "cold"


async def test_a_damaged_directory_gives_nothing(tmp_path: Path) -> None:
    there = tmp_path / "there"
    async with running_on(there) as server:
        await server.chat(LONG)
        await written(server)
        [known] = ids(server)
    asked: tuple[Any, ...] = ("export", known, tmp_path / "talk.parkd", "--park-dir", there)
    [extent] = there.glob("*.extent")
    content = bytearray(extent.read_bytes())
    content[5000] ^= 4
    extent.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="differs from its checksum"):
        await command(*asked)
    [layout] = there.glob("*.layout")
    layout.unlink()
    with pytest.raises(ConfigError, match="earlier version"):
        await command(*asked)
    with pytest.raises(ConfigError, match="no conversation"):
        await command("export", "nothing", tmp_path / "talk.parkd", "--park-dir", there)
    assert names_in(tmp_path) == {"there"}


def test_what_is_no_conversation_is_refused_before_it_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello")
    assert main(["import", str(tmp_path / "text")]) == 2
    assert main(["import", str(tmp_path / "none")]) == 2
    assert main(["export", "one"]) == 2
    assert "shorter than a header" in capsys.readouterr().err
