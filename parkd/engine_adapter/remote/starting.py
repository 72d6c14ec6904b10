"""Connects to a running server and finds out what it is, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from parkd.config import RemoteConfig
from parkd.engine_adapter.base import EngineInfo
from parkd.engine_adapter.http.client import UpstreamRefused
from parkd.engine_adapter.remote.client import RemoteClient, meaning_of
from parkd.engine_adapter.remote.engine import RemoteEngine
from parkd.engine_adapter.remote.finding import Found, ask, found_in
from parkd.engine_adapter.remote.flavours import HOSTED, LLAMA_SERVER
from parkd.engine_adapter.remote.held import HeldBlocks
from parkd.engine_adapter.remote.listening import KvListener
from parkd.engine_adapter.remote.talk import TalkTemplate
from parkd.engine_adapter.remote.words import CharacterWords, Words
from parkd.errors import ModelError, ParkdError, UpstreamDown, UpstreamFailed
from parkd.state import Grain, StageLayout, StateLayout
from parkd.types import Unit

START_WAIT_S = 600.0
"""Longest wait for a server that is still loading its model."""
START_POLL_S = 1.0
NO_TOKENIZER = "none"
"""In place of a tokenizer's name."""
FINGERPRINT_BYTES = 16
CHECKSUM = "xxh3-64"
LAYOUT_DIGEST = b"no state is here"
"""Of a layout that nothing has."""
UNIT_BYTES = 8

Progress = Callable[[str, float], None]
MakeWords = Callable[[Found], Words | None]
TRIAL_TEXT = "The 3 quick brown f\u00f6xes:\n\tjump over 12345 lazy dogs, don't they?  \U0001f98a\n"
TRIAL_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
)
"""What both tokenizers and templates are tried with."""


def connect(
    config: RemoteConfig,
    make_words: MakeWords | None = None,
    progress: Progress | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> RemoteEngine:
    """Waits until the server answers, and asks what it is. `make_words` makes the language of ids, if a tokenizer is at
    hand. Raises ModelError, whose message says what to do."""
    client = RemoteClient(
        config.url, turns=config.turns, api_key=config.api_key, deadlines=config.deadlines, monotonic=monotonic
    )
    try:
        found = _found(client, config, progress, sleep, monotonic)
        words = None if make_words is None or not found.flavour.takes_ids else make_words(found)
        doubt = None if words is None else doubt_of(client, found, words)
        if doubt is not None and config.tokenizer is not None:
            raise ModelError(doubt)
        if words is None and config.tokenizer not in (None, NO_TOKENIZER):
            raise ModelError(
                f"--tokenizer: this server ({found.flavour.name}) takes no prompts as token ids, or returns none. "
                f"Leave it out: prompts are told apart by characters then."
            )
        if words is None or doubt is not None:
            words = character_words(found)
        info = info_of(found, words, config.context_tokens)
        held, listener = _listened(config, found, words, monotonic)
        return RemoteEngine(
            client,
            found,
            words,
            info,
            seats=config.turns,
            notes=notes_of(found, words, doubt),
            held=held,
            listener=listener,
            monotonic=monotonic,
        )
    except UpstreamFailed as error:
        client.close()
        told = meaning_of(error, 0, 0) if isinstance(error, UpstreamRefused) else error
        raise ModelError(told.message) from error
    except BaseException:
        client.close()
        raise


def _listened(
    config: RemoteConfig, found: Found, words: Words, monotonic: Callable[[], float]
) -> tuple[HeldBlocks | None, KvListener | None]:
    """What the server tells that it holds, and who listens to it from now on. Raises ModelError, ConfigError."""
    if config.events is None:
        return None, None
    if not found.flavour.events:
        raise ModelError(f"--upstream-events: a {found.flavour.name} server publishes no KV events. Leave it out.")
    if words.unit is not Unit.TOKEN:
        raise ModelError(
            "--upstream-events tells of tokens, and prompts are told apart by characters here: name the tokenizer of "
            "the server's model with --tokenizer, or leave --upstream-events out."
        )
    held = HeldBlocks(monotonic)
    listener = KvListener(held, config.events, config.events_replay)
    listener.start()
    return held, listener


def doubt_of(client: RemoteClient, found: Found, words: Words) -> str | None:
    """What shows that these are not the server's own words; None if it cannot be shown, or not be asked."""
    text = client.tokenised({"model": found.model, "prompt": TRIAL_TEXT, "add_special_tokens": False})
    if text is not None and text != words.tokenizer.encode(TRIAL_TEXT):
        return "--tokenizer is not that of the server's model: it gives other tokens for the same text. Name its own."
    chat = {"model": found.model, "messages": list(TRIAL_CHAT), "add_generation_prompt": True}
    asked = client.tokenised({**chat, "add_special_tokens": False})
    if asked is None:
        return None
    try:
        rendered = words.tokenizer.encode(words.template.render(TRIAL_CHAT, (), {}).text)
    except ParkdError as error:
        return f"--tokenizer: {error.message}"
    if asked != rendered:
        return (
            "--tokenizer has another chat template than the server: give parkd the same one with --chat-template-file, "
            "or leave --tokenizer out."
        )
    return None


def character_words(found: Found) -> CharacterWords:
    return CharacterWords(found.flavour, TalkTemplate(sends_thoughts=bool(found.flavour.thought_field)))


def info_of(found: Found, words: Words, context_tokens: int | None) -> EngineInfo:
    """`context_tokens` is what the operator says; None: as the server says."""
    hasher = blake2b(digest_size=FINGERPRINT_BYTES, person=b"parkd-remote")
    for part in (found.flavour.name, found.version, found.model, found.root, words.unit):
        hasher.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    context = context_tokens or found.context_tokens
    if words.unit is Unit.TOKEN and not context:
        raise ModelError("The server does not say how long its context is: say it with --ctx-size.")
    return EngineInfo(
        model_name=found.model,
        architecture=found.flavour.name,
        fingerprint=hasher.digest(),
        context_tokens=context,
        vocab_size=words.vocab_size,
        end_token_ids=words.end_token_ids,
        layout=StateLayout((StageLayout(0, 1, UNIT_BYTES, 0, LAYOUT_DIGEST),), CHECKSUM, Grain.FILE),
        devices=("upstream",),
        weights_bytes=0,
        arena_bytes=0,
        enforces_schemas=True,
        holds_state=False,
        unit=words.unit,
        model_tokens=found.context_tokens,
    )


def notes_of(found: Found, words: Words, doubt: str | None = None) -> list[str]:
    """What the operator should know. `doubt`: why the words of the server's own directory are not used."""
    kind = found.flavour.name + (f" {found.version}" if found.version else "")
    notes = [f"the server is taken for {kind}, since {found.why}; it serves {found.model}"]
    if doubt is not None:
        notes.append(f"the tokenizer in {found.root} is not used: {doubt}")
    if words.unit is Unit.CHARACTER:
        notes.append(
            "prompts are told apart by characters, not by tokens, since no tokenizer is at hand; tokens are as the "
            "server counts them, and estimated before it has"
        )
    if not found.flavour.salts:
        notes.append(
            "this kind of server knows no `cache_salt`, so all keys share what it keeps of prompts: by how fast a "
            "prompt is read, one key may learn what another has sent"
        )
    if found.flavour is LLAMA_SERVER:
        notes.append("with --slot-save-path, the conversations of a llama-server are also parked: docs/LLAMA_SERVER.md")
    if found.flavour is HOSTED:
        notes.append("what it does not know of a request, it must refuse itself")
    return notes


def _found(
    client: RemoteClient,
    config: RemoteConfig,
    progress: Progress | None,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float],
) -> Found:
    began_s = monotonic()
    while True:
        try:
            return found_in(ask(client), config.model)
        except UpstreamFailed as error:
            waited_s = monotonic() - began_s
            if not _is_loading(error) or waited_s > START_WAIT_S:
                raise
            if progress is not None:
                progress("Waiting for the server to load its model", waited_s / START_WAIT_S)
            sleep(START_POLL_S)


def _is_loading(error: UpstreamFailed) -> bool:
    """Whether the server answers, but not yet: one that cannot be reached is not waited for."""
    status = getattr(error, "upstream_status", None)
    return status == 503 and not isinstance(error, UpstreamDown)
