"""The canary at the first start with a model, and `parkd canary`, which runs it at will."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from parkd.cli import arguments
from parkd.cli.model import MemoryShare, find_model
from parkd.config import Config, load
from parkd.config.spinning import bound_spinning
from parkd.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds to import: not for --help, nor for a mistyped flag
    from parkd.canary.exercise import Verdict
    from parkd.cli.model import AnyEngine
    from parkd.engine_adapter.base import Engine
    from parkd.store.slabs import SlabHooks

EXIT_FAILED = 1
AS_JSON = "--json"
WHAT = "Trying whether state comes back"


class OpenEngine(Protocol):
    def __call__(self, config: Config, model: str, memory: MemoryShare, files: None, *, is_demo: bool) -> AnyEngine: ...


def run(words: Sequence[str], open_engine: OpenEngine) -> int:
    """`parkd canary`. Returns the exit code. Raises ConfigError and ModelError."""
    as_json = AS_JSON in words
    config = load(arguments.parse(["canary", *(word for word in words if word != AS_JSON)]).flags)
    bound_spinning()
    if config.model.remote is not None:
        raise ConfigError(
            "canary parks and restores state, and a server at --upstream keeps its own: nothing is parked"
        )
    model, is_demo = ("", False) if config.model.is_elsewhere else find_model(config.model)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        engine = open_engine(config, model, MemoryShare(config.cache.budget_bytes), None, is_demo=is_demo)
    try:
        return report(engine, config.home, engine.host_memory_hooks(), as_json=as_json)
    finally:
        engine.close()


def report(engine: Engine, cache_dir: Path, slab_hooks: SlabHooks | None = None, *, as_json: bool) -> int:
    """Tries the engine and prints what was found; remembers that it passed. Returns the exit code."""
    from parkd.canary.exercise import examine, sentences
    from parkd.canary.remembered import PassedCanaries, canary_key

    verdict = examine(engine, slab_hooks=slab_hooks)
    if not verdict.has_failed and not verdict.skipped:
        PassedCanaries(cache_dir).note(canary_key(engine.info), engine.info, verdict)
    if as_json:
        print(json.dumps(_told(engine, verdict)))
    else:
        print("\n".join(f"canary    {line}" for line in sentences(verdict)))
    return EXIT_FAILED if verdict.has_failed else 0


def at_start(
    engine: Engine,
    cache_dir: Path,
    progress: Callable[[str, float], None],
    slab_hooks: SlabHooks | None = None,
) -> tuple[str, ...]:
    """What differed, line by line; nothing if all came back, now or at an earlier start with the same model, settings,
    devices and build."""
    from parkd.canary.exercise import examine, sentences
    from parkd.canary.remembered import PassedCanaries, canary_key

    passed, key = PassedCanaries(cache_dir), canary_key(engine.info)
    if passed.has(key):
        return ()
    progress(WHAT, 0.0)
    verdict = examine(engine, slab_hooks=slab_hooks)
    progress(WHAT, 1.0)
    if verdict.has_failed:
        return tuple(sentences(verdict))
    for line in sentences(verdict):
        print(f"canary    {line}", flush=True)
    if not verdict.skipped:
        passed.note(key, engine.info, verdict)
    return ()


def _told(engine: Engine, verdict: Verdict) -> dict[str, object]:
    return {
        "model": engine.info.model_name,
        "devices": list(engine.info.devices),
        "passed": not verdict.has_failed and not verdict.skipped,
        "skipped": verdict.skipped or None,
        "tokens": verdict.tokens,
        "steps": verdict.steps,
        "seconds": round(verdict.took_s, 3),
        "differences": [{"step": each.step, "parts": list(each.parts)} for each in verdict.differences],
    }
