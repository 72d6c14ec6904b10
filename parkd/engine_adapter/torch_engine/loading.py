"""Loads the parts of a torch engine: weights on their devices, arenas, an empty session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parkd_engine
import torch
import transformers
from parkd_engine.account import ARENA_PARTS, WEIGHT_PARTS, ModelMemory, StageMemory, choose_context, choose_seats
from parkd_engine.arenas.kv_format import KV_FORMATS, kv_dtype_of
from parkd_engine.balance import choose_host_layers, choose_split
from parkd_engine.families.architectures import architecture_of
from parkd_engine.loading.fingerprint import fingerprint, kernels_of
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.memory import is_card, usable_bytes
from parkd_engine.opening import open_seats
from parkd_engine.session import Session

from parkd.config import ModelConfig
from parkd.engine_adapter.base import EngineInfo, HostExpertsInfo
from parkd.engine_adapter.base.build import sources_of
from parkd.errors import ModelError
from parkd.state import EngineConfig
from parkd.words.steering import SteeringBank, load_vectors

Progress = Callable[[str, float], None]
"""Called with (current activity, fraction done from 0 to 1)."""


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of a `TorchEngine`."""

    loaded: LoadedModel
    sessions: Sequence[Session]
    """One for each seat."""
    info: EngineInfo
    vectors: SteeringBank

    @property
    def session(self) -> Session:
        """That of the first seat."""
        return self.sessions[0]


def load_parts(
    config: ModelConfig,
    progress: Progress | None,
    free: Callable[[str], int],
    reserved: Callable[[], int] = lambda: 0,
) -> EngineParts:
    """Loads the model and allocates the arenas as `config.layout` says. `free` returns the free bytes of a device;
    `reserved`, asked after it, the bytes of main memory that parked conversations may take.

    Raises ModelError, whose message says what to do.
    """
    assert config.model is not None
    layout = config.layout
    known: list[ModelMemory] = []

    def split(settings: Any, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
        left = lambda device: free(device) - (reserved() if device == "cpu" else 0)  # noqa: E731
        whole = ModelMemory(settings, dtype, layout)
        known.append(whole.with_host_layers(choose_host_layers(settings, dtype, layout, left, whole)))
        _check_main_memory(known[0], free, reserved)
        return choose_split(settings, dtype, layout, left, known[0])

    try:
        loaded = load_model(
            LoadConfig(
                config.model,
                config.cache_dir,
                config.chat_template_file,
                None if layout.dtype is None else KV_FORMATS[layout.dtype],
                draft=layout.guesses > 0,
                devices=layout.devices,
                weights=layout.weights,
                split=split,
                host_layers=lambda: known[0].host_layers,
            ),
            progress,
        )
        text = loaded.text_config
        vectors = load_vectors(
            config.control_vectors, int(text.hidden_size), int(text.num_hidden_layers), config.steered_layers
        )
        memory = known[0].stages(loaded.ranges)
        sessions = _opened(layout, loaded, memory, known[0].host_layers, free, reserved)
        for session in sessions:
            session.use_kernels(progress)
        if any(is_card(device) for device in layout.devices):
            torch.cuda.empty_cache()  # What tuning took and no prompt takes.
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"The weights do not fit the devices {','.join(layout.devices)}: {error} "
            f"Name more devices with --devices, or use a smaller model."
        ) from error
    return EngineParts(loaded, sessions, _info(config, loaded, sessions, memory, known[0]), vectors)


def _check_main_memory(memory: ModelMemory, free: Callable[[str], int], reserved: Callable[[], int]) -> None:
    """Raises ModelError if the experts that stay in main memory leave too little of it for parked conversations."""
    if not memory.host_bytes:
        return
    there = free("cpu")
    room = usable_bytes(there, "cpu") - reserved()
    if memory.host_bytes > room:
        raise ModelError(
            f"The experts of {len(memory.host_layers)} layers are to stay in main memory and take "
            f"{memory.host_bytes >> 20:,} MiB, where {there >> 20:,} MiB are free and parked conversations are to have "
            f"{reserved() >> 20:,} MiB. Choose a smaller --conversation-cache-mib or a smaller --cpu-experts."
        )


def _opened(
    layout: EngineConfig,
    loaded: LoadedModel,
    memory: Sequence[StageMemory],
    host_layers: Collection[int],
    free: Callable[[str], int],
    reserved: Callable[[], int],
) -> Sequence[Session]:
    """An empty session for each seat, with the largest context that fits, or with the configured one."""
    stages = [stage.beside_weights() for stage in memory]

    def fitting() -> int:
        longest = int(loaded.text_config.max_position_embeddings)
        seats = layout.seats or 1
        if host_layers:
            free("cpu")  # Measured again, since the share of parked conversations is one of what experts leave.
        return choose_context(stages, longest, layout.context_tokens, seats=seats, reserved=reserved, free=free)

    return open_seats(
        loaded.model,
        layout,
        loaded.images,
        draft_model=loaded.draft_model,
        ranges=loaded.ranges,
        host_layers=host_layers,
        choose_context=fitting,
        choose_seats=lambda context: choose_seats(stages, context, layout.seats, reserved=reserved, free=free),
    )


def _info(
    config: ModelConfig,
    loaded: LoadedModel,
    sessions: Sequence[Session],
    memory: Sequence[StageMemory],
    account: ModelMemory,
) -> EngineInfo:
    layout, session = config.layout, sessions[0]
    kv_dtype = kv_dtype_of(layout.kv_format, loaded.dtype)
    kernels = kernels_of(session.stages, loaded.text_config)
    rows = session.arenas[0].row_tokens
    accounts = tuple(stage.lines(session.context_tokens, len(sessions), rows) for stage in memory)
    return EngineInfo(
        model_name=config.name or loaded.name,
        architecture=architecture_of(loaded.config),
        fingerprint=fingerprint(loaded.weights_digest, loaded.config.to_dict(), loaded.dtype, kv_dtype, kernels),
        context_tokens=session.context_tokens,
        vocab_size=int(loaded.text_config.vocab_size),
        end_token_ids=loaded.end_token_ids,
        layout=session.layout,
        devices=layout.devices,
        weights_bytes=_sum(accounts, WEIGHT_PARTS),
        arena_bytes=_sum(accounts, ARENA_PARTS),
        is_demo_model=config.is_demo_model,
        ctx_checkpoints=layout.ctx_checkpoints if session.fixed_state.exists else 0,
        # Cards compute while they copy; a CPU does one after the other.
        can_pause=True,
        reads_while_restoring=all(torch.device(device).type == "cuda" for device in layout.devices),
        model_tokens=int(loaded.text_config.max_position_embeddings),
        memory=accounts,
        host_experts=_host_experts(account, session),
        live_conversations=len(sessions),
        row_tokens=rows,
        build=_build(layout, session, len(sessions)),
    )


def _host_experts(account: ModelMemory, session: Session) -> HostExpertsInfo | None:
    if not account.host_layers:
        return None
    ways = [stage.host_experts[0].way for stage in session.stages if stage.host_experts]
    return HostExpertsInfo(account.host_layers, account.host_bytes, ways[0].fetched_from_tokens, ways[0].seconds or {})


def _build(layout: EngineConfig, session: Session, seats: int) -> str:
    cards = [torch.cuda.get_device_name(device) for device in layout.devices if is_card(device)]
    sizes: tuple[int, ...] = (session.batch_tokens, session.draft_tokens, layout.ctx_checkpoints)
    sizes += (layout.window_slack_tokens, seats, *(len(stage.host_experts) for stage in session.stages))
    sources = sources_of(Path(parkd_engine.__file__).parent)
    return f"torch {torch.__version__} transformers {transformers.__version__} {sources} {cards} {sizes}"


def _sum(accounts: Sequence[Mapping[str, int]], names: Sequence[str]) -> int:
    return sum(lines.get(name, 0) for lines in accounts for name in names)
