"""Builds the services that answer requests, from the settings and the engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parkd.cli.model import MemoryShare
from parkd.config import Config
from parkd.errors import ConfigError
from parkd.memory import free_memory_bytes, resident_bytes, return_freed_memory, total_memory_bytes

if TYPE_CHECKING:  # torch takes seconds to import: not for --help, nor for a mistyped flag
    from parkd.answers.base import OutputFormat
    from parkd.answers.structured import StructuredOutput
    from parkd.cli.model import AnyEngine
    from parkd.identity.background import BackgroundWork
    from parkd.identity.builder import IdentityBuilder
    from parkd.identity.normalise import RewriteRule
    from parkd.identity.output_memory import OutputMemory, Said
    from parkd.proxy.config import BuildMask, Services
    from parkd.store.files.fs import FileSystem
    from parkd.store.records import StoreConfig
    from parkd.store.store import ConversationStore
    from parkd.types import NamedKey, PromptIdentity, StillWanted, TokenMask, TurnRequest, Units

MIN_FREE_SHARE = 16
MOST_MIN_FREE_BYTES = 2560 * 1024 * 1024
"""Parking leaves one part in this many of the machine's memory free, but at most this many bytes."""
RESEND_GRACE_S = 2.0
"""How long a turn goes on after its client disconnected, unless others wait. Most clients send again within a
second."""
CONVERSATION_ID_BYTES = 8


def store_config_of(config: Config, memory: MemoryShare) -> StoreConfig:
    """The store's configuration, with the memory budget and the memory floor resolved to bytes."""
    from parkd.state import BLOCK_TOKENS
    from parkd.store.records import StoreConfig

    asked = config.cache.min_free_bytes
    floor = min(MOST_MIN_FREE_BYTES, total_memory_bytes() // MIN_FREE_SHARE) if asked is None else asked
    return StoreConfig(memory.budget_bytes, BLOCK_TOKENS, config.cache.slots, min_free_bytes=floor)


def answer_memory(config: Config, engine: AnyEngine, background: BackgroundWork) -> OutputMemory | None:
    """The memory of generated answers, with its file in the park directory if there is one; None if answers that come
    back are rendered. The file is written in the background."""
    from parkd.identity.answer_file import NAME, AnswerFile
    from parkd.identity.output_memory import OutputMemory

    if not config.cache.answer_bytes:
        return None
    end_texts = [engine.tokenizer.decode([token_id]) for token_id in sorted(engine.info.end_token_ids)]
    directory = config.cache.disk.directory
    if directory is None:
        return OutputMemory(config.cache.answer_bytes, end_texts)
    file = AnswerFile(directory / NAME, config.cache.answer_bytes)
    memory = OutputMemory(
        config.cache.answer_bytes,
        end_texts,
        on_new=lambda answer: _submit(background, file.append, answer, memory),
        on_forgotten=lambda: _submit(background, file.renew, memory),
    )
    file.open(memory)
    return memory


def _submit(background: BackgroundWork, work: Callable[..., None], *given: Any) -> None:
    background.submit(partial(work, *given))


def open_files(config: Config, say: Callable[[str], None] = lambda _note: None) -> FileSystem | None:
    """The file system for parked conversations; None if they are in memory only. Raises ConfigError.

    Also raises the limit of open files, which clients' connections need as well. `say` is told of a directory that was
    created.
    """
    from parkd.store.files.fs import allow_most_files
    from parkd.store.files.park_directory import open_directory, open_temporary

    allow_most_files()
    disk = config.cache.disk
    if not disk.budget_bytes:
        return None
    if disk.directory is None:
        return open_temporary()
    files = open_directory(disk.directory)
    if files.is_new:
        say(f"--park-dir {disk.directory} did not exist and was created")
    return files


def open_store(
    config: Config, engine: AnyEngine, store_config: StoreConfig, files: FileSystem | None
) -> ConversationStore:
    """The store over RAM, or over RAM and disk if there are `files`. Raises ConfigError."""
    from parkd.store.opening import DiskOptions, open_tiered
    from parkd.store.policy import policy_named
    from parkd.store.store import ConversationStore

    new_id = partial(secrets.token_hex, CONVERSATION_ID_BYTES)
    hooks, layout, disk = engine.host_memory_hooks(), engine.info.layout, config.cache.disk
    store_config = replace(store_config, block_tokens=layout.block_tokens)
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
            directory=disk.directory,
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
    engine: AnyEngine,
    store_config: StoreConfig,
    named_keys: tuple[NamedKey, ...] = (),
    files: FileSystem | None = None,
    rules: tuple[RewriteRule, ...] = (),
    *,
    background: BackgroundWork,
) -> Services:
    """All that the server needs. The caller closes `background`, after the server. Raises ConfigError."""
    from parkd.answers.formats import output_format
    from parkd.answers.structured import StructuredOutput
    from parkd.engine_adapter.llama_server.engine import LlamaServerEngine
    from parkd.engine_adapter.remote.engine import RemoteEngine
    from parkd.identity.builder import IdentityBuilder
    from parkd.identity.normalise import NormaliserConfig
    from parkd.proxy.access import namespaces_of
    from parkd.proxy.config import Services
    from parkd.proxy.page.budget import Machine

    server = config.server
    namespaces = len(namespaces_of(server.api_keys, named_keys, server.operator_keys))
    answers = answer_memory(config, engine, background)
    identity = IdentityBuilder(
        engine.tokenizer,
        engine.template,
        engine.info.fingerprint,
        engine.info.layout.block_tokens,
        config.cache.memo_bytes,
        normaliser=NormaliserConfig(not server.keeps_billing_header, rules),
        answers=answers,
        images=engine.images,
        context_tokens=engine.info.most_units,
        namespaces=namespaces,
        template_within=engine.template_within,
    )
    store = None
    if store_config.budget_bytes:
        store = open_store(config, engine, store_config, files)
        if engine.host_memory_hooks() is not None:  # Page-locked in a thread of its own, while requests are answered.
            store.grow_ahead()
    output = replace(output_format(engine.template_source), reader=engine.response_reader)
    if isinstance(engine, RemoteEngine):
        output = replace(output, parser=engine.parser)
    structured = None
    if not isinstance(engine, LlamaServerEngine | RemoteEngine):
        structured = StructuredOutput(
            engine.tokenizer_json(), engine.info.vocab_size, engine.info.end_token_ids, namespaces
        )
    build_mask = mask_builder(engine, output, structured, identity.renderer.profile.openers)
    return Services(
        engine=engine,
        build_identity=identity.build,
        store=store,
        files=files,
        spool_directory=config.cache.disk.directory,
        disk_bytes_per_s=None if store is None or files is None else _disk_speed(store, files),
        ram_bytes_per_s=None if store is None else engine.copy_bytes_per_s(),
        output=output,
        render=identity.render,
        remember=None if answers is None else partial(_remember, answers, identity, background),
        forget=None if answers is None else partial(_forget, answers),
        add_rule=identity.renderer.add_rule,
        chat_template=engine.template_source,
        remembered=partial(remembered_bytes, config, identity, answers, structured),
        build_mask=build_mask,
        prepare=None if structured is None else structured.prepare,
        return_memory=return_freed_memory,
        machine=lambda: Machine(resident_bytes(), free_memory_bytes(), total_memory_bytes()),
        config=replace(server, named_keys=named_keys, resend_grace_s=RESEND_GRACE_S),
    )


def remembered_bytes(
    config: Config, identity: IdentityBuilder, answers: OutputMemory | None, structured: StructuredOutput | None
) -> dict[str, tuple[int, int]]:
    """Bytes of what is remembered of prompts and answers, and the most they may be, by kind."""
    kinds = {"prompts": (identity.memo_bytes, config.cache.memo_bytes)}
    if identity.reads_images:
        kinds["images"] = (identity.images_bytes, identity.images_limit_bytes)
    if structured is not None:
        kinds["schemas"] = (structured.trials.memory_bytes, structured.trials.limit_bytes)
    if answers is not None:
        kinds["answers"] = (answers.memory_bytes, config.cache.answer_bytes)
    return kinds


def _disk_speed(store: ConversationStore, files: FileSystem) -> float | None:
    from parkd.store.files.disk_speed import read_bytes_per_s

    stats = store.disk_stats()
    return read_bytes_per_s(files, stats.budget_bytes - stats.bytes_in_use)


def _remember(
    answers: OutputMemory,
    identity: IdentityBuilder,
    background: BackgroundWork,
    prompt: PromptIdentity,
    ids: Sequence[int],
    said: Said,
) -> None:
    """Remembers an answer at once, so that it is known before the client sees its end. Its text is tokenised for the
    next prompt in the background."""
    answers.remember(prompt, ids, said)
    background.submit(partial(identity.expect, prompt, ids, said))


def _forget(answers: OutputMemory, units: Units, key_digest: bytes, namespace: str) -> int:
    """Forgets the answers that were given within a conversation. Returns their number."""
    from parkd.identity.output_memory import is_within

    return answers.forget(is_within(units, key_digest, namespace))


def mask_builder(
    engine: AnyEngine, output: OutputFormat, structured: StructuredOutput | None, openers: Mapping[str, str]
) -> BuildMask:
    """The function that builds the token mask of a request (schema, thinking budget, held ends). `openers` are the
    texts that open turns, by role.

    Another server, for which there is no `structured` output, enforces schemas itself, so there requests are only
    checked.
    """
    from parkd.answers.base import ToolFormat
    from parkd.answers.ends import opening_ids, with_ends_held
    from parkd.answers.thinking import ThinkingLimits

    marks, info = output.reasoning, engine.info
    if structured is None:

        def check(request: TurnRequest, tail: str, _still_wanted: StillWanted) -> None:
            engine.check(request, thinks=marks is not None and not tail.rstrip().endswith(marks.close))

        return check
    limits = ThinkingLimits(marks, engine.template_source, info.vocab_size, engine.tokenizer.encode, engine.text_stream)

    others = [opener for role, opener in openers.items() if role != "assistant"]
    if output.tools is ToolFormat.HARMONY:
        others = []  # the parts of one answer are opened as turns are
    ends = info.end_token_ids | opening_ids(others, engine.tokenizer.control_tokens, engine.tokenizer.encode)

    def mask(request: TurnRequest, tail: str, still_wanted: StillWanted) -> TokenMask | None:
        inner = limits.over(request, tail, structured.mask(request, output, tail, still_wanted))
        return with_ends_held(request, ends, info.vocab_size, inner)

    return mask
