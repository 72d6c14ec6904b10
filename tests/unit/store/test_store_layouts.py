"""The descriptions of layouts in a park directory."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from parkd.state import describe
from parkd.store import layouts
from parkd.store.files.fs import FileSystem
from parkd.store.files.park_directory import open_directory
from parkd.store.layouts import described_layouts, keep_layouts, layout_name
from tests.fault.fault_fs import Fault, FaultFs
from tests.unit.state.split_layouts import layout_of

ONE, TWO, THREE = layout_of(), layout_of(2), layout_of(1, 3)


def names(fs: FileSystem) -> set[str]:
    return {name for name in fs.sizes() if ".layout" in name}


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    fs = open_directory(tmp_path / "park")
    keep_layouts(fs, ONE, ())
    fs.close()
    fs = open_directory(tmp_path / "park")
    assert {digest: describe(layout) for digest, layout in described_layouts(fs).items()} == {ONE.digest: describe(ONE)}
    assert (tmp_path / "park" / layout_name(ONE.digest)).stat().st_mode & 0o777 == 0o600
    fs.close()


def test_only_those_that_are_named_stay() -> None:
    fs = FaultFs()
    keep_layouts(fs, ONE, ())
    keep_layouts(fs, TWO, {ONE.digest})
    assert names(fs) == {layout_name(ONE.digest), layout_name(TWO.digest)}
    keep_layouts(fs, THREE, {TWO.digest})
    assert names(fs) == {layout_name(TWO.digest), layout_name(THREE.digest)}
    keep_layouts(fs, THREE, {TWO.digest})
    assert names(fs) == {layout_name(TWO.digest), layout_name(THREE.digest)}


def test_a_description_under_another_name_or_a_damaged_one_is_not_used() -> None:
    fs = FaultFs()
    keep_layouts(fs, ONE, ())
    fs.rename(layout_name(ONE.digest), layout_name(TWO.digest))
    assert not described_layouts(fs)
    fs = FaultFs()
    keep_layouts(fs, ONE, ())
    fs.flip(layout_name(ONE.digest), 40)
    assert not described_layouts(fs)
    keep_layouts(fs, TWO, {ONE.digest})
    assert set(described_layouts(fs)) == {TWO.digest}
    keep_layouts(fs, ONE, {TWO.digest})
    assert set(described_layouts(fs)) == {ONE.digest, TWO.digest}, "it is written again"


@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_failure_costs_the_description_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    nth = 0
    while True:
        nth += 1
        fs = FaultFs()
        fs.fault = Fault(nth, kind, errno.ENOSPC)  # type: ignore[arg-type]
        keep_layouts(fs, ONE, ())
        failed, fs.fault = fs.operations >= nth, None
        assert set(described_layouts(fs)) <= {ONE.digest}
        keep_layouts(fs, ONE, ())
        assert set(described_layouts(fs)) == {ONE.digest}, "the next start makes up for it"
        assert names(fs) == {layout_name(ONE.digest)}
        if not failed:
            break
    assert nth > 3
    assert "could not be described" in caplog.text


def test_only_descriptions_of_a_bounded_size_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = FaultFs()
    keep_layouts(fs, ONE, ())
    text = fs.load(layout_name(ONE.digest))
    for name in ("notes.layout", "0" * 31 + ".layout", layout_name(TWO.digest) + ".new", "0" * 32 + ".layouts"):
        fs.create(name).write(0, [np.frombuffer(text, np.uint8)])
    fs.log.clear()
    monkeypatch.setattr(layouts, "LAYOUT_LIMIT_BYTES", len(text))
    assert set(described_layouts(fs)) == {ONE.digest}
    assert fs.log == ["sizes", f"load {layout_name(ONE.digest)}"]
    fs.log.clear()
    monkeypatch.setattr(layouts, "LAYOUT_LIMIT_BYTES", len(text) - 1)
    assert not described_layouts(fs)
    assert fs.log == ["sizes"]


def test_a_description_that_is_there_is_not_written_again() -> None:
    fs = FaultFs()
    keep_layouts(fs, ONE, ())
    fs.log.clear()
    keep_layouts(fs, ONE, ())
    assert fs.log == ["sizes", f"load {layout_name(ONE.digest)}"]
