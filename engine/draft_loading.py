"""Finds and loads the draft head that a checkpoint keeps beside its model.

The library drops these weights and most of its configurations do not name them, so what a folder has is read off the
names of its weights. A configuration that says `mtp_layer_types` belongs to a model that runs with its head: layouts
and fingerprints follow from that.

    mtp.fc.weight, mtp.layers.0. ...      Qwen: what all layers of the head share, and its layers
    model.layers.61. ...                  DeepSeek, GLM: as if they came behind the model's own
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.indexer import INDEXED
from engine.library_bars import no_library_bars
from engine.multimodal import language_config
from engine.stream_head import head_class

INDEX_FILE = "model.safetensors.index.json"
HEADS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3_next": {},
        "qwen3_5_text": {},
        "qwen4_exp_text": {"mtp_layer_types": [INDEXED]},
        "deepseek_v3": {},
        "glm4_moe_lite": {"mtp_mlp_layer_types": ["sparse"]},
    }
)
"""`model_type` of families with heads that can run -> how their configuration says so, beside what all say."""
_LAYER = re.compile(r"(mtp|model)\.layers\.(\d+)\.")

log = logging.getLogger("parkd.engine")


def find_head(folder: Path, config: Any) -> bool:
    """Whether the checkpoint in `folder` has a draft head that can run; if so, `config` says so from now on.

    Reads names of weights only. Raises ModelLoadError for files that cannot be read.
    """
    behind = int(language_config(config).num_hidden_layers)
    layers = {name: layer for name in _weight_names(folder) if (layer := _head_layer(name, behind)) is not None}
    names = set(layers)
    if not names:
        return False
    if (reason := _refusal(names, config)) is not None:
        log.warning("the draft head in %s is not used: %s", folder, reason)
        return False
    if (count := len(set(layers.values()))) > 1:
        log.info("of the %d layers of the draft head in %s the first is used", count, folder)
    declare_head(config)
    return True


def head_settings(model_type: str) -> Mapping[str, Any]:
    """What the configuration of a model's text says if it runs with a draft head of one layer."""
    return {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"], **HEADS.get(model_type, {})}


def declare_head(config: Any) -> None:
    """`config` is that of a model with a draft head, of which one layer runs. Its part about text says so."""
    config = language_config(config)
    for name, value in head_settings(config.model_type).items():
        setattr(config, name, value)


def drop_head(config: Any) -> None:
    """The model runs without its head. What a configuration says of heads by itself stays."""
    config = language_config(config)
    if getattr(config, "mtp_layer_types", None) is not None:
        for name in head_settings(config.model_type):
            vars(config).pop(name, None)


def load_head(model: Any, folder: Path) -> Any:
    """The head of a model just loaded from `folder`, whose configuration names it: the library's `MtpModel`, or ours.

    Raises ModelLoadError.
    """
    model.config.name_or_path = str(folder)
    # By these the library finds a head's weights. Its own name the depth of one published model, and every layer.
    behind = int(language_config(model.config).num_hidden_layers)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\.(?!layers\.[1-9])", rf"^model\.layers\.{behind}\."]
    try:
        with no_library_bars():
            return head_class(model.config).from_pretrained(model).eval()
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelLoadError(
            f"The draft head in {folder} cannot be loaded: {error}. Start with --draft-tokens 0 to do without it."
        ) from error


def _refusal(names: Iterable[str], config: Any) -> str | None:
    kind = language_config(config).model_type
    if kind not in HEADS:
        return f"heads of {kind} models are not supported"
    if any(name.startswith("mtp.embed_tokens") for name in names):
        return "it has an embedding of its own, which is not supported"
    return None


def _head_layer(name: str, behind: int) -> int | None:
    """The layer of the head that a weight belongs to; 0 for what all layers share, None if it is not of a head.
    `behind`: layers of the model itself."""
    match = _LAYER.match(name)
    if match is None:
        return 0 if name.startswith("mtp.") else None
    layer = int(match[2]) - (behind if match[1] == "model" else 0)
    return layer if layer >= 0 else None


def _weight_names(folder: Path) -> list[str]:
    try:
        if (folder / INDEX_FILE).is_file():
            return list(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"])
        names: list[str] = []
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as opened:
                names += opened.keys()
        return names
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"The weights in {folder} cannot be read: {error}") from error
