"""Control vectors: directions added to the residual stream, as llama.cpp does it.

    layer N -> + sum over vectors (scale x direction.N) -> layer N + 1 (or the final norm)

A file has one tensor `direction.N` per layer, with N >= 1. It is added to the output of layer N, counted from 0. The
first layer's output is never steered. (llama.cpp: `common/common.cpp`, control vectors; `llama-adapter.cpp`.)

Steering changes all rows computed with it, so the effective set has a digest, which is part of the state's key.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from parkd.errors import InvalidRequest, ModelError
from parkd.state import VectorFile
from parkd_engine.failures import stage_failed

DIGEST_BYTES = 16
GGUF_ARCHITECTURE = "controlvector"
NONE_LOADED = "None is loaded: start with --control-vector."
_DIRECTION = re.compile(r"direction\.(\d{1,4})")


@dataclass(frozen=True, eq=False)
class ControlVector:
    """The directions of one file, for the layers that may be steered."""

    directions: Mapping[int, torch.Tensor]
    """Layer -> float32 `[hidden]`, on the CPU."""
    digest: bytes
    """16 bytes over layer indices and values, independent of the file's name and format."""


@dataclass(frozen=True, eq=False)
class Steering:
    """The sums to add per layer, with all scales applied."""

    digest: bytes = b""
    """16 bytes over vectors, scales and layers; empty when nothing is added."""
    sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> float32 `[hidden]`, on the CPU."""


class SteeringBank:
    """The loaded vectors and their default scales. Immutable, so thread-safe."""

    def __init__(
        self, vectors: Mapping[str, ControlVector] | None = None, defaults: Mapping[str, float] | None = None
    ) -> None:
        self._vectors = MappingProxyType(dict(vectors or {}))
        self._defaults = MappingProxyType(dict(defaults or {}))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._vectors)

    def digest(self, scales: Mapping[str, float] | None) -> bytes:
        """The digest of `select(scales)`, without computing the sums. Raises the errors of `select`."""
        return _set_digest(self._in_use(scales))

    def select(self, scales: Mapping[str, float] | None) -> Steering:
        """The sums for these scales. Vectors that `scales` leaves out are not used; None means the default scales.

        Raises InvalidRequest for an unknown name, and ValueError for a scale that is not finite.
        """
        used = self._in_use(scales)
        sums: dict[int, torch.Tensor] = {}
        for vector, scale in used:
            for layer, direction in vector.directions.items():
                part = direction * scale
                sums[layer] = sums[layer] + part if layer in sums else part
        return Steering(_set_digest(used), MappingProxyType(sums))

    def _in_use(self, scales: Mapping[str, float] | None) -> list[tuple[ControlVector, float]]:
        """The vectors with a scale other than 0, ordered by digest: the same set then gives the same bits, whatever the
        names. Raises the errors of `select`."""
        chosen = self._defaults if scales is None else scales
        for name, scale in chosen.items():
            if name not in self._vectors:
                known = f"These are: {', '.join(self.names)}." if self.names else NONE_LOADED
                raise InvalidRequest(f"There is no control vector {name!r}. {known}", param="steering")
            if not math.isfinite(scale):
                raise ValueError(f"the scale of {name} is {scale}")
        used = [(self._vectors[name], float(scale)) for name, scale in chosen.items() if scale != 0]
        return sorted(used, key=lambda pair: (pair[0].digest, pair[1]))


def load_vectors(
    files: Sequence[VectorFile], hidden_size: int, num_layers: int, layers: tuple[int, int] | None = None
) -> SteeringBank:
    """Reads the files. `layers` are the first and last layer that may be steered, inclusive; None: all from layer 1.

    Raises ModelError for a file that cannot be read or does not fit the model.
    """
    vectors = {file.name: load_vector(file.path, hidden_size, num_layers, layers) for file in files}
    return SteeringBank(vectors, {file.name: file.scale for file in files})


def load_vector(path: Path, hidden_size: int, num_layers: int, layers: tuple[int, int] | None = None) -> ControlVector:
    """Reads one GGUF or safetensors file. Raises ModelError."""
    read = _read_safetensors if path.suffix.lower() == ".safetensors" else _read_gguf
    try:
        tensors = read(path)
    except ModelError:
        raise
    except Exception as error:
        # The readers check little, so a damaged file can raise any kind of error.
        raise ModelError(f"The control vector {path} is damaged or cannot be read: {error}") from error
    first, last = (1, num_layers - 1) if layers is None else layers
    directions = {}
    for name, tensor in tensors.items():
        match = _DIRECTION.fullmatch(name)
        if match is None:
            continue
        layer = int(match[1])
        if not 1 <= layer < num_layers:
            raise ModelError(f"{path} has {name}; this model's layers that can be steered are 1 to {num_layers - 1}.")
        if tuple(tensor.shape) != (hidden_size,):
            raise ModelError(
                f"{path}: {name} has {' x '.join(map(str, tensor.shape))} numbers where this model's hidden state has "
                f"{hidden_size}: it was made for another model."
            )
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{path}: {name} has numbers that are not finite.")
        if first <= layer <= last:
            directions[layer] = tensor
    if not directions:
        raise ModelError(f"{path} has no tensor named direction.N for a layer from {first} to {last}.")
    ordered = {layer: directions[layer] for layer in sorted(directions)}
    return ControlVector(MappingProxyType(ordered), _vector_digest(ordered))


def hook_layers(stage: Any, steering: Steering) -> list[tuple[Any, Callable[..., Any]]]:
    """The module of each steered layer of a stage, and a forward hook that adds the direction. The directions are moved
    to the stage's device and dtype; no hook is registered. Raises what moving a tensor to a device can raise."""
    hooks = []
    for layer in range(stage.first_layer, stage.end_layer):
        if layer in steering.sums:
            # Residual streams start as copies of one and are mixed into one, so all get the same direction.
            direction = steering.sums[layer].repeat(stage.streams).to(device=stage.device, dtype=stage.dtype)
            hooks.append((stage.inner.layers[layer], _adder(direction)))
    return hooks


class SteeringHooks:
    """The steering in effect, as forward hooks on the layers of all stages."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = tuple(stages)
        self._handles: list[Any] = []
        self.steering = Steering()

    def change(self, steering: Steering) -> None:
        """Uses `steering` from now on. Raises StageFailed, and then changes nothing."""
        if steering.digest == self.steering.digest:
            return
        hooks = []
        for stage in self._stages:
            try:
                hooks += hook_layers(stage, steering)
            except Exception as error:
                raise stage_failed(stage.index, "steering", error) from error
        for handle in self._handles:
            handle.remove()
        self._handles = [module.register_forward_hook(hook) for module, hook in hooks]
        self.steering = steering


def _adder(direction: torch.Tensor) -> Callable[..., Any]:
    def add(_module: Any, _inputs: Any, output: Any) -> Any:
        # Layers of some architectures return a tuple whose first element is the hidden state.
        if isinstance(output, tuple):
            return (output[0] + direction, *output[1:])
        return output + direction

    return add


def _read_gguf(path: Path) -> dict[str, torch.Tensor]:
    import gguf

    reader = gguf.GGUFReader(str(path))
    entry = reader.get_field("general.architecture")
    kind = None if entry is None else entry.contents()
    if kind != GGUF_ARCHITECTURE:
        raise ModelError(f"{path} says it is {kind or 'of no kind'}, not a control vector.")
    plain = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type not in plain:
            raise ModelError(
                f"{path}: {tensor.name} has type {tensor.tensor_type.name}; only F32 and F16 are supported."
            )
        tensors[str(tensor.name)] = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}


def _vector_digest(directions: Mapping[int, torch.Tensor]) -> bytes:
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-vector")
    for layer, direction in directions.items():
        hasher.update(struct.pack("<QQ", layer, direction.numel()))
        hasher.update(direction.numpy().astype("<f4").tobytes())
    return hasher.digest()


def _set_digest(used: Sequence[tuple[ControlVector, float]]) -> bytes:
    if not used:
        return b""
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-steering")
    for vector, scale in used:
        hasher.update(vector.digest + struct.pack("<d", scale))
    return hasher.digest()
