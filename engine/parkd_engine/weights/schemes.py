"""Which linear layers of a model are quantised, and how: read from `quantization_config`, before any weights.

    quantization_config -> Scheme -> the kind of each layer's weights, by the layer's name and shape

Every published format that is understood has a `Scheme`; the formats themselves are in `published`. A converted copy of
the engine's own (`--weights`) says so in the same place. What is not understood is refused by name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parkd.errors import ModelError, UnsupportedModel
from parkd_engine.families.multimodal import language_config
from parkd_engine.weights.kinds import BLOCK_COLUMNS, IN_WORDS, Codes, WeightKind

OWN_METHOD = "parkd"
"""`quant_method` of copies that the engine converted itself."""
OWN_VERSION = 2
OWN_GROUPS = (128, 64, 32)
"""Columns in a group of int4 codes: the first of these that divides the columns of a matrix."""
OWN_KINDS: Mapping[str, WeightKind] = MappingProxyType(
    {
        "int4": WeightKind(Codes.INT4, OWN_GROUPS[0]),
        "int8": WeightKind(Codes.INT8),
        "fp8": WeightKind(Codes.FP8),
    }
)
"""Values of `--weights` -> the kind of the layers' weights."""
OWN_HEAD: Mapping[str, WeightKind] = MappingProxyType({**OWN_KINDS, "int4": OWN_KINDS["int8"]})
"""The same for the output head, which decides which token is next."""
OWN_LEFT_ALONE = ("in_proj_a", "in_proj_b", "shared_expert_gate", "gate")
"""Small layers that decide how fast a memory decays and which experts run."""
OUTPUT_HEAD = "lm_head"
EXPERTS = ".experts."
"""In the names of routed experts."""
MX_GROUP, NV_GROUP = 32, 16
"""Columns that share a scale in MXFP4 and in NVFP4."""
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""What may stand before a layer's name in a configuration or a file: checkpoints differ."""


def tail(name: str) -> str:
    """The part of a module's or tensor's name that does not depend on what the model is part of: from `layers.N` on."""
    match = None if _is_of_images(name) else _LAYER.search(name)
    return match[1] if match else name.rpartition("language_model.")[2].removeprefix("model.")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint stores the weights of linear layers."""

    format: str
    """One of `published.FORMATS`."""
    kind: WeightKind
    """The kind of the layers' weights. Its scales' dtype is that of the file, which may differ."""
    head_kind: WeightKind | None = None
    """The kind of the output head's; None: as it is."""
    left_alone: tuple[str, ...] = ()
    """Names, parts of names, names with `*` for any part, or after `re:` patterns, of layers in full precision."""
    only_layers: bool = False
    """Whether nothing outside of the decoder's layers is quantised, except for `head_kind`."""
    only_experts: bool = False
    """Whether nothing but routed experts is quantised."""

    def __str__(self) -> str:
        head = self.head_kind
        return str(self.kind) if head in (None, self.kind) else f"{self.kind}, the output head {head}"

    def kind_of(self, name: str, columns: int) -> WeightKind | None:
        """The kind of the weights, of so many columns, of the linear layer of this name in the model; None for full
        precision. Raises UnsupportedModel if they do not fit the kind."""
        if self._is_left_alone(name) or (self.only_experts and EXPERTS not in name):
            return None
        short = tail(name)
        kind = self.kind
        if short == OUTPUT_HEAD:
            if self.head_kind is None:
                return None
            kind = self.head_kind
        elif self.only_layers and (not short.startswith("layers.") or _is_of_images(name)):
            return None
        if self.format == OWN_METHOD:
            return _own_kind(kind, columns)
        if not kind.fits(columns):
            raise UnsupportedModel(
                f"{short} has {columns} columns of {kind.codes.value} weights, which is not a multiple of "
                f"{max(kind.group, BLOCK_COLUMNS if kind.codes in IN_WORDS else 1)}; such layers are not supported"
            )
        return kind

    def stored_kind(self, name: str) -> WeightKind:
        """The kind of a layer whose file has codes although the configuration leaves it alone."""
        return self.head_kind if self.head_kind is not None and tail(name) == OUTPUT_HEAD else self.kind

    def _is_left_alone(self, name: str) -> bool:
        short = tail(name)
        for entry in self.left_alone:
            if entry.startswith("re:"):
                if any(re.match(entry[3:], prefix + short) for prefix in PREFIXES) or re.match(entry[3:], name):
                    return True
            elif "*" in entry:
                names = (name, *(prefix + short for prefix in PREFIXES))
                if any(fnmatchcase(each, entry) or fnmatchcase(each, f"{entry}.*") for each in names):
                    return True
            elif f".{tail(entry)}." in f".{short}." or f".{entry}." in f".{name}.":
                return True
        return False


def scheme_of(config: Any) -> Scheme | None:
    """The scheme of a checkpoint with this configuration of the library's; None for full precision. Raises
    UnsupportedModel, whose message names what is not supported."""
    named = getattr(config, "quantization_config", None) or getattr(
        language_config(config), "quantization_config", None
    )
    if not named:
        return None
    settings: Mapping[str, Any] = named if isinstance(named, Mapping) else named.to_dict()
    method = str(settings.get("quant_method") or "without a name").lower()
    if method not in _READERS:
        raise UnsupportedModel(
            f"its weights are quantised by the method {method}, which is not supported; these are: {', '.join(METHODS)}"
        )
    return _READERS[method](settings)


def quantised_layers(model: nn.Module, scheme: Scheme) -> dict[str, tuple[nn.Linear, WeightKind]]:
    """Name of each linear layer of `model` that the scheme stores as codes -> the layer, and their kind. An output head
    that is the embedding's tensor is not among them. Raises UnsupportedModel."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[str, tuple[nn.Linear, WeightKind]] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module.weight) not in tables:
            kind = scheme.kind_of(name, module.in_features)
            if kind is not None:
                found[name] = module, kind
    return found


def own_settings(name: str) -> dict[str, Any]:
    """The `quantization_config` of a copy converted to a kind of `OWN_KINDS`."""
    return {"quant_method": OWN_METHOD, "version": OWN_VERSION, "weights": name}


def convert_to(config: Any, name: str) -> None:
    """Says in the library's configuration of a model in full precision that its weights are of a kind of `OWN_KINDS`.
    Raises ModelError if they are codes already."""
    if (scheme := scheme_of(config)) is not None:
        raise ModelError(
            f"The model's weights are quantised already ({scheme.kind}), and only weights in full precision can be "
            f"converted to {name}. Start without --weights."
        )
    config.quantization_config = own_settings(name)


def without_weights_kind(config: Any) -> Any:
    """A copy of the configuration that says nothing of quantised weights."""
    bare = copy.deepcopy(config)
    for part in (bare, language_config(bare)):
        vars(part).pop("quantization_config", None)
    return bare


def _own(settings: Mapping[str, Any]) -> Scheme:
    name = str(settings.get("weights"))
    if settings.get("version") != OWN_VERSION or name not in OWN_KINDS:
        raise UnsupportedModel(f"its weights were converted to {name} by another version; convert them again")
    return Scheme(OWN_METHOD, OWN_KINDS[name], OWN_HEAD[name], OWN_LEFT_ALONE, only_layers=True)


def _own_kind(kind: WeightKind, columns: int) -> WeightKind | None:
    """The kind with the largest group that fits; None if none does."""
    kinds = [replace(kind, group=group) for group in OWN_GROUPS] if kind.group else [kind]
    return next((each for each in kinds if each.fits(columns)), None)


def _awq(settings: Mapping[str, Any]) -> Scheme:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModel(f"its AWQ weights are packed as {version}, which is not supported; gemm is")
    bits, group = _integer(settings, "bits", "w_bit"), _integer(settings, "group_size", "q_group_size")
    if bits != 4:
        raise UnsupportedModel(f"its AWQ weights have {bits} bits, which is not supported; 4 are")
    # Files have zeros for each group, also where all of them are the middle.
    kind = _kind(Codes.INT4, group, has_zeros=True, scale_dtype=torch.float16)
    return Scheme("awq", kind, left_alone=_names(settings.get("modules_to_not_convert")), only_layers=True)


def _gptq(settings: Mapping[str, Any]) -> Scheme:
    bits, group = _integer(settings, "bits"), _integer(settings, "group_size")
    if bits not in (4, 8):
        raise UnsupportedModel(f"its GPTQ weights have {bits} bits, which is not supported; 4 and 8 are")
    packing = str(settings.get("checkpoint_format") or "gptq").lower()
    if packing not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"its GPTQ weights are packed as {packing}, which is not supported; gptq and gptq_v2 are"
        )
    codes = Codes.INT4 if bits == 4 else Codes.INT8
    kind = _kind(codes, group, has_zeros=True, scale_dtype=torch.float16, is_ordered=bool(settings.get("desc_act")))
    rules = settings.get("dynamic") or {}
    if others := [name for name in rules if not str(name).startswith("-:")]:
        raise UnsupportedModel(
            f"its GPTQ settings differ by layer (dynamic: {others[0]}), which is not supported; leaving layers out is"
        )
    alone = tuple("re:" + str(name).removeprefix("-:") for name in rules)
    head = kind if settings.get("lm_head") else None
    alone += _names(settings.get("modules_to_not_convert"))
    return Scheme(packing, kind, head, left_alone=alone, only_layers=True)


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    if str(settings.get("fmt") or "e4m3") != "e4m3":
        raise UnsupportedModel(f"its fp8 weights are of the format {settings['fmt']}, which is not supported; e4m3 is")
    block = settings.get("weight_block_size")
    alone = _names(settings.get("modules_to_not_convert")) + _names(settings.get("ignored_layers"))
    if block is None:
        return Scheme("fp8", WeightKind(Codes.FP8, scale_dtype=torch.float32), left_alone=alone)
    rows, columns = (int(size) for size in block)
    kind = WeightKind(Codes.FP8, columns, rows, scale_dtype=torch.float32)
    return Scheme("fp8", kind, left_alone=alone)


def _mxfp4(settings: Mapping[str, Any]) -> Scheme:
    # Of gpt-oss: experts alone, whatever else the settings name.
    kind = WeightKind(Codes.FP4, MX_GROUP, scale_dtype=torch.float8_e8m0fnu)
    return Scheme("mxfp4", kind, left_alone=_names(settings.get("modules_to_not_convert")), only_experts=True)


def _modelopt(settings: Mapping[str, Any]) -> Scheme:
    algorithm = str(settings.get("quant_algo")).upper()
    kinds = {
        "NVFP4": WeightKind(Codes.FP4, NV_GROUP, scale_dtype=torch.float8_e4m3fn, has_row_scales=True),
        "FP8": WeightKind(Codes.FP8, scale_dtype=torch.float32),
    }
    if algorithm not in kinds:
        raise UnsupportedModel(
            f"its weights are quantised by ModelOpt's {algorithm}, which is not supported; {' and '.join(kinds)} are"
        )
    if algorithm == "NVFP4" and (group := settings.get("group_size", NV_GROUP)) != NV_GROUP:
        raise UnsupportedModel(f"its NVFP4 weights have groups of {group}, which is not supported; {NV_GROUP} are")
    alone = _names(settings.get("ignore")) + _names(settings.get("exclude_modules"))
    return Scheme("modelopt", kinds[algorithm], kinds[algorithm], left_alone=alone)


def _compressed_tensors(settings: Mapping[str, Any]) -> Scheme:
    groups = dict(settings.get("config_groups") or {})
    if len(groups) != 1:
        raise UnsupportedModel(
            f"its weights have {len(groups)} groups of settings (compressed-tensors), which is not supported; one is"
        )
    (group,) = groups.values()
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or settings.get("transform_config"):
        what = f"sparse ({sparsity})" if sparsity != "dense" else "rotated (transform_config)"
        raise UnsupportedModel(f"its weights are {what}, which is not supported")
    packing = str(group.get("format") or settings.get("format"))
    weights = group.get("weights") or {}
    bits, number = weights.get("num_bits"), str(weights.get("type", "int"))
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"))
    known: dict[tuple[str, str, Any], Codes] = {
        ("pack-quantized", "int", 4): Codes.INT4,
        ("pack-quantized", "int", 8): Codes.INT8,
        ("int-quantized", "int", 8): Codes.INT8,
        ("naive-quantized", "int", 8): Codes.INT8,
        ("float-quantized", "float", 8): Codes.FP8,
        ("naive-quantized", "float", 8): Codes.FP8,
    }
    codes = known.get((packing, number, bits))
    if codes is None or strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedModel(
            f"its weights are {number}{bits} by {strategy}, stored as {packing} (compressed-tensors), which is not "
            f"supported; pack-quantized int4 and int8, int-quantized int8 and float-quantized fp8 are"
        )
    targets = [str(target) for target in group.get("targets") or ["Linear"]]
    if "Linear" not in targets:
        raise UnsupportedModel(
            f"its weights are quantised in {', '.join(targets)} (compressed-tensors), which is not supported; in all "
            f"of Linear except those to ignore they are"
        )
    if strategy == "block":
        rows, columns = (int(size) for size in weights["block_structure"])
        kind = WeightKind(codes, columns, rows)
    else:
        kind = _kind(
            codes,
            int(weights["group_size"]) if strategy == "group" else 0,
            has_zeros=not weights.get("symmetric", True),
            is_ordered=str(weights.get("actorder")).lower() in ("group", "true"),
        )
    alone = _names(settings.get("ignore"))
    return Scheme("compressed-tensors", kind, kind, left_alone=alone)


_READERS = MappingProxyType(
    {
        OWN_METHOD: _own,
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
    }
)
METHODS = tuple(name for name in _READERS if name != OWN_METHOD)
"""Values of `quant_method` that are read."""


def _kind(codes: Codes, group: int, **settings: Any) -> WeightKind:
    if group > 0 and codes is Codes.INT4 and group % BLOCK_COLUMNS:
        raise UnsupportedModel(
            f"its int4 weights have groups of {group} columns, which is not supported; multiples of {BLOCK_COLUMNS} are"
        )
    return WeightKind(codes, max(group, 0), **settings)


def _integer(settings: Mapping[str, Any], *names: str) -> int:
    value = next((settings[name] for name in names if isinstance(settings.get(name), int)), None)
    if value is None:
        raise UnsupportedModel(f"its quantization_config does not say {names[0]}")
    return int(value)


def _names(entries: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(str(entry) for entry in entries or ())


def _is_of_images(name: str) -> bool:
    return "vision" in name or "visual" in name
