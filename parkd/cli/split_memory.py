"""Stores in the park directory how the layers were split over the devices.

Parked state of another split has to be cut anew and written again. If a GPU has slightly less free memory than at the
last start, `auto` could choose another split, and all parked state would cost that. So the previous split is tried
first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from parkd.config import Config
from parkd.errors import ModelError
from parkd.store.files.fs import FileSystem

if TYPE_CHECKING:
    from parkd.engine_adapter.torch_engine.engine import TorchEngine

log = logging.getLogger(__name__)

FILE_NAME = "split.json"
TEMPORARY_NAME = FILE_NAME + ".new"


def load(
    config: Config, model: str, files: FileSystem | None, load_engine: Callable[[Config], TorchEngine]
) -> TorchEngine:
    """Loads the engine, with the split that is stored for this model on these devices if it still fits. Raises
    ModelError."""
    if files is None or len(config.model.layout.devices) < 2 or config.model.layout.layer_split:
        return load_engine(config)
    known = recall(files, model, config.model.layout.devices)
    if known is not None:
        try:
            layout = replace(config.model.layout, layer_split=known)
            return load_engine(replace(config, model=replace(config.model, layout=layout)))
        except ModelError as error:
            log.warning("the previous layer split does not fit, so a new one is chosen: %s", error.message)
    engine = load_engine(config)
    split = tuple(stage.first_layer for stage in engine.info.layout.stages[1:])
    remember(files, model, config.model.layout.devices, split)
    return engine


def recall(files: FileSystem, model: str, devices: tuple[str, ...]) -> tuple[int, ...] | None:
    """The stored split; None if there is none for this model on these devices."""
    try:
        known = json.loads(files.load(FILE_NAME))
        split = tuple(int(first) for first in known["layer_split"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_same = known.get("model") == model and known.get("devices") == list(devices)
    return split if is_same and len(split) + 1 == len(devices) else None


def remember(files: FileSystem, model: str, devices: tuple[str, ...], split: tuple[int, ...]) -> None:
    """Stores the split. A failure is only logged."""
    text = json.dumps({"model": model, "devices": list(devices), "layer_split": list(split)})
    try:
        if TEMPORARY_NAME in files.sizes():
            files.remove(TEMPORARY_NAME)
        file = files.create(TEMPORARY_NAME)
        try:
            file.write(0, [np.frombuffer(text.encode(), dtype=np.uint8)])
            file.sync()
        finally:
            file.close()
        files.rename(TEMPORARY_NAME, FILE_NAME)
        files.sync()
    except OSError as error:
        log.warning("the layer split could not be stored: %s", error)
