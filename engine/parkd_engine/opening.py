"""Opens a session over a loaded model: stages, arenas and an empty timeline."""

from __future__ import annotations

from typing import Any

from parkd_engine.arenas.arena import StageArena, WindowRoom
from parkd_engine.arenas.layout import build_layout
from parkd_engine.config import EngineConfig
from parkd_engine.families.architectures import check_config
from parkd_engine.families.multimodal import language_config, longest_span
from parkd_engine.forward.stages import place
from parkd_engine.layer_split import split_layers
from parkd_engine.session import Session
from parkd_engine.vision.images import ImageProcessor
from parkd_engine.vision.tower import VisionTower


def open_session(
    model: Any, config: EngineConfig, images: ImageProcessor | None = None, *, draft_model: Any = None
) -> Session:
    """Splits a loaded causal language model as configured, allocates the arenas and starts an empty timeline.

    The context is `config.context_tokens`, or else the model's own limit. With `images`, the model, of a known family,
    reads images too. Raises UnsupportedModel, InvalidSplit and OutOfMemory.
    """
    check_config(model.config)
    ranges = split_layers(model.config, len(config.devices), config.layer_split)
    text = language_config(model.config)
    context_tokens = config.context_tokens or int(text.max_position_embeddings)
    layouts = build_layout(model.config, ranges, config.kv_dtype or model.dtype, model.dtype)
    stages = place(model, ranges, config.devices)
    room = window_room(model.config, config)
    arenas = [
        StageArena(layout, context_tokens, stage.device, window_room=room)
        for layout, stage in zip(layouts, stages, strict=True)
    ]
    tower = None if images is None else VisionTower(model, images, stages[0].device)
    return Session(
        stages,
        arenas,
        config.batch_tokens,
        text,
        config.ctx_checkpoints,
        tower,
        draft_model=draft_model,
        draft_tokens=config.guesses,
        peer_access=config.peer_access,
    )


def window_room(settings: Any, config: EngineConfig) -> WindowRoom:
    """Window room for chunks of the batch size, or of an image that must be read in one chunk. `settings` is the
    library's configuration of the whole model."""
    return WindowRoom(max(config.batch_tokens, longest_span(settings)), config.window_slack_tokens)
