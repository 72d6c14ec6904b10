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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import deserialize

from parkd.errors import InvalidRequest, ModelError
from parkd.model_files.gguf_metadata import PLAIN, plain_numbers, read_metadata
from parkd.state import VectorFile

DIGEST_BYTES = 16
GGUF_ARCHITECTURE = "controlvector"
NONE_LOADED = "None is loaded: start with --control-vector."
Direction = npt.NDArray[np.float32]
"""`[hidden]`, in main memory."""
_DIRECTION = re.compile(r"direction\.(\d{1,4})")


@dataclass(frozen=True, eq=False)
class ControlVector:
    """The directions of one file, for the layers that may be steered."""

    directions: Mapping[int, Direction]
    """By layer."""
    digest: bytes
    """16 bytes over layer indices and values, independent of the file's name and format."""


@dataclass(frozen=True, eq=False)
class Steering:
    """The sums to add per layer, with all scales applied."""

    digest: bytes = b""
    """16 bytes over vectors, scales and layers; empty when nothing is added."""
    sums: Mapping[int, Direction] = field(default_factory=dict)
    """By layer."""


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
        sums: dict[int, Direction] = {}
        for vector, scale in used:
            for layer, direction in vector.directions.items():
                part = direction * np.float32(scale)
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
        if not np.isfinite(tensor).all():
            raise ModelError(f"{path}: {name} has numbers that are not finite.")
        if first <= layer <= last:
            directions[layer] = tensor
    if not directions:
        raise ModelError(f"{path} has no tensor named direction.N for a layer from {first} to {last}.")
    ordered = {layer: directions[layer] for layer in sorted(directions)}
    return ControlVector(MappingProxyType(ordered), _vector_digest(ordered))


def _read_gguf(path: Path) -> dict[str, Direction]:
    file = read_metadata(path)
    if file.kind != GGUF_ARCHITECTURE:
        raise ModelError(f"{path} says it is {file.kind}, not a control vector.")
    return {name: file.tensor(name).astype(np.float32) for name in file.tensors}


def _read_safetensors(path: Path) -> dict[str, Direction]:
    found = {}
    parts: Sequence[tuple[str, Any]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    for name, tensor in parts:
        kind = str(tensor["dtype"])
        if kind not in PLAIN.values():
            raise ModelError(f"{path}: {name} has type {kind}; only {', '.join(PLAIN.values())} are supported.")
        found[name] = plain_numbers(tensor["data"], kind, tuple(tensor["shape"])).astype(np.float32)
    return found


def _vector_digest(directions: Mapping[int, Direction]) -> bytes:
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-vector")
    for layer, direction in directions.items():
        hasher.update(struct.pack("<QQ", layer, direction.size))
        hasher.update(direction.astype("<f4").tobytes())
    return hasher.digest()


def _set_digest(used: Sequence[tuple[ControlVector, float]]) -> bytes:
    if not used:
        return b""
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-steering")
    for vector, scale in used:
        hasher.update(vector.digest + struct.pack("<d", scale))
    return hasher.digest()
