"""Sizes of a model's state from its configuration, without its weights, for `parkd plan` and `parkd replay --model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parkd.cli import arguments
from parkd.cli.model import MemoryShare, choose_engine, find_model, on_devices, on_disk
from parkd.config import MIB, Config, ModelConfig, load
from parkd.errors import ConfigError

if TYPE_CHECKING:
    from parkd_engine.plan import WeightlessModel

    from parkd.replay.command import ModelSizes
    from parkd.state import StateLayout


def plan(config: Config) -> int:
    """Prints how much of the model's state the budget holds; reads only its configuration. Raises ConfigError,
    ModelError."""
    from parkd.cli import budget_table
    from parkd.cli.compose import store_config_of
    from parkd.cli.startup import host_line, memory_line
    from parkd.store.sizes import Sizes

    if config.model.remote is not None:
        raise ConfigError(
            "plan reads a model's own files, and --upstream names a server that keeps its state itself: it tells how "
            "much it holds"
        )
    if config.model.upstream is not None:
        raise ConfigError(
            "plan reads a model's own files, and --upstream names a llama-server. Plan for the GGUF file it serves: "
            "--engine llama.cpp --model FILE, whose states are those of its slot files."
        )
    model, is_demo = find_model(config.model)
    model = on_disk(model)
    engine, why = choose_engine(config.model, model, is_demo=is_demo)
    store_config = store_config_of(config, MemoryShare(config.cache.budget_bytes))
    if engine == "llama.cpp":
        name, layout, longest, notes = _llama_cpp(config.model, model, why)
    else:
        model, known = weightless(config.model)
        name = f"{Path(model).stem if Path(model).is_file() else model} ({known.architecture})"
        layout, longest = budget_table.layout_of(known.stages), known.context_tokens
        tokens, seats = config.model.layout.context_tokens or longest, config.model.layout.seats or 1
        size = sum(stage.lines(0).get("weights", 0) for stage in known.memory)
        notes = [f"weights   {known.weights}, {-(-size // MIB):,} MiB"]
        notes += [
            memory_line(each.device, each.first_layer, each.end_layer, each.lines(tokens, seats, seats * tokens))
            for each in known.memory
        ]
        if known.host_layers:
            notes.append(host_line(known.host_layers, known.host_bytes, store_config.budget_bytes))
        if config.model.layout.seats is None:
            notes.append("seats     as many as fit beside a whole context each, up to 4; the lines above count one")
        elif seats > 1:
            notes.append(f"seats     {seats}, with rows for a context each where they fit, else fewer")
    sizes = Sizes(layout, store_config)
    context_tokens = config.model.layout.context_tokens or longest
    print("\n".join([*budget_table.lines(name, sizes, context_tokens, store_config.min_free_bytes), *notes]))
    return 0


def _llama_cpp(config: ModelConfig, model: str, why: str) -> tuple[str, StateLayout, int, list[str]]:
    """Name, layout, longest context in tokens, and notes, from the header of a GGUF file. Raises ModelError."""
    from parkd.cli.budget_table import layout_of
    from parkd.engine_adapter.llama_cpp.state_size import state_size
    from parkd.state import StageLayout

    known = state_size(Path(model).expanduser(), *config.llama.cache_types)
    stage = StageLayout(0, known.layers, known.row_bytes, known.fixed_bytes, b"", head_bytes=known.head_bytes)
    notes = [f"engine    llama.cpp, since {why}; sizes from the file's header, the weights were not read"]
    if known.windows_not_counted:
        notes.append("windows   the file names a window that is not counted: the state may be smaller")
    if seats := max(0, (config.layout.seats or 1) - 1):
        notes.append(f"seats     {seats + 1}, each with the memory of a whole context")
    return f"{known.name} ({known.architecture})", layout_of((stage,)), known.context_tokens, notes


def sizes_of(words: Sequence[str]) -> ModelSizes:
    """Sizes of the model that these flags of `parkd plan` name. Raises ConfigError and ModelError."""
    from parkd_engine.reading_work import reading_work

    from parkd.replay.command import ModelSizes

    config = load(arguments.parse(["plan", *words]).flags).model
    _check_engine(config, "replay --model", "; with --bytes-per-token and --read-ms a replay needs no --model")
    _, known = weightless(config)
    work = reading_work(known.settings)
    rows, fixed = (tuple(getattr(s, name) for s in known.stages) for name in ("row_bytes", "fixed_bytes"))
    return ModelSizes(rows, fixed, work.flop, work.growth_flop)


def _check_engine(config: ModelConfig, what: str, else_do: str) -> None:
    """Raises ConfigError unless the model would run on the torch engine, whose cost of reading is known."""
    model, is_demo = find_model(config)
    engine, why = choose_engine(config, on_disk(model), is_demo=is_demo)
    if engine != "torch":
        raise ConfigError(
            f"{what} only knows the reading cost of the torch engine, and this would run on {engine}, since {why}. "
            f"parkd plan and the start-up lines show its bytes per token{else_do}. "
            f"Add --engine torch for the costs of that engine."
        )


def weightless(config: ModelConfig) -> tuple[str, WeightlessModel]:
    """The model's name, and what its configuration tells without its weights. Raises ConfigError and ModelError."""
    from parkd_engine.plan import plan_model

    model = on_disk(find_model(config)[0])
    return model, plan_model(model, on_devices(config.layout))
