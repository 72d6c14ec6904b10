"""What the command line knows of the disk tier: its settings, `parkd forget`, and the layer split of last time."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parkd import cli
from parkd.cli import split_memory, startup
from parkd.cli.compose import open_files
from parkd.config import MIB, load
from parkd.errors import ConfigError, ModelError
from parkd.identity.answer_file import AnswerFile
from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said
from parkd.proxy.access import namespace_of
from parkd.state import EngineConfig
from parkd.store.files.fs import DirectoryFs
from parkd.store.files.manifest import Manifest, encode
from parkd.store.files.park_directory import open_directory


def test_the_settings_of_the_disk(tmp_path: Path) -> None:
    config = load(
        {
            "conversation-cache-disk-mib": "2048",
            "park-dir": str(tmp_path),
            "disk-write-gib-per-day": "50",
            "conversation-cache-max-age-hours": "72",
        },
        {},
    )
    disk = config.cache.disk
    assert disk.budget_bytes == 2048 * MIB
    assert disk.directory == tmp_path
    assert disk.write_bytes_per_day == 50 << 30
    assert disk.max_age_s == 72 * 3600
    plain = load({}, {}).cache.disk
    assert (plain.budget_bytes, plain.directory, plain.write_bytes_per_day, plain.max_age_s) == (
        0,
        None,
        200 << 30,
        None,
    )


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ({"park-dir": "/somewhere"}, "must say how much"),
        ({"conversation-cache-disk-mib": "10", "conversation-cache-mib": "0"}, "needs memory"),
        ({"conversation-cache-disk-mib": "much"}, "whole number"),
        ({"conversation-cache-disk-mib": "10", "disk-write-gib-per-day": "0"}, "from 1 up"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: dict[str, str], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        load(flags, {})


def test_what_is_said_of_the_disk_at_start(tmp_path: Path) -> None:
    def stats(conversations: int, foreign: int) -> Any:
        return SimpleNamespace(
            budget_bytes=3 << 20, bytes_in_use=1 << 20, conversations=conversations, foreign_conversations=foreign
        )

    free = 2 << 20
    nameless = startup.disk_line(stats(0, 0), None, None)
    assert nameless == "disk      3 MiB in unnamed files, which end with this process"
    assert startup.disk_line(stats(5, 0), Path("/p"), free) == "disk      3 MiB in /p; 5 conversations found"
    assert startup.disk_line(stats(5, 2), Path("/p"), free).endswith(
        "3 conversations found, 2 of another model, KV type or layout"
    )
    assert "; only 1 MiB are free there" in startup.disk_line(stats(5, 0), Path("/p"), free - 1)


def put(fs: DirectoryFs, name: str, data: bytes) -> None:
    file = fs.create(name)
    file.write(0, [np.frombuffer(data, dtype=np.uint8)])
    file.close()


def digest_of(namespace: str) -> bytes:
    return namespace.encode().ljust(16, b"k")[:16]


def park(directory: Path, **namespaces: str) -> None:
    """A conversation of no blocks each, by id and namespace."""
    fs = open_directory(directory)
    for conversation_id, namespace in namespaces.items():
        manifest = Manifest(
            id=conversation_id,
            namespace=namespace,
            key_digest=digest_of(namespace),
            fingerprint=b"f" * 16,
            layout_digest=b"l" * 16,
            block_tokens=256,
            stages=1,
            units=np.arange(3, dtype=np.uint64),
            prefix_hashes=(),
            parked_at_s=0.0,
            last_used_s=0.0,
            extents=(),
            blocks=(),
            checkpoints=(),
        )
        put(fs, manifest.name, encode(manifest))
    fs.close()


def left(directory: Path) -> int:
    return len(list(directory.glob("*.manifest")))


def test_forget_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    park(tmp_path / "d", a="", b="")
    (tmp_path / "d" / "0123456789abcdef.extent").write_bytes(b"of nobody")
    for name in ("ledger.sqlite3", "ledger.sqlite3-wal", "ledger.sqlite3-shm"):
        (tmp_path / "d" / name).write_bytes(b"what turns cost")
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--all"]) == 0
    assert "forgot 2 conversations" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["lock", "parkd-directory"]


def test_forget_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    park(tmp_path / "d", a="", b="")
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--conversation", "a"]) == 0
    assert left(tmp_path / "d") == 1
    assert capsys.readouterr().err == ""
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--conversation", "a"]) == 1
    assert "--list shows" in capsys.readouterr().err


def test_forget_takes_the_name_that_stays_while_a_conversation_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    park(tmp_path / "d", **{"a": "", "a.b": "", "ab": "", "b.a": ""})
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["a", "a", "ab", "b"]
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--conversation", "a"]) == 0
    assert left(tmp_path / "d") == 2


@pytest.mark.parametrize(("asked", "stay"), [("the-key-of-ann", 3), ("team", 3), ("ann", 3), ("nobody", 5), ("", 5)])
def test_forget_what_is_parked_under_a_key(tmp_path: Path, asked: str, stay: int) -> None:
    """By the key, by the namespace that keys share, or by a key's name; a salt's part goes with its key."""
    ann = namespace_of("the-key-of-ann")
    park(tmp_path / "d", a=ann, b=f"{ann}/salted", c="=team", d="=team/salted", e="")
    keys = tmp_path / "keys"
    keys.write_text("ann:the-key-of-ann\nbob:the-key-of-bob:team\n")
    words = ["forget", "--park-dir", str(tmp_path / "d"), "--key", asked, "--api-key-file", str(keys)]
    cli.main(words)
    assert left(tmp_path / "d") == stay


def answered(tokens: int, namespace: str) -> RememberedAnswer:
    """An answer to a prompt of the tokens 0, 1, ..., hashed as docs/FORMAT.md says."""
    prefix = blake2b(np.arange(tokens, dtype="<i4").tobytes(), key=digest_of(namespace), digest_size=16).digest()
    return RememberedAnswer(prefix, np.arange(tokens, tokens + 3, dtype=np.int32), Said((namespace,)), namespace)


def save_answers(directory: Path, *answers: RememberedAnswer) -> None:
    file, memory = AnswerFile(directory / "answers", 1 << 20), OutputMemory(1 << 20, [])
    file.open(memory)
    for answer in answers:
        file.append(answer, memory)
    file.close()


def answers_left(directory: Path) -> list[str]:
    file, memory = AnswerFile(directory / "answers", 1 << 20), OutputMemory(1 << 20, [])
    file.open(memory)
    file.close()
    return [answer.said.runs[0] for answer in memory.all()]


@pytest.mark.parametrize(
    ("words", "code", "left"),
    [
        (["--conversation", "nobody"], 1, ["=a", "=a/salt", "=b"]),
        (["--key", "nobody"], 1, ["=a", "=a/salt", "=b"]),
        (["--key", "a"], 0, ["=b"]),
        (["--key", "b"], 0, ["=a", "=a/salt"]),
        (["--conversation", "first"], 0, ["=a/salt", "=b"]),
        (["--all"], 0, []),
    ],
)
def test_found_by_use_16_only_answers_that_match_are_forgotten(
    tmp_path: Path, words: list[str], code: int, left: list[str]
) -> None:
    """Issue 22, item 16: every call of `parkd forget` deleted everybody's remembered answers."""
    directory = tmp_path / "d"
    park(directory, first="=a", second="=b")
    save_answers(
        directory,
        answered(2, "=a"),  # to a prefix of the conversation `first`
        answered(9, "=a/salt"),
        answered(5, "=b"),
    )
    assert cli.main(["forget", "--park-dir", str(directory), *words]) == code
    assert answers_left(directory) == left


def test_found_by_use_16_ids_and_whose_they_are_can_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 22, item 16: nothing told the id that `--conversation` takes."""
    directory, keys = tmp_path / "d", tmp_path / "keys"
    park(directory, c1=namespace_of("the-key-of-ann"), c2="=team/salt", c3="=other", c4="")
    for path in directory.glob("*.manifest"):
        os.utime(path, (1_800_000_000, 1_800_000_000))
    keys.write_text("ann:the-key-of-ann\nbob:the-key-of-bob:team\ncarol:the-key-of-carol:team\n")
    assert cli.main(["forget", "--park-dir", str(directory), "--list", "--api-key-file", str(keys)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ID  TOKENS  LAST USED (UTC)   KEY",
        "c1       3  2027-01-15 08:00  ann",
        "c2       3  2027-01-15 08:00  bob,carol (salted)",
        "c3       3  2027-01-15 08:00  other",
        "c4       3  2027-01-15 08:00  -",
    ]
    assert left(directory) == 4


def test_found_by_use_15_forget_takes_no_other_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "empty", tmp_path / "letters"):
        path.mkdir(mode=0o755)
    (tmp_path / "letters" / "dear").touch()
    for name in ("empty", "letters"):
        assert cli.main(["forget", "--park-dir", str(tmp_path / name), "--all"]) == cli.EXIT_USAGE
        assert str(tmp_path / name) in capsys.readouterr().err
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755
        assert not (tmp_path / name / "lock").exists()


def test_found_by_use_15_a_directory_that_was_created_is_told(tmp_path: Path) -> None:
    """Issue 22, item 15: a mistyped path was created without a word."""
    flags = {"park-dir": str(tmp_path / "typo" / "d"), "conversation-cache-disk-mib": "10"}
    for expected in ([f"--park-dir {tmp_path}/typo/d did not exist and was created"], []):
        notes: list[str] = []
        files = open_files(load(flags, {}), notes.append)
        assert files is not None
        files.close()
        assert notes == expected


def test_forget_waits_for_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs = open_directory(tmp_path / "d")
    assert cli.main(["forget", "--park-dir", str(tmp_path / "d"), "--all"]) == cli.EXIT_USAGE
    assert "in use by another parkd" in capsys.readouterr().err
    fs.close()


@pytest.mark.parametrize(
    "words",
    [["--all"], ["--park-dir", "x"], ["--park-dir", "x", "--all", "--key", "k"], ["--park-dir", "/no/such", "--all"]],
)
def test_forget_says_what_is_missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["forget", *words]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith("parkd: ")


class Loader:
    """Loads engines whose split is what was asked for, else `auto`; some do not fit."""

    def __init__(self, auto: tuple[int, ...], too_large: tuple[int, ...] = ()) -> None:
        self.auto, self.too_large, self.asked = auto, too_large, []

    def __call__(self, config: Any) -> Any:
        split = config.model.layout.layer_split
        self.asked.append(split)
        if split and split == self.too_large:
            raise ModelError("no room")
        firsts = (0, *(split or self.auto))
        return SimpleNamespace(
            info=SimpleNamespace(
                layout=SimpleNamespace(stages=[SimpleNamespace(first_layer=first) for first in firsts])
            )
        )


def test_the_layer_split_of_last_time_is_tried_first(tmp_path: Path) -> None:
    fs = open_directory(tmp_path / "d")
    config = load({"devices": "cuda:0,cuda:1"}, {})
    first = Loader(auto=(12,))
    split_memory.load(config, "model", fs, first)
    assert first.asked == [None]
    second = Loader(auto=(11,))
    split_memory.load(config, "model", fs, second)
    assert second.asked == [(12,)], "a little less memory does not orphan what is parked"
    third = Loader(auto=(9,), too_large=(12,))
    split_memory.load(config, "model", fs, third)
    assert third.asked == [(12,), None]
    assert split_memory.recall(fs, "model", ("cuda:0", "cuda:1")) == (9,)
    assert split_memory.recall(fs, "another", ("cuda:0", "cuda:1")) is None
    assert split_memory.recall(fs, "model", ("cuda:0", "cuda:2")) is None
    fs.close()


def test_a_split_that_was_asked_for_is_taken(tmp_path: Path) -> None:
    fs = open_directory(tmp_path / "d")
    split_memory.remember(fs, "model", ("cpu", "cpu"), (12,))
    config = load({"devices": "cpu,cpu", "layer-split": "5"}, {})
    loader = Loader(auto=(1,))
    split_memory.load(config, "model", fs, loader)
    single = replace(config, model=replace(config.model, layout=EngineConfig(devices=("cpu",))))
    split_memory.load(single, "model", fs, loader)
    split_memory.load(config, "model", None, loader)
    assert loader.asked == [(5,), None, (5,)]
    fs.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"layer_split": 3}', b'{"layer_split": ["x"]}'])
def test_a_split_that_can_not_be_read_is_none(tmp_path: Path, text: bytes) -> None:
    fs = open_directory(tmp_path / "d")
    put(fs, split_memory.FILE_NAME, text)
    assert split_memory.recall(fs, "model", ("cpu", "cpu")) is None
    fs.close()
