"""The `parkd` command, and the composition root: only here do concrete classes meet.

    words -> Invocation -> Config -> listener, engine -> store, identity -> Services -> server

Exit codes: 0 stopped as asked, 1 failed while running, 2 a setting or the model cannot be used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from parkd.cli import arguments
from parkd.cli.compose import compose, open_files, store_config_of
from parkd.cli.interruptible import interruptible
from parkd.cli.library_notes import hide_bars_in_pipes
from parkd.cli.model import (
    MemoryShare,
    card_notes,
    choose_engine,
    find_model,
    load_engine,
    load_llama_cpp,
    load_remote,
    load_upstream,
    on_disk,
    unpacking_notes,
)
from parkd.cli.planning import plan, sizes_of
from parkd.config import Config, load
from parkd.config.keys import check_classes, read_key_file
from parkd.config.rewrite_rules import read_rules
from parkd.config.spinning import bound_spinning
from parkd.errors import ConfigError, ModelError, UnsupportedModel

if TYPE_CHECKING:  # torch takes seconds to import: not for --help, nor for a mistyped flag
    from parkd.cli.model import AnyEngine
    from parkd.identity.background import BackgroundWork
    from parkd.identity.normalise import RewriteRule
    from parkd.ledger.ledger import Ledger
    from parkd.proxy.config import Services
    from parkd.store.files.fs import FileSystem
    from parkd.types import NamedKey

__all__ = ["MemoryShare", "find_model", "load_engine", "main"]

EXIT_USAGE = 2
WAYS_OUT = (
    "Other ways to serve it: a GGUF file of it on llama.cpp (--model FILE.gguf, docs/LLAMA_CPP.md), or a llama-server "
    "that runs it (--upstream URL, docs/LLAMA_SERVER.md)."
)
"""What a refusal of a model ends with."""
EXIT_INTERRUPTED = 130
"""Ctrl-C before the server runs, as shells report it. Once it runs, Ctrl-C is an orderly stop."""


def entry() -> NoReturn:
    """The process: runs `main` and ends with its exit code.

    A thread that is still inside a library (the engine's last chunk, a copy that never returns) does not survive the
    interpreter's own shutdown: it would be unwound through native frames, which aborts the process. By then everything
    is written and closed, so the process ends without it.
    """
    try:
        # Until the server runs, which has handlers of its own.
        _handle("SIGTERM", _terminate)
        _handle("SIGHUP", _terminate)  # its terminal is gone
        _handle("SIGINT", signal.default_int_handler)
        code = main()
    except _Terminated:
        code = 0  # stopped as asked
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if threading.active_count() > 1:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a pipe whose reader has gone, a closed stream
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _handle(name: str, handler: Callable[..., object]) -> None:
    """Handles a signal, where there is one of this name and it is not ignored, as by nohup."""
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP before the server runs."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        words = sys.argv[1:] if words is None else list(words)
        if words[:1] == ["forget"] and any(word.partition("=")[0] == "--park-dir" for word in words):
            from parkd.cli import forget

            return forget.run(words[1:])
        if words and words[0] in arguments.REMOTE_COMMANDS:
            from parkd.cli.remote import command as remote

            return remote.run(words[0], words[1:])
        if words[:1] in (["export"], ["import"]):
            from parkd.cli import portable

            return portable.run(words[0], words[1:])
        if words[:1] == ["completion"]:
            from parkd.cli import completion

            return completion.run(words[1:])
        if words[:1] == ["replay"]:
            from parkd.replay import command

            return command.run(words[1:], sizes_of=sizes_of)
        if words[:1] == ["tier"]:
            from parkd.cli import tier

            return tier.run(words[1:])
        if words[:1] == ["canary"]:
            from parkd.cli import canary

            return interruptible(partial(canary.run, words[1:], open_engine))
        invocation = arguments.parse(words)
        if invocation.command == "demo":
            from parkd.demo import command as demo

            return demo.run(invocation.flags)
        config = load(invocation.flags)
        return interruptible(partial(plan, config)) if invocation.command == "plan" else serve(config)
    except (ConfigError, ModelError) as error:
        ways = f". {WAYS_OUT}" if isinstance(error, UnsupportedModel) else ""
        print(f"parkd: {error.message.rstrip('.') if ways else error.message}{ways}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def serve(config: Config) -> int:
    """Loads the model and serves until told to stop. Returns the exit code. Raises ConfigError and ModelError before
    it serves."""
    from parkd.proxy import listener

    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("parkd").setLevel(logging.INFO)
    for note in config.notes:
        print(f"note: {note}", file=sys.stderr)
    key_file = config.server.api_key_file
    named_keys = () if key_file is None else read_key_file(key_file)
    check_classes(config.server.classes, named_keys)
    rules_file = config.server.rewrite_rules_file
    rules = () if rules_file is None else read_rules(rules_file)
    bound_spinning()
    model = ("", False) if config.model.is_elsewhere else find_model(config.model)
    with listener.bind(config.server.host, config.server.port) as bound, contextlib.ExitStack() as undo:
        started = interruptible(partial(_start, config, *model, named_keys, rules, listener.url_of(bound), undo))
        from parkd.proxy import server

        undo.pop_all()  # from here on, the services close their files
        services, told = replace(started.services, ledger=open_ledger(config)), "\n".join(started.lines)
        with contextlib.ExitStack() as ends:
            ends.callback(started.background.close)
            if services.ledger is not None:
                ends.callback(services.ledger.close)
            services = ends.enter_context(recording(config, started.engine, services))
            return server.serve(services, listener=bound, on_started=lambda _url: print(told, flush=True))


@dataclass(frozen=True, eq=False)
class Started:
    """What serves."""

    engine: AnyEngine
    services: Services
    background: BackgroundWork
    lines: Sequence[str]
    """What the user is told."""


def _start(
    config: Config,
    model: str,
    is_demo: bool,
    named_keys: tuple[NamedKey, ...],
    rules: tuple[RewriteRule, ...],
    url: str,
    undo: contextlib.ExitStack,
) -> Started:
    """Loads the model, tries it, and opens what is parked. Raises ConfigError and ModelError."""
    from parkd.cli import canary, startup
    from parkd.identity.background import BackgroundWork

    memory, background = MemoryShare(config.cache.budget_bytes), BackgroundWork()
    files = open_files(config, lambda note: print(f"note: {note}", file=sys.stderr))
    if files is not None:
        undo.callback(files.close)
    engine = open_engine(config, model, memory, files, is_demo=is_demo)
    store_config = store_config_of(config, memory)
    parks = store_config.budget_bytes > 0
    given = (engine, config.home, startup.ProgressPrinter(sys.stderr), engine.host_memory_hooks())
    failures = canary.at_start(*given) if parks else ()
    if failures:
        store_config = replace(store_config, budget_bytes=0)
    services = compose(config, engine, store_config, named_keys, files, rules, background=background)
    budget = startup.budget_in_tokens(store_config, engine.info)
    keys = (*config.server.api_keys, *config.server.operator_keys, *named_keys)
    assert services.render is not None
    warning = startup.template_warning(services.render, calls_tools=services.output.calls_tools)
    lines = startup.describe(engine.info, budget, url, needs_key=bool(keys), warning=warning, failures=failures)
    if services.store is not None and services.store.has_disk:
        directory = config.cache.disk.directory
        free_bytes = None if directory is None else shutil.disk_usage(directory).free
        lines.insert(-2, startup.disk_line(services.store.disk_stats(), directory, free_bytes))
    return Started(engine, services, background, lines)


def open_engine(
    config: Config, model: str, memory: MemoryShare, files: FileSystem | None, *, is_demo: bool
) -> AnyEngine:
    """Chooses the engine and loads the model, and prints which engine it is and what the user should know about it.

    `files` remember the layer split that fitted last. Raises ConfigError and ModelError.
    """
    from parkd.cli import split_memory, startup

    progress = startup.ProgressPrinter(sys.stderr)
    hide_bars_in_pipes(sys.stderr)
    model = on_disk(model)
    name, why = choose_engine(config.model, model, is_demo=is_demo)
    print(f"engine    {name}, since {why}", flush=True)
    engine: AnyEngine
    notes: Sequence[str] = ()
    if name == "llama-server":
        engine = load_upstream(config, progress)
        notes = engine.notes
    elif name == "remote":
        engine = load_remote(config, progress)
        notes = engine.notes
    elif name == "llama.cpp":
        from parkd.engine_adapter.llama_cpp.cards import has_nvidia_card

        engine = load_llama_cpp(config, model, progress, is_demo=is_demo)
        notes = (*engine.notes, *card_notes(config.model.llama.gpu_layers, engine.build_has_cards, has_nvidia_card()))
    else:
        notes = () if is_demo else unpacking_notes(model, config.home)
        load = partial(load_engine, model=model, memory=memory, progress=progress, is_demo=is_demo)
        engine = split_memory.load(config, model, files, load)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return engine


def open_ledger(config: Config) -> Ledger | None:
    """The file of what turns cost, unless it is off. One that cannot be used is left out, which the log says."""
    from parkd.ledger.ledger import Ledger

    return None if config.cache.ledger is None else Ledger(config.cache.ledger)


@contextlib.contextmanager
def recording(config: Config, engine: AnyEngine, services: Services) -> Iterator[Services]:
    """The services, writing a trace of their turns if `--record` asks for one. Raises ConfigError."""
    from parkd.replay.recorder import Recorder
    from parkd.replay.trace import TraceHeader

    if config.cache.record is None:
        yield services
        return
    stages = engine.info.layout.stages
    sizes = tuple(stage.row_bytes for stage in stages), tuple(stage.fixed_bytes for stage in stages)
    recorder = Recorder(config.cache.record, TraceHeader(engine.info.layout.block_tokens, *sizes), services.monotonic())
    try:
        yield replace(services, trace=recorder.note)
    finally:
        recorder.close()
