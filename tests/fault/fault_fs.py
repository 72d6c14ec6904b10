"""A file system in memory that fails where it is told to, and forgets what was not synced.

What the machine has in its caches and what is on the device are kept apart:

    file        data     <- write            durable  <- sync of the file
    directory   names    <- create, rename,  durable  <- sync of the directory
                            remove

A crash keeps what is durable, and of the rest any part in any order: some writes of a file, torn inside a page or not,
some of the names. A failed sync loses what was written before it for good: a second sync returns without error and
syncs nothing, as real ones do.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["error", "short", "crash-before", "crash-after"]


class Crashed(BaseException):
    """The machine stopped. Not an Exception: nothing may handle it."""


@dataclass
class Fault:
    """What goes wrong at the nth operation, counted from 1."""

    nth: int
    kind: Kind = "error"
    code: int = errno.EIO
    sticky: bool = False
    """Every operation after it fails too; with ENOSPC those that need space."""


@dataclass(eq=False)
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)


NameOp = tuple[str, str, str, "_Inode | None"]


class FaultFs:
    """A `FileSystem`. `skip` names operations that do nothing although they say they did: `sync extent`,
    `sync manifest`, `sync directory`: what the code under test would be without them."""

    def __init__(self, seed: int = 0, skip: frozenset[str] = frozenset()) -> None:
        self.rng = np.random.default_rng(seed)
        self.skip = skip
        self.operations = 0
        self.log: list[str] = []
        self.fault: Fault | None = None
        self.is_down = False
        self.peak_bytes = 0
        self.marks: dict[str, float] = {}
        """Times that were set. They outlive a crash here; a test that wants them lost clears them."""
        self._names: dict[str, _Inode] = {}
        self._durable: dict[str, _Inode] = {}
        self._unsynced: list[NameOp] = []

    # What a FileSystem does

    def sizes(self) -> dict[str, int]:
        self.step("sizes", "")
        return {name: len(inode.data) for name, inode in self._names.items()}

    def create(self, name: str) -> FaultFile:
        with _After(self, self.step("create", name)):
            if name in self._names:
                raise FileExistsError(errno.EEXIST, "exists", name)
            inode = _Inode()
            self._names[name] = inode
            self._unsynced.append(("link", name, "", inode))
            return FaultFile(self, name, inode)

    def open(self, name: str) -> FaultFile:
        self.step("open", name)
        return FaultFile(self, name, self._inode(name))

    def load(self, name: str) -> bytes:
        self.step("load", name)
        return bytes(self._inode(name).data)

    def rename(self, old: str, new: str) -> None:
        with _After(self, self.step("rename", new)):
            inode = self._inode(old)
            del self._names[old]
            self._names[new] = inode
            self._unsynced.append(("rename", old, new, inode))

    def remove(self, name: str) -> None:
        with _After(self, self.step("remove", name)):
            self._inode(name)
            del self._names[name]
            self._unsynced.append(("unlink", name, "", None))

    def times(self) -> dict[str, float]:
        self.step("times", "")
        return {name: self.marks[name] for name in self._names if name in self.marks}

    def mark(self, name: str, at_s: float) -> None:
        with _After(self, self.step("mark", name)):
            self._inode(name)
            self.marks[name] = at_s

    def sync(self) -> None:
        with _After(self, self.step("sync directory", "")):
            if "sync directory" not in self.skip:
                self._durable = dict(self._names)
                self._unsynced = []

    def close(self) -> None:
        """Nothing to do."""

    # What a test does

    def crash(self, kept: float | None = None) -> None:
        """Stops the machine and starts it again. `kept` is the share of unsynced operations that made it anyway: 0 for
        none, 1 for all; None draws one."""
        share = float(self.rng.random()) if kept is None else kept
        names = dict(self._durable)
        survivors = [op for op in self._unsynced if self.rng.random() < share]
        if 0 < share < 1:
            self.rng.shuffle(survivors)  # type: ignore[arg-type]
        for op, name, new, inode in survivors:
            if op == "unlink":
                names.pop(name, None)
            elif op == "link" and inode is not None:
                names[name] = inode
            elif inode is not None:
                if names.get(name) is inode:
                    del names[name]
                names[new] = inode
        for inode in {id(inode): inode for inode in names.values()}.values():
            inode.data = self._content_after_crash(inode, share)
            inode.durable, inode.unsynced = bytes(inode.data), []
        self._names, self._durable, self._unsynced = names, dict(names), []
        self.fault, self.is_down = None, False

    def flip(self, name: str, at: int, bit: int = 0) -> None:
        """Damages a file on the device."""
        self._names[name].data[at] ^= 1 << bit

    def cut(self, name: str, size: int) -> None:
        del self._names[name].data[size:]

    def content(self, name: str) -> bytearray:
        return self._names[name].data

    def names(self) -> list[str]:
        return sorted(self._names)

    @property
    def bytes(self) -> int:
        """As a disk counts them: in pages."""
        return sum(-(-len(inode.data) // 4096) * 4096 for inode in self._names.values())

    # How it works

    def _content_after_crash(self, inode: _Inode, share: float) -> bytearray:
        if share == 1:
            return bytearray(inode.data)
        data = bytearray(inode.durable or b"")
        for offset, piece in inode.unsynced:
            if self.rng.random() < share:
                end = int(self.rng.integers(0, len(piece) + 1)) if self.rng.random() < 0.5 else len(piece)
                _put(data, offset, piece[:end])
        return data

    def _inode(self, name: str) -> _Inode:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self._names[name]

    def step(self, what: str, name: str) -> bool:
        """Counts an operation. Raises what is to go wrong before it; True: the machine stops behind it."""
        if self.is_down:
            raise Crashed
        self.operations += 1
        self.log.append(f"{what} {name}".strip())
        fault = self.fault
        if fault is None or self.operations < fault.nth or (self.operations > fault.nth and not fault.sticky):
            return False
        if fault.kind == "crash-before":
            self.go_down()
        if fault.kind == "crash-after":
            return True
        if fault.code == errno.ENOSPC and what not in ("create", "write", "sync file"):
            return False
        if fault.kind == "short" and what in ("write", "read"):
            return False  # the file does the rest
        raise OSError(fault.code, f"made to fail at {what} {name}")

    def is_short(self) -> bool:
        fault = self.fault
        return fault is not None and fault.kind == "short" and self.operations == fault.nth

    def go_down(self) -> None:
        self.is_down = True
        raise Crashed


class _After:
    """Stops the machine behind an operation that was done."""

    def __init__(self, fs: FaultFs, stops: bool) -> None:
        self._fs, self._stops = fs, stops

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._fs.peak_bytes = max(self._fs.peak_bytes, self._fs.bytes)
        if self._stops and kind is None:
            self._fs.go_down()


class FaultFile:
    def __init__(self, fs: FaultFs, name: str, inode: _Inode) -> None:
        self._fs, self._name, self._inode = fs, name, inode

    def write(self, offset: int, buffers: Sequence[np.ndarray]) -> None:
        data = b"".join(buffer.tobytes() for buffer in buffers)
        with _After(self._fs, self._fs.step("write", self._name)):
            is_short = self._fs.is_short()
            piece = data[: len(data) // 2] if is_short else data
            _put(self._inode.data, offset, piece)
            self._inode.unsynced.append((offset, piece))
            if is_short:
                raise OSError(errno.EIO, "only a part was written")

    def read(self, offset: int, buffers: Sequence[np.ndarray]) -> None:
        self._fs.step("read", self._name)
        for buffer in buffers:
            piece = self._inode.data[offset : offset + buffer.nbytes]
            buffer[: len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            if len(piece) < buffer.nbytes or self._fs.is_short():
                raise OSError(errno.ENODATA, "the file ends too early")
            offset += buffer.nbytes

    def drop_cached(self) -> None:
        pass

    def sync(self) -> None:
        kind = "sync extent" if self._name.endswith(".extent") else "sync manifest"
        try:
            stops = self._fs.step("sync file", self._name)
        except OSError:
            self._inode.unsynced = []  # lost, and nobody will be told again
            raise
        with _After(self._fs, stops):
            if kind not in self._fs.skip:
                data = bytearray(self._inode.durable or b"")
                for offset, piece in self._inode.unsynced:
                    _put(data, offset, piece)
                self._inode.durable, self._inode.unsynced = bytes(data), []

    def close(self) -> None:
        if self._fs.is_down:
            raise Crashed


def _put(data: bytearray, offset: int, piece: bytes) -> None:
    if len(data) < offset + len(piece):
        data.extend(bytes(offset + len(piece) - len(data)))
    data[offset : offset + len(piece)] = piece
