"""A llama.cpp library that is there already, built by somebody else: where it is looked for, whether it fits, how it is
taken.

    --llama-lib, LLAMA_CPP_LIB_PATH, the bindings' own, usual places  ->  a file
    the file, in a process of its own  ->  version, missing functions, bytes of its parameters  ->  fits, or a reason
    fits  ->  the bindings over it

A library whose parameters have other fields than the bindings say would read what is not there, without a word. Their
size is measured: a function that returns parameters writes as many bytes as they have.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkd.engine_adapter.llama_cpp.objects import FOLDER_VARIABLE
from parkd.errors import ConfigError, ModelError

PACKAGE = "llama_cpp"
OLDEST, NEWEST = (0, 25, 1), (0, 25, 3)
"""Versions of ggml, between which libraries were tried."""
NEEDED = frozenset(
    f"llama_{name}"
    for name in (
        "adapter_get_alora_n_invocation_tokens",
        *("adapter_lora_init", "backend_init", "batch_free", "batch_init", "context_default_params", "decode", "free"),
        *("get_embeddings_seq", "pooling_type", "vocab_sep"),
        *("get_logits_ith", "get_memory", "init_from_model", "log_set", "max_devices", "memory_clear", "memory_seq_cp"),
        *("memory_seq_pos_max", "memory_seq_pos_min", "memory_seq_rm", "model_chat_template", "model_default_params"),
        *("model_free", "model_get_vocab", "model_is_hybrid", "model_is_recurrent", "model_load_from_file"),
        *("model_meta_val_str", "model_n_ctx_train", "model_n_embd", "model_n_layer", "model_n_swa", "model_size"),
        *("n_ctx", "set_abort_callback", "set_adapter_cvec", "set_adapters_lora", "state_seq_get_data_ext"),
        *("state_seq_get_size_ext", "state_seq_set_data_ext", "supports_gpu_offload", "token_to_piece", "tokenize"),
        *("vocab_bos", "vocab_eos", "vocab_get_add_bos", "vocab_get_attr", "vocab_is_eog", "vocab_n_tokens"),
        "vocab_pad",
    )
)
"""Functions that this engine calls. The bindings know more, which a library may lack."""
PARAMETERS = ("model", "context")
"""Kinds of parameters that are handed over by value: `llama_KIND_params`, of `llama_KIND_default_params`."""
MOST_PARAMETER_BYTES = 4096
RETURNS_THROUGH_POINTER = ("x86_64", "AMD64")
"""Processors on which a function is handed the place for what it returns as its first argument, so that it can be
watched (System V AMD64 ABI, 3.2.3; Microsoft x64 calling convention)."""
CHECK_DEADLINE_S = 60.0
NAMES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")
PATTERNS = ("libllama.so.*", "libllama.*.so", "libllama.*.dylib")
"""What others call it: `libllama.so.0`, `libllama.cuda.v0.5.0.so`."""
PROGRAMS = ("llama-server", "llama-cli")
PLACES = (
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib64",
    "/opt/homebrew/lib",
    "~/llama.cpp/build/bin",
    "/opt/llama.cpp/lib",
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a library was seen to be."""

    version: tuple[int, ...]
    """Of ggml."""
    missing: tuple[str, ...] = ()
    """Functions that are needed, and that it has not."""
    sizes: Mapping[str, tuple[int, int]] | None = None
    """Bytes of each kind of parameters: the library's, and the bindings'; None where they cannot be measured."""


def refusal(seen: Seen) -> str | None:
    """Why a library is not used; None if it fits."""
    if not OLDEST <= seen.version <= NEWEST:
        oldest, newest = _dotted(OLDEST), _dotted(NEWEST)
        return f"it is of ggml {_dotted(seen.version)}, and {oldest} to {newest} were tried with parkd"
    if seen.missing:
        return f"it has no {', '.join(seen.missing)}"
    for kind, (its, ours) in (seen.sizes or {}).items():
        if its != ours:
            return f"its llama_{kind}_params has {its} bytes, and the bindings know {ours}"
    return None


def library_in(place: Path) -> Path | None:
    """The library that is this file, or lies in this folder."""
    if place.is_file():
        return place
    named = [place / name for name in NAMES]
    others = [path for pattern in PATTERNS for path in sorted(place.glob(pattern))]
    return next((path for path in (*named, *others) if path.is_file()), None)


def usual_places(which: Callable[[str], str | None] = shutil.which) -> Iterator[Path]:
    """Folders where llama.cpp is installed, those of its programs on the PATH first."""
    for program in PROGRAMS:
        if found := which(program):
            folder = Path(found).resolve().parent
            yield from (folder, folder.parent / "lib")
    for place in PLACES:
        yield Path(place).expanduser()
        if place == "/usr/lib":
            yield Path(place) / f"{platform.machine()}-linux-gnu"


def find(
    named: Path | None,
    package: Path,
    environment: Mapping[str, str] = os.environ,
    places: Sequence[Path] | None = None,
    look: Callable[[Path], Seen] | None = None,
) -> Path:
    """The library to use, checked unless it is the bindings' own, which was built with them. `package` is the folder of
    the bindings. Raises ConfigError if there is none, or none that fits, with the reason of each."""
    look = look or inspect
    who, asked = "--llama-lib", named
    if asked is None and (folder := environment.get(FOLDER_VARIABLE)):
        who, asked = FOLDER_VARIABLE, Path(folder)
    if asked is not None:
        found = library_in(asked)
        if found is None:
            raise ConfigError(f"{who} {asked}: there is no libllama")
        if reason := _refused(found, look):
            raise ConfigError(f"{who} {asked} cannot be used: {reason}")
        return found
    if own := library_in(package / "lib"):
        return own
    reasons = []
    for place in usual_places() if places is None else places:
        found = library_in(place)
        if found is not None:
            reason = _refused(found, look)
            if reason is None:
                return found
            reasons.append(f"{found}: {reason}")
    told = f" Found were: {'; '.join(reasons)}." if reasons else ""
    raise ConfigError(f"llama-cpp-python has no library of its own here: name one with --llama-lib PATH.{told}")


def inspect(library: Path) -> Seen:
    """Looks at a library in a process of its own, which it may bring down. Raises ModelError if it does."""
    command = [sys.executable, "-m", __name__, str(library)]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            command, capture_output=True, text=True, check=False, timeout=CHECK_DEADLINE_S, env=_with_our_path()
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
            raise ModelError(f"it cannot be loaded: {last}")
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"it cannot be loaded: {error}") from error
    sizes = told["sizes"] and {kind: (its, ours) for kind, (its, ours) in told["sizes"].items()}
    return Seen(tuple(told["version"]), tuple(told["missing"]), sizes)


def take(library: Path, package: Path) -> None:
    """Puts the bindings over the library, for this process, and loads its backends if they are files of their own."""
    if library.parent != package / "lib":
        os.environ[FOLDER_VARIABLE] = str(library.parent)
        _bind(library)
    low = importlib.import_module(f"{PACKAGE}.llama_cpp")
    loaded = low._lib
    if hasattr(loaded, "ggml_backend_load_all_from_path") and not loaded.ggml_backend_reg_count():
        loaded.ggml_backend_load_all_from_path(os.fsencode(library.parent))


def _bind(library: Path) -> None:
    """Imports the bindings over this file. Functions that it lacks stay the Python that they decorate."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, "the bindings are installed"
    assert spec.loader is not None, "a package has a loader"
    if f"{PACKAGE}.llama_cpp" in sys.modules:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package  # not yet run: it imports what binds every function
    extensions: Any = importlib.import_module(f"{PACKAGE}._ctypes_extensions")
    kept = extensions.load_shared_library, extensions.ctypes_function_for_shared_library
    extensions.load_shared_library = lambda _name, _folder: ctypes.CDLL(str(library))
    extensions.ctypes_function_for_shared_library = lambda loaded: _what_it_has(loaded, kept[1](loaded))
    try:
        importlib.import_module(f"{PACKAGE}.llama_cpp")
    finally:
        extensions.load_shared_library, extensions.ctypes_function_for_shared_library = kept
    spec.loader.exec_module(package)


def _what_it_has(loaded: ctypes.CDLL, bind: Callable[..., Any]) -> Callable[..., Any]:
    def of(name: str, argtypes: Any, restype: Any, enabled: bool = True) -> Any:
        return bind(name, argtypes, restype, enabled and hasattr(loaded, name))

    return of


def _refused(library: Path, look: Callable[[Path], Seen]) -> str | None:
    try:
        return refusal(look(library))
    except ModelError as error:
        return error.message


def _with_our_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _bytes_written(function: Any) -> int:
    """How many bytes a function writes that returns a structure: what changes in memory of either filling, in whole
    words."""
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    last = 0
    for filling in (0x00, 0xFF):
        memory = (ctypes.c_ubyte * MOST_PARAMETER_BYTES)(*([filling] * MOST_PARAMETER_BYTES))
        function(ctypes.addressof(memory))
        last = max((at + 1 for at, byte in enumerate(memory) if byte != filling), default=last)
    word = ctypes.sizeof(ctypes.c_void_p)
    return -(-last // word) * word


def _look_here(library: Path) -> dict[str, Any]:
    loaded = ctypes.CDLL(str(library))
    loaded.ggml_version.restype = ctypes.c_char_p
    version = [int(part) for part in loaded.ggml_version().decode().split("-")[0].split(".")]
    missing = sorted(name for name in NEEDED if not hasattr(loaded, name))
    sizes = None
    if platform.machine() in RETURNS_THROUGH_POINTER and not missing:
        its = {kind: _bytes_written(getattr(loaded, f"llama_{kind}_default_params")) for kind in PARAMETERS}
        _bind(library)
        low = importlib.import_module(f"{PACKAGE}.llama_cpp")
        sizes = {kind: (its[kind], ctypes.sizeof(getattr(low, f"llama_{kind}_params"))) for kind in PARAMETERS}
    return {"version": version, "missing": missing, "sizes": sizes}


if __name__ == "__main__":
    print(json.dumps(_look_here(Path(sys.argv[1]))))  # noqa: T201 - what the other process reads
