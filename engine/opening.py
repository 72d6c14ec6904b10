"""From a loaded model to an empty timeline over its stages."""

from __future__ import annotations

from typing import Any

from engine.architectures import check_config
from engine.arena import StageArena, WindowRoom
from engine.config import EngineConfig
from engine.layout import build_layout
from engine.session import Session
from engine.stages import place, split_layers


def open_session(model: Any, config: EngineConfig) -> Session:
    """Splits a loaded causal language model as `config` says, allocates the arenas and starts an empty timeline.

    The context is `config.context_tokens`, or the model's own limit. Raises UnsupportedModel, InvalidSplit and
    OutOfMemory.
    """
    check_config(model.config)
    ranges = split_layers(model.config, len(config.devices), config.layer_split)
    context_tokens = config.context_tokens or int(model.config.max_position_embeddings)
    layouts = build_layout(model.config, ranges, config.kv_dtype or model.dtype, model.dtype)
    stages = place(model, ranges, config.devices)
    room = WindowRoom(config.batch_tokens, config.window_slack_tokens)
    arenas = [
        StageArena(layout, context_tokens, stage.device, window_room=room)
        for layout, stage in zip(layouts, stages, strict=True)
    ]
    return Session(stages, arenas, config.batch_tokens, model.config, config.ctx_checkpoints)
