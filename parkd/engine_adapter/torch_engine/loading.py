"""Loads the parts of a torch engine: weights on their devices, arenas, an empty session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from parkd_engine.arenas.arena import WindowRoom
from parkd_engine.arenas.layout import StageStateLayout
from parkd_engine.balance import choose_split
from parkd_engine.config import EngineConfig
from parkd_engine.draft.head import DraftHead
from parkd_engine.errors import EngineError
from parkd_engine.families.architectures import architecture_of
from parkd_engine.forward.stages import Stage
from parkd_engine.loading.fingerprint import fingerprint
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.memory import StageNeed, choose_context
from parkd_engine.opening import open_session
from parkd_engine.session import Session
from parkd_engine.vision.tower import VisionTower
from parkd_engine.words.steering import SteeringBank, VectorFile, load_vectors

from parkd.engine_adapter.base import EngineInfo
from parkd.errors import ModelError

Progress = Callable[[str, float], None]
"""Called with (current activity, fraction done from 0 to 1)."""


@dataclass(frozen=True)
class TorchEngineConfig:
    """What to load and how to lay it out."""

    model: str
    """A directory, hub id, GGUF file or `random:NAME`."""
    cache_dir: Path
    """Directory for converted weights and the digests of weight files."""
    name: str | None = None
    """The model's name; None: derived from its files."""
    chat_template_file: Path | None = None
    layout: EngineConfig = field(default_factory=EngineConfig)
    reserved_bytes: int = 0
    """Main memory reserved for parked conversations, which the arenas must not use."""
    is_demo_model: bool = False
    control_vectors: tuple[VectorFile, ...] = ()
    steered_layers: tuple[int, int] | None = None
    """First and last layer that control vectors may steer, both included; None: all but the first."""


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of a `TorchEngine`."""

    loaded: LoadedModel
    session: Session
    info: EngineInfo
    vectors: SteeringBank


def load_parts(config: TorchEngineConfig, progress: Progress | None, free: Callable[[str], int]) -> EngineParts:
    """Loads the model and allocates the arenas. `free` returns the free bytes of a device.

    Raises ModelError, whose message says what to do.
    """
    layout = config.layout
    try:
        loaded = load_model(
            LoadConfig(
                config.model,
                config.cache_dir,
                config.chat_template_file,
                layout.dtype,
                draft=layout.guesses > 0,
                device=layout.devices[0],
                devices=layout.devices,
                split=lambda settings, dtype: choose_split(settings, dtype, layout, free),
            ),
            progress,
        )
        text = loaded.text_config
        vectors = load_vectors(
            config.control_vectors, int(text.hidden_size), int(text.num_hidden_layers), config.steered_layers
        )
        session = _opened(config, loaded, free)
        session.use_kernels(progress)
    except EngineError as error:
        raise ModelError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"The weights do not fit the devices {','.join(layout.devices)}: {error} "
            f"Name more devices with --devices, or use a smaller model."
        ) from error
    return EngineParts(loaded, session, _info(config, loaded, session), vectors)


def _opened(config: TorchEngineConfig, loaded: LoadedModel, free: Callable[[str], int]) -> Session:
    """An empty session with the largest context that fits, or with the configured one."""
    layout = config.layout
    copies = layout.ctx_checkpoints + (layout.guesses if loaded.draft_model is not None else 0)

    def fitting(state: Sequence[StageStateLayout], room: WindowRoom) -> int:
        return choose_context(
            [_need(d, s, room, copies) for d, s in zip(layout.devices, state, strict=True)],
            int(loaded.text_config.max_position_embeddings),
            layout.context_tokens,
            reserved_bytes=config.reserved_bytes,
            free=free,
        )

    return open_session(
        loaded.model,
        layout,
        loaded.images,
        draft_model=loaded.draft_model,
        ranges=loaded.ranges,
        choose_context=fitting,
    )


def _info(config: TorchEngineConfig, loaded: LoadedModel, session: Session) -> EngineInfo:
    layout = config.layout
    kv_dtype = layout.kv_dtype or loaded.dtype
    return EngineInfo(
        model_name=config.name or loaded.name,
        architecture=architecture_of(loaded.config),
        fingerprint=fingerprint(loaded.weights_digest, loaded.config.to_dict(), loaded.dtype, kv_dtype),
        context_tokens=session.context_tokens,
        vocab_size=int(loaded.text_config.vocab_size),
        end_token_ids=loaded.end_token_ids,
        layout=session.layout,
        devices=layout.devices,
        weights_bytes=_weights_bytes(session.stages, session.vision, session.draft),
        arena_bytes=sum(arena.nbytes for arena in session.arenas),
        is_demo_model=config.is_demo_model,
        ctx_checkpoints=layout.ctx_checkpoints if session.fixed_state.exists else 0,
        # Cards compute while they copy; a CPU does one after the other.
        reads_while_restoring=all(torch.device(device).type == "cuda" for device in layout.devices),
    )


def _need(device: str, layout: StageStateLayout, room: WindowRoom, copies: int) -> StageNeed:
    """The memory that a stage needs on its device besides rows: live fixed state, and `copies` of it (checkpoints, and
    states to return to after wrong guesses)."""
    fixed_bytes = layout.fixed_bytes * (1 + copies) + layout.window_bytes(room.tokens)
    return StageNeed(device, layout.row_bytes + math.ceil(layout.index_bytes_a_token), fixed_bytes)


def _weights_bytes(stages: Sequence[Stage], tower: VisionTower | None, draft: DraftHead | None) -> int:
    """Bytes of all weights. Weights that stages on one device share count once."""
    modules = [module for stage in stages for module in (stage.inner, stage.head) if module is not None]
    modules += [] if tower is None else [tower.module]
    modules += [] if draft is None else [draft.model]
    tensors = [parameter for module in modules for parameter in module.parameters()]
    return sum({(str(t.device), t.data_ptr()): t.numel() * t.element_size() for t in tensors}.values())
