"""Files on a real file system, and the manifest's bytes."""

from __future__ import annotations

import os
import re
import resource
import stat
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from parkd.cli.compose import open_files
from parkd.config import load
from parkd.errors import ConfigError
from parkd.private_files import private_opener
from parkd.store.files.fs import GRAIN_BYTES, OpenFile, UnlinkedFs, aligned_zeros
from parkd.store.files.manifest import (
    DamagedManifest,
    DiskBlock,
    DiskCheckpoint,
    DiskPlace,
    ExtentRef,
    Manifest,
    decode,
    encode,
    encoded_bytes,
)
from parkd.store.files.park_directory import open_directory, open_temporary
from tests.unit.store.store_kit import KEY, make_hashes, make_units

STAGES = 2


def make_manifest(tokens: int = 11, *, wide: bool = False) -> Manifest:
    rng = np.random.default_rng(tokens)
    units = make_units(1, tokens)
    if wide:
        units[-1] = np.uint64(1 << 63)

    def sums() -> np.ndarray:
        return rng.integers(0, 1 << 63, STAGES, dtype=np.uint64)

    def place(extent: int) -> DiskPlace:
        return DiskPlace(extent, sums(), sums())

    extents = (ExtentRef(7, 8192), ExtentRef((1 << 64) - 1, 4096))
    blocks = tuple(
        DiskBlock((5 << 32) + i, min(4, tokens - 4 * i), rng.bytes(16), sums(), place(extents[i % 2].id))
        for i in range(-(-tokens // 4))
    )
    return Manifest(
        id="a conversation",
        namespace="whose",
        key_digest=KEY,
        fingerprint=b"the weights, one",
        layout_digest=b"l" * 16,
        block_tokens=4,
        stages=STAGES,
        units=units,
        prefix_hashes=make_hashes(units, 4),
        parked_at_s=1.5e9,
        last_used_s=1.6e9,
        extents=extents,
        blocks=blocks,
        checkpoints=(DiskCheckpoint(tokens, sums(), place(7)),),
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    return left == right


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11, 400])
def test_a_manifest_comes_back_as_it_was(tokens: int, wide: bool) -> None:
    manifest = make_manifest(tokens, wide=wide)
    data = encode(manifest)
    assert same(decode(data), manifest)
    assert len(data) <= encoded_bytes(tokens, len(manifest.blocks), 1, STAGES, 2)


def test_the_first_unit_that_is_too_wide_and_hashes_of_another_width_come_back() -> None:
    manifest = make_manifest(8)
    units = manifest.units.copy()
    units[3] = np.uint64(1 << 32)
    manifest = replace(manifest, units=units, prefix_hashes=make_hashes(units, 4, width=8))
    assert same(decode(encode(manifest)), manifest)


@pytest.mark.parametrize(("at", "piece", "said"), [(0, b"anything", "not a manifest"), (8, b"\x09", "format 9")])
def test_another_format_is_named_before_it_is_read(at: int, piece: bytes, said: str) -> None:
    """Its checksum is right: it is whole, and of another program."""
    data = bytearray(encode(make_manifest()))
    data[at : at + len(piece)] = piece
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    with pytest.raises(DamagedManifest, match=said):
        decode(bytes(data))


def test_the_header_is_the_one_that_is_described() -> None:
    """docs/FORMAT.md is read, and its table found true of the bytes."""
    text = (Path(__file__).parents[3] / "docs" / "FORMAT.md").read_text()
    text = text.partition("## Manifest")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (8 bytes|16 bytes|u16|u32|u64|f64) \|", text, re.MULTILINE)
    codes = {"8 bytes": "8s", "16 bytes": "16s", "u16": "H", "u32": "I", "u64": "Q", "f64": "d"}
    data = encode(make_manifest())
    values = [struct.unpack_from("<" + codes[kind], data, int(at))[0] for at, kind in rows]
    assert values[:13] == [b"parkdMAN", 1, 1, len(data), 1.5e9, 1.6e9, 11, 4, STAGES, 2, 3, 1, 16]
    assert values[13:] == [KEY, b"l" * 16, b"the weights, one", 14, 5]
    ends = [int(at) + struct.calcsize("<" + codes[kind]) for at, kind in rows]
    assert ends[:-1] == [int(at) for at, _ in rows][1:]
    header = int(re.search(r"Header, (\d+) bytes", text)[1])
    assert ends[-1] == header
    assert struct.unpack_from("<4Q", data, header) == (7, 8192, (1 << 64) - 1, 4096)
    assert struct.unpack_from("<3Q", data, header + 32) == (5 << 32, (5 << 32) + 1, (5 << 32) + 2)
    assert data[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))
    assert data[-8 - 5 : -8] == b"whose"


def test_no_part_of_a_manifest_is_one() -> None:
    data = encode(make_manifest())
    for size in range(len(data)):
        with pytest.raises(DamagedManifest):
            decode(data[:size])
    with pytest.raises(DamagedManifest):
        decode(data + b"\0")


def like_windows(patch: pytest.MonkeyPatch) -> None:
    """Takes away what Windows lacks: names below a descriptor, calls at a place, flags of open files."""
    patch.setattr("parkd.store.files.folder.HAS_DESCRIPTORS", False)
    patch.setattr("parkd.store.files.fs.fcntl", None)
    for name in ("pwritev", "preadv", "posix_fadvise", "O_DIRECT"):
        patch.delattr(os, name)


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", ["directory", "by paths", "unlinked"])
def test_files_hold_what_was_written(tmp_path: Path, kind: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "by paths":
        like_windows(monkeypatch)
    fs = open_directory(tmp_path / "d", direct=direct) if kind != "unlinked" else UnlinkedFs(tmp_path, direct=direct)
    aligned = aligned_zeros(3 * GRAIN_BYTES)
    aligned[:] = random_bytes(aligned.size)
    odd = random_bytes(1000, 1)
    file = fs.create("x.tmp")
    file.write(0, [aligned[:GRAIN_BYTES], aligned[GRAIN_BYTES:]])
    file.write(aligned.size, [odd])
    file.sync()
    file.close()
    with pytest.raises(FileExistsError):
        fs.create("x.tmp")
    fs.rename("x.tmp", "x")
    fs.sync()
    assert fs.sizes().items() >= {"x": aligned.size + 1000}.items()
    assert fs.load("x") == aligned.tobytes() + odd.tobytes()
    file = fs.open("x")
    target, rest = aligned_zeros(aligned.size), np.zeros(1000, dtype=np.uint8)
    file.read(0, [target])
    file.read(aligned.size, [rest])
    assert np.array_equal(target, aligned)
    assert np.array_equal(rest, odd)
    with pytest.raises(OSError, match="ends too early"):
        file.read(aligned.size, [np.zeros(1001, dtype=np.uint8)])
    file.close()
    fs.mark("x", 1.5e9)
    assert fs.times().get("x", 1.5e9) == 1.5e9
    assert ("x" in fs.times()) == (kind != "unlinked"), "nobody opens the others again"
    fs.remove("x")
    assert "x" not in fs.sizes()
    with pytest.raises(FileNotFoundError):
        fs.open("x")
    fs.close()


def test_calls_that_do_a_part_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write or read less than it was asked for."""
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:700]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:900]], offset))
    fs = open_directory(tmp_path / "d")
    pieces = [random_bytes(size, size) for size in (1, 5000, 0, 4096, 333)]
    file = fs.create("x")
    file.write(0, pieces)
    file.close()
    back = [np.zeros_like(piece) for piece in pieces]
    file = fs.open("x")
    file.read(0, back)
    file.close()
    assert all(np.array_equal(got, want) for got, want in zip(back, pieces, strict=True))
    fs.close()


@pytest.mark.parametrize("system", ["this", "windows"])
def test_calls_of_many_threads_on_one_file_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system == "windows":
        like_windows(monkeypatch)
    fs = open_directory(tmp_path / "d")
    pieces = [random_bytes(3000 + number, number) for number in range(64)]
    starts = [sum(piece.size for piece in pieces[:number]) for number in range(64)]
    with closing(fs.create("x")) as file, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda start, piece: file.write(start, [piece[:1000], piece[1000:]]), starts, pieces))
    back = [np.zeros_like(piece) for piece in pieces]
    with closing(fs.open("x")) as file, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda start, piece: file.read(start, [piece]), starts, back))
    assert all(np.array_equal(got, want) for got, want in zip(back, pieces, strict=True))
    fs.close()


def test_files_of_a_process_are_gone_with_it_where_every_file_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parkd.store.files.park_directory.OPEN_FILES", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fs = open_temporary()
    with closing(fs.create("x")) as file:
        file.write(0, [random_bytes(10)])
    (where,) = tmp_path.iterdir()
    assert (where / "x").stat().st_size == 10
    fs.close()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_does_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    file = OpenFile(os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT, 0o600), direct=False)
    with pytest.raises(OSError, match="nothing was written"):
        file.write(0, [random_bytes(10)])
    file.close()


def test_more_unlinked_files_than_a_process_has_at_first(tmp_path: Path) -> None:
    """Each is an open one, so that the usual limit of 1,024 would end parking at some hundred conversations."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        fs = UnlinkedFs(tmp_path)
        for number in range(400):
            fs.create(str(number)).close()
        assert len(fs.sizes()) == 400
        fs.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_a_disk_tier_may_open_more_files_too() -> None:
    """A connection is one: at 1,024, clients that do nothing would keep all others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        assert open_files(load({}, {})) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def folder(path: Path, *names: str) -> Path:
    """A directory of mode 0755 with files of these names, each with some text."""
    path.mkdir(mode=0o755)
    for name in names:
        (path / name).write_text("precious")
    return path


def looks(path: Path) -> dict[str, object]:
    """All that opening could change: modes, names and contents."""
    found: dict[str, object] = {".": stat.S_IMODE(path.stat().st_mode)}
    for each in path.iterdir():
        found[each.name] = (each.lstat().st_mode, each.lstat().st_nlink, each.read_text())
    return found


MANIFEST, EXTENT = "0" * 32 + ".manifest", "0" * 16 + ".extent"


@pytest.mark.parametrize("names", [["letter"], ["lock", "letter"], ["lock", "answers", "letter"], [MANIFEST]])
def test_found_by_use_15_a_folder_that_is_not_parkds_is_left_as_it_is(tmp_path: Path, names: list[str]) -> None:
    """Issue 22, item 15: a lock beside anything was enough, and the mode was set."""
    path = folder(tmp_path / "d", *names)
    before = looks(path)
    with pytest.raises(ConfigError, match="not parkd's"):
        open_directory(path)
    assert looks(path) == before


@pytest.mark.parametrize("name", ["lock", "parkd-directory"])
@pytest.mark.parametrize("kind", ["symbolic", "hard", "directory", "pipe"])
def test_found_by_use_15_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path, name: str, kind: str) -> None:
    """Issue 22, item 15: the target of a link named `lock` was emptied."""
    target = tmp_path / "target"
    target.write_text("precious")
    path = folder(tmp_path / "d")
    if kind == "symbolic":
        (path / name).symlink_to(target)
    elif kind == "hard":
        (path / name).hardlink_to(target)
    elif kind == "directory":
        (path / name).mkdir()
    else:
        os.mkfifo(path / name)
    with pytest.raises(ConfigError, match=f"{name} in it is a link or no plain file"):
        open_directory(path)
    assert target.read_text() == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert [each.name for each in path.iterdir()] == [name]


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system cannot refuse links while opening")
def test_found_by_use_15_a_link_that_came_later_is_not_followed_either(tmp_path: Path) -> None:
    """What was looked at when the directory was opened says nothing of what is there now."""
    target = tmp_path / "target"
    target.write_text("precious")
    with closing(open_directory(tmp_path / "d")) as fs:
        (tmp_path / "d" / EXTENT).symlink_to(target)
        for call in (fs.open, fs.load, fs.create):
            with pytest.raises(OSError, match=EXTENT):
                call(EXTENT)
    for mode in ("rb", "r+b", "wb"):
        with pytest.raises(OSError, match=EXTENT):
            open(tmp_path / "d" / EXTENT, mode, opener=private_opener)  # noqa: SIM115 - it does not open
    assert target.read_text() == "precious"


@pytest.mark.parametrize("names", [["lock"], ["lock", "answers", "split.json"], ["lock", MANIFEST, EXTENT, "notes"]])
def test_found_by_use_15_directories_of_earlier_versions_open_and_are_marked(tmp_path: Path, names: list[str]) -> None:
    path = folder(tmp_path / "d", *names)
    fs = open_directory(path)
    assert not fs.is_new
    fs.close()
    assert {each.name for each in path.iterdir()} == {*names, "parkd-directory"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in set(names) - {"lock"}:
        assert (path / name).read_text() == "precious"
    (path / "lock").unlink()
    open_directory(path).close()  # the marker is enough


def test_found_by_use_15_an_empty_folder_and_a_new_one_become_park_directories(tmp_path: Path) -> None:
    open_directory(folder(tmp_path / "empty")).close()
    fs = open_directory(tmp_path / "a" / "new")
    assert fs.is_new
    fs.close()
    for path in (tmp_path / "empty", tmp_path / "a" / "new"):
        assert {each.name for each in path.iterdir()} == {"lock", "parkd-directory"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) != 0o700
