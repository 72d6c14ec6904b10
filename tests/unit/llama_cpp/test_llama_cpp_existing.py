"""A library that is there already: where it is looked for, and which are refused, with the reason."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import pytest

from parkd.engine_adapter.llama_cpp import existing
from parkd.engine_adapter.llama_cpp.existing import NEEDED, NEWEST, OLDEST, Seen, find, library_in, refusal
from parkd.errors import ConfigError, ModelError

SOURCES = Path(existing.__file__).parent
TYPES = {"llama_progress_callback", "llama_log_callback", "llama_adapter_lora_p_ctypes"}
FITS = Seen(NEWEST, (), {"model": (80, 80), "context": (160, 160)})


def library(folder: Path, name: str = "libllama.so") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x7fELF")
    return folder / name


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (FITS, None),
        (Seen(OLDEST, (), None), None),
        (Seen((0, 25, 0)), "ggml 0.25.0, and 0.25.1 to 0.25.3"),
        (Seen((0, 26, 0)), "ggml 0.26.0"),
        (Seen(NEWEST, ("llama_decode",)), "has no llama_decode"),
        (
            Seen(NEWEST, (), {"model": (80, 80), "context": (168, 160)}),
            "llama_context_params has 168 bytes, .* know 160",
        ),
    ],
)
def test_what_was_not_tried_or_differs_is_refused_by_name(seen: Seen, reason: str | None) -> None:
    if reason is None:
        assert refusal(seen) is None
    else:
        assert (said := refusal(seen)) is not None
        assert re.search(reason, said)


def test_the_functions_that_are_needed_are_those_that_are_called() -> None:
    called = {
        node.attr
        for path in SOURCES.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "low" and node.attr.startswith("llama_")
    }
    assert called - TYPES == NEEDED


@pytest.mark.parametrize("name", ["libllama.so", "libllama.so.0", "libllama.cuda.v0.5.0.so", "libllama.dylib"])
def test_a_library_is_a_file_or_in_a_folder_under_the_names_it_has(name: str, tmp_path: Path) -> None:
    (tmp_path / "libllama-common.so").write_bytes(b"")
    assert library_in(tmp_path) is None
    path = library(tmp_path, name)
    assert library_in(tmp_path) == library_in(path) == path
    assert library_in(tmp_path / "no such folder") is None


def test_the_one_that_is_named_comes_first_then_the_bindings_own_then_places(tmp_path: Path) -> None:
    package, named, by_variable, place = (tmp_path / name for name in ("package", "named", "variable", "place"))
    files = {folder: library(folder) for folder in (named, by_variable, place)}
    variable = {"LLAMA_CPP_LIB_PATH": str(by_variable)}
    looked: list[Path] = []

    def look(path: Path) -> Seen:
        looked.append(path)
        return FITS

    assert find(named, package, variable, [place], look) == files[named]
    assert find(None, package, variable, [place], look) == files[by_variable]
    assert find(None, package, {}, [tmp_path / "empty", place], look) == files[place]
    assert looked == [files[named], files[by_variable], files[place]]
    own = library(package / "lib")
    assert find(None, package, {}, [place], look) == own
    assert own not in looked, "it was built with its bindings"


def test_one_that_does_not_fit_is_refused_where_it_is_named_and_passed_over_where_it_is_found(tmp_path: Path) -> None:
    old, broken, fits = (library(tmp_path / name) for name in ("old", "broken", "fits"))

    def look(path: Path) -> Seen:
        if path == broken:
            raise ModelError("it cannot be loaded: undefined symbol: x")
        return Seen((0, 9, 1)) if path == old else FITS

    package, places = tmp_path / "package", [old.parent, broken.parent]
    with pytest.raises(ConfigError, match=r"--llama-lib .*old cannot be used: it is of ggml 0\.9\.1"):
        find(old.parent, package, {}, [], look)
    with pytest.raises(ConfigError, match=r"LLAMA_CPP_LIB_PATH .*broken cannot be used: .*undefined symbol"):
        find(None, package, {"LLAMA_CPP_LIB_PATH": str(broken.parent)}, [], look)
    assert find(None, package, {}, [*places, fits.parent], look) == fits
    with pytest.raises(ConfigError, match=r"name one with --llama-lib PATH\. Found were: .*0\.9\.1.*; .*symbol"):
        find(None, package, {}, places, look)
    with pytest.raises(ConfigError, match="there is no libllama"):
        find(tmp_path, package, {}, [], look)


@pytest.mark.parametrize("size", [8, 80, 160])
def test_the_bytes_that_a_function_returns_are_measured(size: int) -> None:
    """Whatever it writes: also what is equal to the filling before."""
    content = bytes([0x00, 0xFF] * (size // 2))
    prototype = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

    def write(place: int) -> int:
        ctypes.memmove(place, content, size)
        return place

    assert existing._bytes_written(prototype(write)) == size


def test_programs_on_the_path_show_where_their_library_is(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.touch()
    places = list(existing.usual_places(lambda name: str(program) if name == "llama-server" else None))
    assert places[:2] == [program.parent, tmp_path / "lib"]
