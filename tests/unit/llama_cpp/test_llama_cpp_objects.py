"""Which shared objects are in the fingerprint of a model on llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkd.engine_adapter.llama_cpp import objects
from parkd.engine_adapter.llama_cpp.objects import computing_objects, library_folder, static_runtime_note

LIBRARIES = [
    *("libllama.so.0.5.0", "libggml.so.0", "libggml-base.so.0.25.3", "libggml-cpu-haswell.so", "libggml-cuda.so.0"),
    *(
        "libggml-rpc.so",
        "libcublas.so.13.1.0",
        "libcudart.so.13.0.48",
        "libc.so.6",
        "libllamafile.so",
        "libllguidance.so",
    ),
]
OWN = ["libggml-base.so.0.25.3", "libggml-cpu-haswell.so", "libggml-cuda.so.0", "libggml-rpc.so", "libggml.so.0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in LIBRARIES:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "libllama.so").symlink_to(tmp_path / "libllama.so.0.5.0")
    return tmp_path


def maps_of(folder: Path, names: list[str]) -> Path:
    lines = [
        f"7f{at:02x}00000000-7f{at:02x}00001000 r-xp 00000000 fe:00 {at}   {folder / name}"
        for at, name in enumerate(names)
    ]
    path = folder / "maps"
    path.write_text("\n".join(["7e0000000000-7e0000001000 rw-p 00000000 00:00 0 ", *lines, *lines]) + "\n")
    return path


def test_every_object_that_is_loaded_counts_whatever_backend_it_is(folder: Path) -> None:
    own, below = computing_objects(folder / "elsewhere", maps_of(folder, LIBRARIES))
    assert [path.name for path in own] == [*OWN, "libllama.so.0.5.0"]
    assert below[:2] == ["libcublas.so.13.1.0", "libcudart.so.13.0.48"]


def test_what_lies_in_the_folder_but_is_not_loaded_does_not(folder: Path) -> None:
    own, _ = computing_objects(folder, maps_of(folder, ["libllama.so.0.5.0", "libggml-base.so.0.25.3"]))
    assert [path.name for path in own] == ["libggml-base.so.0.25.3", "libllama.so.0.5.0"]


def test_where_the_system_does_not_tell_all_of_the_folder_count_once(folder: Path) -> None:
    own, below = computing_objects(folder, folder / "no such file")
    assert [path.name for path in own] == [*OWN, "libllama.so.0.5.0"]
    assert [name for name in below if name.startswith("lib")] == []


def test_a_drivers_version_counts_for_cards_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = folder / "nvidia" / "version"
    driver.parent.mkdir()
    driver.write_text("580.159.03\n")
    monkeypatch.setattr(objects, "DRIVERS", (driver, folder / "amdgpu" / "version"))
    with_card = computing_objects(folder, maps_of(folder, ["libllama.so.0.5.0", "libggml-cuda.so.0"]))[1]
    without = computing_objects(folder, maps_of(folder, ["libllama.so.0.5.0", "libggml-cpu-haswell.so"]))[1]
    assert (with_card, without) == (["nvidia 580.159.03"], [])


def test_the_folder_is_the_one_that_the_bindings_take() -> None:
    package = Path("/site/llama_cpp")
    assert library_folder(package, {}) == package / "lib"
    assert library_folder(package, {"LLAMA_CPP_LIB_PATH": "/opt/llama/bin"}) == Path("/opt/llama/bin")


@pytest.mark.parametrize(
    ("content", "is_told"),
    [
        (b"\x7fELF\x02\x01 ... libc.so.6\0_ZNSt7__cxx11", True),
        (b"\x7fELF\x02\x01 ... libstdc++.so.6\0libc.so.6\0_ZNSt7__cxx11", False),
        (b"\x7fELF\x02\x01 ... libc++.so.1\0libc.so.6", False),
        (b"\xcf\xfa\xed\xfe of another system", False),
    ],
)
def test_a_library_with_a_runtime_of_its_own_is_named(tmp_path: Path, content: bytes, is_told: bool) -> None:
    (tmp_path / "libllama.so.0").write_bytes(content)
    note = static_runtime_note(tmp_path)
    assert (note is not None) == is_told
    if note is not None:
        assert str(tmp_path / "libllama.so.0") in note
        assert "CXX=g++" in note
    assert static_runtime_note(tmp_path / "no such folder") is None
