"""Opens the seats of a loaded model: stages, arenas and an empty timeline for each seat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from parkd.state import EngineConfig
from parkd_engine.account import window_room
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.kv_format import kv_dtype_of
from parkd_engine.arenas.layout import build_layout
from parkd_engine.arenas.row_space import ROW_GRAIN, RowSpace, footprint
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
ChooseSeats = Callable[[int], tuple[int, int]]
"""Takes the context in tokens. Returns the number of seats, and the rows that they have together."""


def open_session(
    model: Any,
    config: EngineConfig,
    images: ImageProcessor | None = None,
    *,
    draft_model: Any = None,
    ranges: Sequence[tuple[int, int]] | None = None,
    host_layers: Collection[int] = (),
    choose_context: ChooseContext | None = None,
) -> Session:
    """Splits a loaded causal language model, puts each stage on its device, allocates the arenas and starts an empty
    timeline: that of the first seat, if `config` asks for several. Raises what `open_seats` raises."""
    arguments: dict[str, Any] = {"draft_model": draft_model, "ranges": ranges, "choose_context": choose_context}
    return open_seats(model, config, images, host_layers=host_layers, **arguments)[0]


def open_seats(
    model: Any,
    config: EngineConfig,
    images: ImageProcessor | None = None,
    *,
    draft_model: Any = None,
    ranges: Sequence[tuple[int, int]] | None = None,
    host_layers: Collection[int] = (),
    choose_context: ChooseContext | None = None,
    choose_seats: ChooseSeats | None = None,
    row_grain: int = ROW_GRAIN,
) -> tuple[Session, ...]:
    """The same for each seat. They share stages and the memory of rows. Servers and tests open sessions in this way
    alone.

    Stage `i` holds the layers `[first, end)` of `ranges[i]`; None splits as configured. The routed experts of
    `host_layers` stay in main memory. The context is what
    `choose_context` returns, or else `config.context_tokens`, or else the model's own limit. Seats, and the rows that
    they have together, are what `choose_seats` returns, or else `config.seats` and a whole context for each. Several
    seats' ranges of rows begin at multiples of `row_grain`. With `images`, the model, of a known family, reads images
    too. Raises UnsupportedModel, InvalidSplit, OutOfMemory, and what `choose_context` raises.
    """
    check_config(model.config)
    ranges = ranges or split_layers(model.config, len(config.devices), config.layer_split)
    text = language_config(model.config)
    layouts = build_layout(model.config, ranges, kv_dtype_of(config.kv_format, model.dtype), model.dtype)
    stages = place(model, ranges, config.devices, host_layers)
    tower = None if images is None else VisionTower(model, images, stages[0].device)
    draft = None if draft_model is None else bare_head(draft_model, stages[-1].device)
    room = window_room(model.config, config)
    if choose_context is None:
        context_tokens = config.context_tokens or int(text.max_position_embeddings)
    else:
        context_tokens = choose_context()
    seats, rows = config.seats or 1, (config.seats or 1) * context_tokens
    if choose_seats is not None:
        seats, rows = choose_seats(context_tokens)
    row_tokens = None if seats == 1 else footprint(rows, row_grain)
    space = None if row_tokens is None else RowSpace(row_tokens, context_tokens, row_grain)
    sessions: list[Session] = []
    for _ in range(seats):
        first = sessions[0] if sessions else None
        arenas = [
            StageArena(
                layout,
                context_tokens,
                stage.device,
                window_room=room,
                row_tokens=row_tokens,
                beside=None if first is None else first.arenas[index],
            )
            for index, (layout, stage) in enumerate(zip(layouts, stages, strict=True))
        ]
        sessions.append(
            Session(
                stages,
                arenas,
                config.chunk_tokens,
                text,
                config.ctx_checkpoints,
                tower,
                draft_model=draft,
                draft_tokens=config.guesses,
                peer_access=config.peer_access,
                space=space,
                beside=first,
            )
        )
    return tuple(sessions)
