"""Loads checkpoints whose linear layers are quantised, through the library's own loading.

    headers of the files -> for each quantised layer a module with the file's tensors, without memory
                         -> the library finds, renames and reads them like all others
                         -> one layer after the other becomes codes in the engine's layout

    experts, of which a layer has hundreds -> the library passes them over
                                           -> read one by one into their layer's matrix (`expert_loading`)

The library's own support of quantised weights needs a package for each format, and is not used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from parkd.errors import ModelError
from parkd.model_files.cache import MANIFEST, Progress
from parkd_engine.loading.draft_loading import HEAD_PREFIX, INDEX_FILE
from parkd_engine.loading.expert_loading import PublishedExperts, TensorFiles, paths_of
from parkd_engine.loading.layer_weights import weightless_model
from parkd_engine.weights.experts import PARTS, quantised_experts, rows_of
from parkd_engine.weights.kinds import WeightKind
from parkd_engine.weights.linear import put_module
from parkd_engine.weights.published import FORMATS, PublishedLinear
from parkd_engine.weights.rounding import rounded
from parkd_engine.weights.schemes import OUTPUT_HEAD, Scheme, quantised_layers, scheme_of, tail, without_weights_kind

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Names of dtypes in the headers of safetensors files, of tensors that quantised layers have."""
NUMBERS = frozenset({"BF16", "F16", "F32"})
COPIED = frozenset({".json", ".txt", ".jinja", ".model"})
CONFIG_FILE = "config.json"
Header = tuple[tuple[int, ...], str]
"""Shape, and the dtype's name."""
OF_EXPERTS = r"\.experts\."


def quantised_class(kind: type, config: Any, scheme: Scheme, folder: Path) -> type:
    """The library's class of a model with this configuration, whose quantised layers take the tensors in `folder`.
    `kind` is one of the library's automatic classes. Raises ModelError."""
    own: type = kind._model_mapping[type(config)]  # type: ignore[attr-defined]
    headers = _headers(folder)

    def begin(self: Any, settings: Any, *arguments: Any, **named: Any) -> None:
        own.__init__(self, settings, *arguments, **named)  # type: ignore[misc]
        _take_places(self, scheme, headers)

    passed_over = [*(own._keys_to_ignore_on_load_unexpected or ()), OF_EXPERTS]  # type: ignore[attr-defined]
    members = {"__init__": begin, "__module__": own.__module__, "_keys_to_ignore_on_load_unexpected": passed_over}
    return type(own.__name__, (own,), members)


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
    with TensorFiles(folder) as files:
        for name, module in list(model.named_modules()):
            try:
                if isinstance(module, PublishedExperts):
                    put_module(model, name, module.finished(files, tail(name)))
                elif isinstance(module, PublishedLinear):
                    put_module(model, name, module.finished())
            except ValueError as error:
                raise ModelError(f"The quantised weights of {name} in {folder} cannot be used: {error}.") from error


def convert_folder(folder: Path, target: Path, settings: Any, progress: Progress | None = None) -> None:
    """Writes a copy of a model's folder with its linear layers converted to the kind that `settings`, the library's
    configuration, names in `quantization_config`. Holds one file's tensors in memory at a time.

    Raises ModelError.
    """
    scheme = scheme_of(settings)
    assert scheme is not None, "the kind to convert to"
    model, _ = weightless_model(without_weights_kind(settings))
    kinds = {tail(name): kind for name, (_, kind) in quantised_layers(model, scheme).items()}
    experts = {tail(name): found for name, found in quantised_experts(model, scheme).items()}
    for module, (each, matrices) in experts.items():
        kinds |= {
            path: kind
            for matrix, kind in matrices.items()
            for part in PARTS[matrix]
            for expert in range(int(each.num_experts))  # type: ignore[arg-type]
            for path in paths_of(module, expert, part)
        }
    files = sorted(folder.glob("*.safetensors"))
    places: dict[str, str] = {}
    doing = f"Converting weights to {scheme.kind.codes.value}"
    if progress is not None:
        progress(doing, 0.0)
    for index, file in enumerate(files):
        try:
            with safe_open(str(file), framework="pt") as opened:
                tensors = dict(_converted(opened, kinds, experts))
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be converted: {error}.") from error
        places |= dict.fromkeys(tensors, file.name)
        if progress is not None:
            progress(doing, (index + 1) / len(files))
    if len(files) > 1:
        (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file in folder.iterdir():
        if file.is_file() and file.suffix in COPIED and file.name not in (INDEX_FILE, MANIFEST, CONFIG_FILE):
            shutil.copyfile(file, target / file.name)
    written = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    written["quantization_config"] = settings.quantization_config
    (target / CONFIG_FILE).write_text(json.dumps(written))


def _converted(
    opened: Any, kinds: Mapping[str, WeightKind], experts: Mapping[str, tuple[Any, Mapping[str, WeightKind]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in opened.keys():  # noqa: SIM118 - it is no mapping
        tensor = opened.get_tensor(name)
        module, _, what = name.rpartition(".")
        short = "" if name.startswith(HEAD_PREFIX) else tail(module)
        library, matrices = experts.get(short, (None, {}))
        if what == "weight" and short in kinds:
            for part, value in rounded(tensor, kinds[short]).items():
                yield f"{module}.{part}", value
        elif what in matrices:
            # All experts in one tensor: from now on each has layers of its own, as in other files.
            rows = rows_of(library, what, tensor)
            for expert, each in enumerate(rows.view(len(tensor), len(PARTS[what]), -1, rows.shape[1])):
                for part, matrix in zip(PARTS[what], each, strict=True):
                    for code, value in rounded(matrix, matrices[what]).items():
                        yield f"{module}.{expert}.{part}.{code}", value
        else:
            yield name, tensor


def _take_places(model: Any, scheme: Scheme, headers: Mapping[str, Mapping[str, Header]]) -> None:
    expected = quantised_layers(model, scheme)
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        there = headers.get(tail(name), {})
        if not there and tail(name) == OUTPUT_HEAD:
            continue  # The embedding is the head.
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
        put_module(model, name, PublishedLinear(scheme, kind, module, tensors))
    for name, (experts, kinds) in quantised_experts(model, scheme).items():
        put_module(model, name, PublishedExperts(scheme, kinds, experts))


def _headers(folder: Path) -> Mapping[str, Mapping[str, Header]]:
    """Name of each module, from its layer on -> name of each of its tensors -> its header. Raises ModelError."""
    found: dict[str, dict[str, Header]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith(HEAD_PREFIX):
                        continue
                    piece = opened.get_slice(name)
                    module, _, tensor = name.rpartition(".")
                    found.setdefault(tail(module), {})[tensor] = tuple(piece.get_shape()), str(piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}.") from error
    return found
