"""The directory of a disk tier: held by a descriptor, its plain files alone, and made only where that is asked for."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from parkd.errors import ConfigError
from parkd.store.files.folder import HAS_DESCRIPTORS, Folder
from parkd.store.files.fs import GRAIN_BYTES, UnlinkedFs, aligned_zeros
from parkd.store.files.park_directory import MARKER_NAME, MARKER_TEXT, open_directory, open_temporary

BYTES = np.arange(100, dtype=np.uint8)
NOBODY = 65534
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ON_DESCRIPTORS = pytest.mark.skipif(not HAS_DESCRIPTORS, reason="names are joined to the path here")


def filled(fs, name: str) -> None:
    with closing(fs.create(name)) as file:
        file.write(0, [BYTES])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@ON_DESCRIPTORS
def test_it_stays_the_same_directory_whatever_becomes_of_its_path(tmp_path: Path) -> None:
    with closing(open_directory(tmp_path / "d")) as fs:
        filled(fs, "one")
        (tmp_path / "d").rename(tmp_path / "moved")
        (tmp_path / "d").mkdir()
        filled(fs, "two")
        fs.rename("one", "uno")
        assert fs.sizes().keys() >= {"uno", "two"}
        assert fs.load("two") == BYTES.tobytes()
        fs.remove("uno")
        assert {each.name for each in (tmp_path / "moved").iterdir()} >= {"two"}
        assert list((tmp_path / "d").iterdir()) == []


@ON_DESCRIPTORS
def test_its_names_are_those_in_it_whatever_becomes_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with closing(Folder(tmp_path / "d")) as folder:
        (tmp_path / "d").rename(tmp_path / "moved")
        (tmp_path / "d").mkdir()
        (tmp_path / "moved" / "one").touch()
        assert folder.names() == {"one"}
        folder.set_mode(0o700)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700 for name in ("d", "moved")] == [False, True]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no cache can be dropped here")
def test_a_trial_of_speed_reads_what_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advised.append(given[-1]))
    with closing(open_directory(tmp_path / "d")) as fs:
        filled(fs, "one")
        with closing(fs.open("one")) as file:
            file.drop_cached()
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_only_plain_files_are_its_files(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x" * 5000)
    with closing(open_directory(tmp_path / "d")) as fs:
        filled(fs, "one")
        before = fs.sizes()
        (tmp_path / "d" / "link").symlink_to(target)
        (tmp_path / "d" / "folder").mkdir()
        assert fs.sizes() == before


def test_found_by_use_a_link_that_leads_nowhere_is_named_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for path in (tmp_path / "link", tmp_path / "link" / "sub"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/link is a link to {tmp_path}/disk, where nothing is"):
            open_directory(path)
    assert [each.name for each in tmp_path.iterdir()] == ["link"]
    (tmp_path / "disk").mkdir()
    open_directory(tmp_path / "link").close()
    assert {each.name for each in (tmp_path / "disk").iterdir()} >= {MARKER_NAME}


def test_a_time_is_set_for_a_name_and_not_for_what_it_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    before = target.stat().st_mtime
    with closing(open_directory(tmp_path / "d")) as fs:
        (tmp_path / "d" / "link").symlink_to(target)
        fs.mark("link", 1.0)
    assert target.stat().st_mtime == before


@ON_DESCRIPTORS
def test_a_sync_is_one_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)), plain(fd)))
    with closing(open_directory(tmp_path / "d")) as fs:
        synced.clear()
        fs.sync()
    assert synced == [True]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files cannot be counted here")
def test_what_is_closed_or_replaced_leaves_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    open_directory(tmp_path / "d").close()
    assert open_files() == before
    with closing(UnlinkedFs(tmp_path)) as fs:
        filled(fs, "old")
        filled(fs, "new")
        there = open_files()
        fs.rename("new", "old")
        assert open_files() == there - 1
        assert list(fs.sizes()) == ["old"]
    assert open_files() == before


def test_there_is_no_directory_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(OSError, match=path.name):
            Folder(path)


def test_a_command_that_only_looks_makes_no_directory_and_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_directory(tmp_path / "d", creates=False)
    assert not (tmp_path / "d").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is empty: nothing was parked there"):
        open_directory(tmp_path / "empty", creates=False)
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_mark_says_whose_it_is_and_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "d"
    open_directory(path).close()
    assert (path / MARKER_NAME).read_bytes() == MARKER_TEXT
    (path / MARKER_NAME).write_bytes(b"mine")
    open_directory(path).close()
    assert (path / MARKER_NAME).read_bytes() == b"mine"


def test_the_process_that_holds_a_directory_is_named(tmp_path: Path) -> None:
    with closing(open_directory(tmp_path / "d")), pytest.raises(ConfigError, match=rf"\(process {os.getpid()}\)"):
        open_directory(tmp_path / "d")
    with closing(open_directory(tmp_path / "d")):
        (tmp_path / "d" / "lock").write_text("")  # as between taking the lock and writing the number
        with pytest.raises(ConfigError, match=r"\(process unknown\)"):
            open_directory(tmp_path / "d")


def test_files_of_a_process_have_no_names_where_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(open_temporary()) as fs:
        filled(fs, "one")
        assert (list(tmp_path.iterdir()) == []) == Path("/proc/self/fd").is_dir()


class Modes:
    """Notes of each call on a file whether it goes past the page cache; the first may say that it did a part only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self.first_said: int | None = None
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, partial(self.call, getattr(os, name)))

    def call(self, plain, fd: int, buffers, offset: int) -> int:
        self.direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        done = plain(fd, buffers, offset)
        said, self.first_said = done if self.first_said is None else self.first_said, None
        return said


def pages(count: int, *, off: int = 0, short: int = 0) -> np.ndarray:
    whole = aligned_zeros((count + 1) * GRAIN_BYTES)
    whole[:] = np.arange(whole.nbytes) % 251
    return whole[off : off + count * GRAIN_BYTES - short]


def goes_direct(folder: Path) -> bool:
    if fcntl is None or not hasattr(os, "O_DIRECT") or not hasattr(os, "pwritev"):
        return False
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("offset", "buffers", "is_direct"),
    [
        (0, [pages(1)], True),
        (GRAIN_BYTES, [pages(2), pages(1)], True),
        (0, [np.zeros(0, np.uint8), pages(1)], True),
        (1, [pages(1)], False),
        (0, [pages(1, short=8)], False),
        (0, [pages(1, off=8)], False),
        (0, [pages(1), pages(1, off=8)], False),
    ],
)
def test_whole_pages_go_past_the_page_cache_and_nothing_else(
    tmp_path: Path, offset: int, buffers: list[np.ndarray], is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not goes_direct(tmp_path):
        pytest.skip("there is no direct I/O here")
    modes, wanted = Modes(monkeypatch), b"".join(each.tobytes() for each in buffers)
    back = [pages(3, off=each.__array_interface__["data"][0] % GRAIN_BYTES)[: each.nbytes] for each in buffers]
    for each in back:
        each[:] = 0
    with closing(open_directory(tmp_path / "d")) as fs:
        with closing(fs.create("one")) as file:
            file.write(offset, buffers)
        with closing(fs.open("one")) as file:
            file.read(offset, back)
        assert fs.load("one")[offset : offset + len(wanted)] == wanted == b"".join(each.tobytes() for each in back)
    assert set(modes.direct) == {is_direct}
    modes.direct.clear()
    with closing(open_directory(tmp_path / "e", direct=False)) as fs, closing(fs.create("one")) as file:
        file.write(offset, buffers)
    assert set(modes.direct) == {False}


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_call_that_did_part_of_a_page_goes_on_through_the_cache_and_stays_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not goes_direct(tmp_path):
        pytest.skip("there is no direct I/O here")
    content, back = pages(3), pages(3)
    with closing(open_directory(tmp_path / "d")) as fs:
        with closing(fs.create("one")) as file:
            file.write(0, [content])
        modes = Modes(monkeypatch)
        with closing(fs.create("two") if kind == "write" else fs.open("one")) as file:
            move, buffer = (file.write, content) if kind == "write" else (file.read, back)
            modes.first_said = GRAIN_BYTES
            move(0, [buffer])
            assert modes.direct == [True, True], "the rest is whole pages"
            modes.direct.clear()
            modes.first_said = GRAIN_BYTES + 8
            move(0, [buffer])
            assert modes.direct == [True, False]
            move(0, [buffer])
            assert modes.direct[2:] == [False]
        assert fs.load("two" if kind == "write" else "one") == content.tobytes()
        assert kind == "write" or np.array_equal(back, content)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users have no numbers here")
def test_found_by_use_a_directory_of_another_user_is_refused_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that all may write to got a lock and a marker, before its mode could not be set."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # may use any, as its mode says
    open_directory(tmp_path).close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only the superuser becomes another")
def test_found_by_use_what_another_user_may_not_write_to_says_what_it_takes() -> None:
    """As a server that is not the superuser's finds it: a read-only directory of its own, and a parent's."""
    with tempfile.TemporaryDirectory() as there:
        own, parent = Path(there) / "own", Path(there) / "parent"
        own.mkdir()
        parent.mkdir()
        os.chown(own, NOBODY, NOBODY)
        for each, mode in ((own, 0o500), (parent, 0o755), (Path(there), 0o755)):
            each.chmod(mode)
        for path in (own, parent / "new" / "park"):
            os.seteuid(NOBODY)
            try:
                with pytest.raises(ConfigError) as refused:
                    open_directory(path)
            finally:
                os.seteuid(0)
            said = f"--park-dir {path} cannot be used: Permission denied. This user must own it"
            assert refused.value.message.startswith(said)
        assert list(own.iterdir()) == list(parent.iterdir()) == []
