"""The shared objects through which llama.cpp computes: another build of any of them may compute, or write, otherwise.

Those that this process has loaded are asked of the system, since backends and variants for processors are chosen at run
time. Where it does not tell, all in the library's folder count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

OWN = ("llama", "ggml")
"""Their content counts. `libggml-cuda`, `libggml-cpu-haswell` and the like begin so."""
BELOW = ("cudart", "cublas", "cublasLt", "nccl", "amdhip64", "hipblas", "rocblas", "vulkan", "OpenCL", "sycl", "mkl")
"""What backends compute with. These are large, and their files' names have versions."""
CARDS = ("ggml-cuda", "ggml-hip", "ggml-vulkan", "ggml-sycl", "ggml-opencl", "ggml-musa", "ggml-cann", "ggml-metal")
"""Backends whose driver compiles or computes."""
MAPS = Path("/proc/self/maps")
DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"), Path("/sys/module/xe/version"))
FOLDER_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""Where the bindings look for the library instead of in their own package."""


CPP_RUNTIMES = (b"libstdc++.so", b"libc++.so")
"""One of these is named in an object that shares the C++ runtime of its process."""
ELF = b"\x7fELF"


def stem(path: Path) -> str:
    """`ggml-cuda` of `libggml-cuda.so.0.25.3`."""
    return path.name.partition(".")[0].removeprefix("lib")


def is_own(path: Path) -> bool:
    name = stem(path)
    return any(name == own or name.startswith(own + "-") for own in OWN)


def library_folder(package: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """`package` is the folder of the bindings."""
    named = environment.get(FOLDER_VARIABLE)
    return package / "lib" if named is None else Path(named)


def mapped_objects(maps: Iterable[str]) -> list[Path]:
    """All shared objects in the lines of proc(5)'s `/proc/pid/maps`, each once, by name."""
    fields = (line.split(maxsplit=5) for line in maps)
    files = {Path(parts[5].strip()) for parts in fields if len(parts) == 6 and ".so" in parts[5]}
    return sorted(files, key=lambda path: (path.name, str(path)))


def computing_objects(folder: Path, maps: Path = MAPS) -> tuple[list[Path], list[str]]:
    """The files whose content decides how state is computed, and the names and versions of what they compute with.
    Call it when the model is loaded."""
    try:
        with maps.open() as lines:
            mapped = mapped_objects(lines)
    except OSError:
        mapped = []
    own = [path for path in mapped if is_own(path) and path.is_file()]
    if not own:
        own = sorted(path for path in folder.iterdir() if is_own(path) and path.is_file() and not path.is_symlink())
    below = [path.name for path in mapped if stem(path) in BELOW]
    if any(stem(path) in CARDS for path in own):
        below += [f"{path.parent.name} {path.read_text().strip()}" for path in DRIVERS if path.is_file()]
    return own, below


def static_runtime_note(folder: Path) -> str | None:
    """What to say before a library is loaded that has a C++ runtime of its own in it; None if it has not, or is not
    there. Two of them in one process can crash in the first regular expression, which is without any message."""
    for path in sorted(folder.glob("*llama.so*")):
        content = path.read_bytes()
        if content.startswith(ELF) and not any(name in content for name in CPP_RUNTIMES):
            return (
                f"{path} was linked with -static-libstdc++: if the process ends here without a message, that is the "
                f"cause. Build it with the system's compiler (CC=gcc CXX=g++)"
            )
    return None
