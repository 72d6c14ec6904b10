"""Finds and loads the draft head that a checkpoint stores beside its model.

Transformers ignores these weights and most of its configurations do not mention them, so a head is recognised by the
names of its weights. `mtp_layer_types` in a configuration means that the model runs with its head; layouts and
fingerprints depend on it.

    mtp.fc.weight, mtp.layers.0. ...      Qwen: weights shared by the head's layers, then its layers
    model.layers.61. ...                  DeepSeek, GLM: numbered after the model's own layers
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from parkd.errors import ModelError
from parkd_engine.draft.stream_head import head_class
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.records import family_of
from parkd_engine.loading.library_bars import no_library_bars
from parkd_engine.weights.published import FORMATS
from parkd_engine.weights.schemes import scheme_of

INDEX_FILE = "model.safetensors.index.json"
HEAD_PREFIX = "mtp."
"""Of weights of a draft head, whose layers have numbers of their own."""
_LAYER = re.compile(r"(mtp|model)\.layers\.(\d+)\.")

log = logging.getLogger("parkd.engine")


def find_head(folder: Path, config: Any) -> bool:
    """Whether the checkpoint in `folder` has a supported draft head; if so, declares it in `config`.

    Reads only the names of weights. Raises ModelError for files that cannot be read.
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
        log.info("of the %d layers of the draft head in %s, only the first is used", count, folder)
    declare_head(config)
    return True


def declare_head(config: Any) -> None:
    """Declares in the text part of `config` that the model runs with one layer of its draft head."""
    config = language_config(config)
    for name, value in family_of(config).head_settings.items():
        setattr(config, name, value)


def drop_head(config: Any) -> None:
    """Undoes `declare_head`, so that the model runs without its head. Leaves a `config` without `mtp_layer_types` as it
    is."""
    config = language_config(config)
    if getattr(config, "mtp_layer_types", None) is not None:
        for name in family_of(config).head_settings:
            vars(config).pop(name, None)


def load_head(model: Any, folder: Path) -> Any:
    """Loads the head declared in the configuration of a model loaded from `folder`: an `MtpModel` or a `StreamHead`.

    Raises ModelError.
    """
    model.config.name_or_path = str(folder)
    # Transformers finds a head's weights by these. Its own patterns fit the depth of one published model, and every
    # layer of the head.
    behind = int(language_config(model.config).num_hidden_layers)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\.(?!layers\.[1-9])", rf"^model\.layers\.{behind}\."]
    try:
        with no_library_bars():
            return head_class(model.config).from_pretrained(model).eval()
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"The draft head in {folder} cannot be loaded: {error}. Start with --draft-tokens 0 to do without it."
        ) from error


def _refusal(names: Iterable[str], config: Any) -> str | None:
    family = family_of(language_config(config))
    if family.draft_head is None:
        return f"heads of {family.model_type} models are not supported"
    if any(name.startswith("mtp.embed_tokens") for name in names):
        return "it has an embedding of its own, which is not supported"
    scheme = scheme_of(config)
    marks = () if scheme is None else FORMATS[scheme.format].marks
    if any(name.rpartition(".")[2] in marks for name in names):
        return "its weights are quantised, which is not supported"
    return None


def _head_layer(name: str, behind: int) -> int | None:
    """The head's layer that a weight belongs to; 0 for weights that its layers share, None for a weight outside the
    head. `behind` is the number of the model's own layers."""
    match = _LAYER.match(name)
    if match is None:
        return 0 if name.startswith(HEAD_PREFIX) else None
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
        raise ModelError(f"The weights in {folder} cannot be read: {error}") from error
