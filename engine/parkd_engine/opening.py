"""Opens a session over a loaded model: stages, arenas and an empty timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parkd_engine.account import window_room
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.layout import build_layout
from parkd_engine.config import EngineConfig
from parkd_engine.draft.head import bare_head
from parkd_engine.families.architectures import check_config
from parkd_engine.families.multimodal import language_config
from parkd_engine.forward.stages import place
from parkd_engine.layer_split import split_layers
from parkd_engine.session import Session
from parkd_engine.vision.images import ImageProcessor
from parkd_engine.vision.tower import VisionTower

ChooseContext = Callable[[], int]
"""Returns the context in tokens. Called when all weights are in place."""


def open_session(
    model: Any,
    config: EngineConfig,
    images: ImageProcessor | None = None,
    *,
    draft_model: Any = None,
    ranges: Sequence[tuple[int, int]] | None = None,
    choose_context: ChooseContext | None = None,
) -> Session:
    """Splits a loaded causal language model, puts each stage on its device, allocates the arenas and starts an empty
    timeline. Servers and tests open sessions in this way alone.

    Stage `i` holds the layers `[first, end)` of `ranges[i]`; None splits as configured. The context is what
    `choose_context` returns, or else `config.context_tokens`, or else the model's own limit. With `images`, the model,
    of a known family, reads images too. Raises UnsupportedModel, InvalidSplit, OutOfMemory, and what `choose_context`
    raises.
    """
    check_config(model.config)
    ranges = ranges or split_layers(model.config, len(config.devices), config.layer_split)
    text = language_config(model.config)
    layouts = build_layout(model.config, ranges, config.kv_dtype or model.dtype, model.dtype)
    stages = place(model, ranges, config.devices)
    tower = None if images is None else VisionTower(model, images, stages[0].device)
    draft = None if draft_model is None else bare_head(draft_model, stages[-1].device)
    room = window_room(model.config, config)
    if choose_context is None:
        context_tokens = config.context_tokens or int(text.max_position_embeddings)
    else:
        context_tokens = choose_context()
    arenas = [
        StageArena(layout, context_tokens, stage.device, window_room=room)
        for layout, stage in zip(layouts, stages, strict=True)
    ]
    return Session(
        stages,
        arenas,
        config.batch_tokens,
        text,
        config.ctx_checkpoints,
        tower,
        draft_model=draft,
        draft_tokens=config.guesses,
        peer_access=config.peer_access,
    )
