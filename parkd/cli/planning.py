"""What a model's configuration tells, without its weights: for `parkd plan`, and for `parkd replay --model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parkd import arguments
from parkd.cli.model import MemoryShare, choose_engine, find_model
from parkd.config import Config, ModelConfig, load
from parkd.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from engine.plan import WeightlessModel
    from parkd.replay.command import ModelSizes


def plan(config: Config) -> int:
    """Says what the budget will hold of the model; reads its configuration only. Raises ConfigError and ModelError."""
    from parkd import plan as planning
    from parkd.cli.compose import store_config_of
    from parkd.types import StageLayout

    _check_engine(config.model, "plan", "")
    model, known = weightless(config.model)
    stages = (StageLayout(s.first_layer, s.end_layer, s.row_bytes, s.fixed_bytes, s.digest) for s in known.stages)
    store_config = store_config_of(config, MemoryShare(config.cache.budget_bytes))
    sizes = planning.Sizes(planning.layout_of(tuple(stages)), store_config.budget_bytes, config.cache.slots)
    context_tokens = config.model.context_tokens or known.context_tokens
    name = f"{Path(model).stem if Path(model).is_file() else model} ({known.architecture})"
    print("\n".join(planning.lines(name, sizes, context_tokens, store_config.min_free_bytes)))
    return 0


def sizes_of(words: Sequence[str]) -> ModelSizes:
    """Of the model that these flags of `parkd plan` name. Raises ConfigError and ModelError."""
    from engine.reading_work import reading_work
    from parkd.replay.command import ModelSizes

    config = load(arguments.parse(["plan", *words]).flags).model
    _check_engine(config, "replay --model", "; with --bytes-per-token and --read-ms a replay needs no --model")
    _, known = weightless(config)
    work = reading_work(known.settings)
    rows, fixed = (tuple(getattr(s, name) for s in known.stages) for name in ("row_bytes", "fixed_bytes"))
    return ModelSizes(rows, fixed, work.flop, work.growth_flop)


def _check_engine(config: ModelConfig, what: str, else_do: str) -> None:
    """Raises ConfigError if the model would run on an engine whose sizes nobody knows before it has loaded it."""
    model, is_demo = find_model(config)
    engine, why = choose_engine(config, model, is_demo=is_demo)
    if engine != "torch":
        raise ConfigError(
            f"{what} knows the torch engine's sizes only, and this would run on {engine}, since {why}. What a token of "
            f"state takes there is told by the library once it has the model: parkd's start-up lines say it{else_do}. "
            f"--engine torch gives torch's."
        )


def weightless(config: ModelConfig) -> tuple[str, WeightlessModel]:
    """The model's name, and what is known of it. Raises ConfigError and ModelError."""
    from engine.config import EngineConfig
    from engine.errors import EngineError
    from engine.kv_format import KV_FORMATS
    from engine.plan import plan_model

    model, _ = find_model(config)
    kv_dtype = None if config.kv_format is None else KV_FORMATS[config.kv_format]
    layout = EngineConfig(
        config.devices or ("cpu",), config.layer_split or None, kv_dtype=kv_dtype, draft_tokens=config.draft_tokens
    )
    try:
        return model, plan_model(model, layout)
    except EngineError as error:
        raise ModelError(str(error)) from error
