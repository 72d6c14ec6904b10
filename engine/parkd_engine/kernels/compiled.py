"""CUDA C++ that is compiled when it is first needed, by the compiler library that comes with torch (NVRTC), and
launched through the driver. Kernels that Triton cannot express well are written so: those that need to say which
register holds what.

    source, settings -> NVRTC -> code of one GPU architecture -> module in the device's context -> launches

Nothing is kept on disk: compiling takes some tenths of a second for each set of settings.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from parkd_engine.kernels import EARLY_CAPABILITY

log = logging.getLogger("parkd.engine")

MOST_DYNAMIC, PROGRAMMATIC = 8, 6
"""Numbers of the driver: the attribute of a function that allows more shared memory, and the attribute of a launch that
lets it begin before the one before it has ended."""
PLAIN_SHARED_BYTES = 32 << 10
"""Shared memory that a program may ask for without that attribute, beside the kernel's own."""


class CompileError(Exception):
    """The source cannot be compiled or loaded here."""


class _Dimensions(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class Kernel:
    """A function of a module, on one device."""

    def __init__(self, driver: Any, function: ctypes.c_void_p, device: torch.device) -> None:
        self._driver, self._function, self._device = driver, function, device
        self._most_shared = PLAIN_SHARED_BYTES
        self._early = _Attribute(PROGRAMMATIC, 0, 1)
        self.is_early = torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
        """Whether launches begin before the kernel before them has ended, so that the kernel must wait for it."""

    def __call__(self, programs: int, threads: int, argument: ctypes.Structure, shared_bytes: int = 0) -> None:
        """Queues the kernel on the current stream of its device, with one argument that is a structure. Raises
        RuntimeError if another device is the current one."""
        if self._device.index != torch.cuda.current_device():
            raise RuntimeError(f"a kernel of {self._device} would run on cuda:{torch.cuda.current_device()}")
        if shared_bytes > self._most_shared:
            _check(self._driver, self._driver.cuFuncSetAttribute(self._function, MOST_DYNAMIC, shared_bytes))
            self._most_shared = shared_bytes
        stream = torch.cuda.current_stream(self._device).cuda_stream
        early = ctypes.addressof(self._early) if self.is_early else None
        shape = _Dimensions(programs, 1, 1, threads, 1, 1, shared_bytes, stream, early, int(self.is_early))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        _check(self._driver, self._driver.cuLaunchKernelEx(ctypes.byref(shape), self._function, arguments, None))


def _check(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")


def kernel(file: str, name: str, settings: Mapping[str, int], device: torch.device) -> Kernel:
    """The function `name` of a source file in this folder, compiled with `settings` as macros, for a CUDA device, which
    must be the current one. Raises CompileError."""
    return _kernel(file, name, tuple(sorted(settings.items())), device)


@cache
def _kernel(file: str, name: str, settings: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    code = compile_source(_source(file), f"sm_{major}{minor}", dict(settings), _compiler())
    torch.cuda.current_stream(device).synchronize()  # The context exists.
    try:
        driver = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "windll") else "libcuda.so.1")
        driver.cuLaunchKernelEx  # noqa: B018 - AttributeError where the driver is too old.
    except (OSError, AttributeError) as error:
        raise CompileError(f"the driver library cannot be used: {error}") from error
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), code))
        _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    except RuntimeError as error:
        raise CompileError(str(error)) from error
    return Kernel(driver, function, device)


@cache
def _source(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


@cache
def _compiler() -> Any:
    """The compiler library. Raises CompileError."""
    for name in _compiler_names(str(torch.version.cuda or "").partition(".")[0]):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("NVRTC, CUDA's compiler library, is not installed")


def _compiler_names(major: str) -> Iterator[str]:
    yield f"libnvrtc.so.{major}"
    yield f"nvrtc64_{major}0_0.dll"
    # Beside torch, where its dependencies put it.
    for folder in (f"cu{major}", "cuda_nvrtc"):
        yield str(Path(torch.__file__).parents[1] / "nvidia" / folder / "lib" / f"libnvrtc.so.{major}")


def compile_source(source: str, architecture: str, settings: Mapping[str, int], compiler: Any) -> bytes:
    """Machine code for an architecture such as sm_90. Needs no GPU. Raises CompileError with the compiler's words."""
    program = ctypes.c_void_p()
    if compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"parkd.cu", 0, None, None):
        raise CompileError("the compiler does not start")
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in settings.items())]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = compiler.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        if failed:
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            text = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, text)
            raise CompileError(text.value.decode(errors="replace").strip() or f"error {failed}")
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
