"""The services that the HTTP side is built from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from parkd.answers.base import OutputFormat
from parkd.config import ProxyConfig
from parkd.engine_adapter.base import Engine
from parkd.identity.normalise import RewriteRule
from parkd.identity.output_memory import Said
from parkd.lane.reports.turn_log import TurnTrace
from parkd.ledger.ledger import Ledger
from parkd.types import PromptIdentity, StillWanted, TokenMask, TurnRequest, Units, always_wanted

if TYPE_CHECKING:
    from parkd.proxy.page.budget import Machine
    from parkd.store.files.fs import FileSystem
    from parkd.store.store import ConversationStore

__all__ = ["BuildIdentity", "BuildMask", "ProxyConfig", "Services"]


class BuildIdentity(Protocol):
    """`IdentityBuilder.build`; runs in a worker thread. Raises InvalidRequest, and what `still_wanted` raises."""

    def __call__(
        self, request: TurnRequest, *, steering: bytes = b"", still_wanted: StillWanted = always_wanted
    ) -> PromptIdentity: ...


BuildMask = Callable[[TurnRequest, str, StillWanted], TokenMask | None]
"""(request, end of its rendered prompt, whether its client is there) -> the mask for its answer, or None. Runs in a
worker thread. Raises InvalidRequest, and what the third raises."""


@dataclass(frozen=True)
class Services:
    """The services that the app uses. Built once by the composition root."""

    engine: Engine
    build_identity: BuildIdentity
    store: ConversationStore | None
    """None: parking is off; the live conversation is still reused."""
    config: ProxyConfig = field(default_factory=ProxyConfig)
    output: OutputFormat = field(default_factory=OutputFormat)
    """How the model writes its thinking and its tool calls."""
    build_mask: BuildMask | None = None
    """None: a request for structured output is refused."""
    prepare: Callable[[], None] | None = None
    """Slow preparations that would delay the first request that needs them. Called once, in a worker thread, before any
    request is answered."""
    render: Callable[[TurnRequest], str] | None = None
    """Renders a request to the text that the model reads. Runs in a worker thread. Raises InvalidRequest."""
    remember: Callable[[PromptIdentity, Sequence[int], Said], None] | None = None
    """Called with each answer, so that it is recognised when a client sends it back. Must not wait."""
    forget: Callable[[Units, bytes, str], int] | None = None
    """(units, key digest, namespace) of a conversation -> how many remembered answers to it were forgotten. Runs in a
    worker thread. None: no answers are remembered."""
    chat_template: str | None = None
    """The source of the chat template, for `/props`."""
    files: FileSystem | None = None
    """The file system of a store with a disk; None: the store is in RAM only."""
    spool_directory: Path | None = None
    """Where conversations lie while they come or go (`spool.py`); None: with the system's temporary files."""
    disk_bytes_per_s: float | None = None
    """How fast the files were read at start; None: not measured."""
    ram_bytes_per_s: float | None = None
    """How fast memory was copied to the engine at start; None: not measured."""
    remembered: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Bytes of what is remembered of prompts and answers, and the most they may be, by kind."""
    machine: Callable[[], Machine] | None = None
    """Main memory as the system counts it; None: that is not told."""
    trace: TurnTrace | None = None
    """Called for each turn; None: nothing is recorded."""
    add_rule: Callable[[RewriteRule], int] | None = None
    """Switches a rewrite rule on. Returns how many there are then. Raises ConfigError. None: there are no rules."""
    ledger: Ledger | None = None
    """Where turns are noted. Whoever opened it closes it, after the server; None: nowhere."""
    return_memory: Callable[[], None] = lambda: None
    """Returns freed memory to the system. Called in a worker thread after large bodies."""
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
