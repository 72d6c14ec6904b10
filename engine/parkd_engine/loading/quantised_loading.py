"""Loads checkpoints whose linear layers are quantised, through the library's own loading.

    headers of the files -> for each quantised layer a module with the file's tensors, without memory
                         -> the library finds, renames and reads them like all others
                         -> one layer after the other becomes codes in the engine's layout

The library's own support of quantised weights needs a package for each format, and is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parkd.errors import ModelError
from parkd_engine.weights.published import FORMATS, PublishedLinear
from parkd_engine.weights.schemes import Scheme, quantised_layers, tail, without_weights_kind

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Names of dtypes in the headers of safetensors files, of tensors that quantised layers have."""
NUMBERS = frozenset({"BF16", "F16", "F32"})
Header = tuple[tuple[int, ...], str]
"""Shape, and the dtype's name."""


def quantised_class(kind: type, config: Any, scheme: Scheme, folder: Path) -> type:
    """The library's class of a model with this configuration, whose quantised layers take the tensors in `folder`.
    `kind` is one of the library's automatic classes. Raises ModelError."""
    own: type = kind._model_mapping[type(config)]  # type: ignore[attr-defined]
    headers = _headers(folder)

    def begin(self: Any, settings: Any, *arguments: Any, **named: Any) -> None:
        own.__init__(self, settings, *arguments, **named)  # type: ignore[misc]
        _take_places(self, scheme, headers)

    return type(own.__name__, (own,), {"__init__": begin, "__module__": own.__module__})


def load_quantised(kind: type, folder: Path, config: Any, scheme: Scheme, **settings: Any) -> Any:
    """As `kind.from_pretrained`, with codes in place of the weights of quantised layers. Raises ModelError, and what
    the library raises."""
    made = quantised_class(kind, config, scheme, folder)
    model: Any = made.from_pretrained(str(folder), config=without_weights_kind(config), **settings)  # type: ignore[attr-defined]
    model.__class__ = made.__bases__[0]
    finish(model, folder)
    return model


def finish(model: torch.nn.Module, folder: Path) -> None:
    """Puts codes in place of the tensors of the file, layer by layer. Raises ModelError."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, PublishedLinear):
            continue
        try:
            _replace(model, name, module.finished())
        except ValueError as error:
            raise ModelError(f"The quantised weights of {name} in {folder} cannot be used: {error}.") from error


def _take_places(model: Any, scheme: Scheme, headers: Mapping[str, Mapping[str, Header]]) -> None:
    expected = quantised_layers(model, scheme)
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        there = headers.get(tail(name), {})
        form = FORMATS[scheme.format]
        is_plain = "weight" in there and there["weight"][1] in NUMBERS
        if not any(mark in there for mark in form.marks) and (is_plain or name not in expected):
            continue  # In full precision in the files, whatever the configuration says.
        kind = expected[name][1] if name in expected else scheme.stored_kind(name)
        tensors = {
            each: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            for each, (shape, dtype) in there.items()
            if each in form.names
        }
        _replace(model, name, PublishedLinear(scheme, kind, module, tensors))


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _headers(folder: Path) -> Mapping[str, Mapping[str, Header]]:
    """Name of each module, from its layer on -> name of each of its tensors -> its header. Raises ModelError."""
    found: dict[str, dict[str, Header]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith("mtp."):
                        continue
                    piece = opened.get_slice(name)
                    module, _, tensor = name.rpartition(".")
                    found.setdefault(tail(module), {})[tensor] = tuple(piece.get_shape()), str(piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}.") from error
    return found
