"""The size of a model's state, computed from its configuration alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from parkd.errors import ModelError
from parkd.model_files.gguf_metadata import read_metadata
from parkd.state import EngineConfig
from parkd_engine.account import ModelMemory, StageMemory, check_asked_context
from parkd_engine.arenas.kv_format import kv_dtype_of
from parkd_engine.arenas.layout import StageStateLayout, build_layout
from parkd_engine.balance import choose_host_layers, choose_split
from parkd_engine.families.architectures import architecture_of, check_config
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.presets.shapes import PREFIX, preset_config
from parkd_engine.loading.draft_loading import INDEX_FILE, drop_head, find_head
from parkd_engine.loading.gguf_convert import config_of
from parkd_engine.loading.loader import checked_config
from parkd_engine.memory import free_bytes, is_card
from parkd_engine.weights.schemes import convert_to, scheme_of

EMPTY_CARD_BYTES = 1 << 50
"""Free memory of a GPU that is not in the machine that plans: enough for any model."""


@dataclass(frozen=True, slots=True)
class WeightlessModel:
    """What a model's configuration tells without its weights."""

    architecture: str
    context_tokens: int
    """The model's own limit."""
    stages: tuple[StageStateLayout, ...]
    settings: Any
    """The transformers configuration."""
    memory: tuple[StageMemory, ...]
    """What each stage takes on its device."""
    weights: str
    """The kind of the weights."""
    host_layers: tuple[int, ...] = ()
    """The layers whose routed experts stay in main memory."""
    host_bytes: int = 0


def plan_model(model: str, config: EngineConfig) -> WeightlessModel:
    """`model` is a directory, a hub id, a GGUF file or `random:NAME`. For a hub id, only the configuration and the
    index of the weights are downloaded. GPUs that are not here count as equal and empty.

    Raises UnsupportedModel, InvalidSplit or ModelError, as loading would.
    """
    settings = _settings(model)
    if config.guesses == 0:
        drop_head(settings)
    check_config(settings)
    if config.weights is not None:
        convert_to(settings, config.weights)
    own = getattr(settings, "dtype", None)
    # The same choice as the loader's: float32 on CPUs, else the checkpoint's dtype.
    dtype = own if isinstance(own, torch.dtype) else torch.bfloat16
    if torch.device(config.devices[0]).type == "cpu":
        dtype = torch.float32
    whole = ModelMemory(settings, dtype, config)
    memory = whole.with_host_layers(choose_host_layers(settings, dtype, config, _free_here, whole))
    ranges = choose_split(settings, dtype, config, _free_here, memory)
    layouts = build_layout(settings, ranges, kv_dtype_of(config.kv_format, dtype), dtype)
    context_tokens = int(language_config(settings).max_position_embeddings)
    check_asked_context(config.context_tokens, context_tokens)
    scheme = scheme_of(settings)
    weights = f"full precision ({str(dtype).removeprefix('torch.')})" if scheme is None else str(scheme)
    stages = memory.stages(ranges)
    return WeightlessModel(
        architecture_of(settings),
        context_tokens,
        layouts,
        settings,
        stages,
        weights,
        memory.host_layers,
        memory.host_bytes,
    )


def _free_here(device: str) -> int:
    return EMPTY_CARD_BYTES if is_card(device) and not torch.cuda.is_available() else free_bytes(device)


def _settings(model: str) -> Any:
    if model.startswith(PREFIX):
        return preset_config(model)
    path = Path(model).expanduser()
    if path.is_file():
        return config_of(read_metadata(path))
    if path.is_dir():
        return _settings_in(path)
    try:
        return _settings_in(Path(snapshot_download(model, allow_patterns=["config.json", INDEX_FILE])))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{model} is not a local path, and cannot be downloaded from the hub: {error}") from error


def _settings_in(folder: Path) -> Any:
    settings = checked_config(folder)
    find_head(folder, settings)
    return settings
