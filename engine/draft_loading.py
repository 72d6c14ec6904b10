"""Finds and loads the draft head that a checkpoint keeps beside its model.

The library drops these weights (`mtp.*`) and its configurations do not name them, so what a folder has is read off the
names of its weights. A configuration that says `num_mtp_layers` belongs to a model that runs with its head: layouts and
fingerprints follow from that.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.modeling_layers import MtpModel

from engine.errors import ModelLoadError
from engine.library_bars import no_library_bars
from engine.multimodal import language_config
from engine.step_history import MIXERS

INDEX_FILE = "model.safetensors.index.json"
_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")

log = logging.getLogger("parkd.engine")


def find_head(folder: Path, config: Any) -> bool:
    """Whether the checkpoint in `folder` has a draft head that can run; if so, `config` says so from now on.

    Reads names of weights only. Raises ModelLoadError for files that cannot be read.
    """
    names = [name for name in _weight_names(folder) if name.startswith("mtp.")]
    if not names:
        return False
    if (reason := _refusal(names, config)) is not None:
        log.warning("the draft head in %s is not used: %s", folder, reason)
        return False
    declare_head(config)
    return True


def declare_head(config: Any) -> None:
    """`config` is that of a model with a draft head of one layer. Its part about text says so."""
    config = language_config(config)
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]


def drop_head(config: Any) -> None:
    """The model runs without its head. What a configuration says of heads by itself stays."""
    config = language_config(config)
    if getattr(config, "mtp_layer_types", None) is not None:
        del config.mtp_layer_types, config.num_mtp_layers


def load_head(model: Any, folder: Path) -> Any:
    """The head of a model just loaded from `folder`, whose configuration names it: the library's `MtpModel`.

    Raises ModelLoadError.
    """
    model.config.name_or_path = str(folder)
    try:
        with no_library_bars():
            return MtpModel.from_pretrained(model).eval()
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelLoadError(
            f"The draft head in {folder} cannot be loaded: {error}. Start with --draft-tokens 0 to do without it."
        ) from error


def _refusal(names: Iterable[str], config: Any) -> str | None:
    kind = language_config(config).model_type
    if kind not in MIXERS:
        return f"heads of {kind} models are not supported"
    layers = {int(match[1]) for name in names if (match := _LAYER.match(name)) is not None}
    if layers != {0}:
        return f"it has {len(layers)} layers, and heads of one are supported"
    if any(name.startswith("mtp.embed_tokens") for name in names):
        return "it has an embedding of its own, which is not supported"
    return None


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
