"""The configuration of the HTTP side, and the services that it is built from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parkd.answers.base import OutputFormat
from parkd.engine_adapter.base import Engine
from parkd.identity.output_memory import Said
from parkd.lane.turn_log import TurnTrace
from parkd.types import NamedKey, PromptIdentity, TokenMask, TurnRequest

if TYPE_CHECKING:
    from parkd.store.fs import FileSystem
    from parkd.store.store import ConversationStore

MIB = 1024 * 1024
DEFAULT_BODY_LIMIT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Limits, deadlines and access rules."""

    host: str = "127.0.0.1"
    """The address to listen on. If it is a loopback address, the Host of requests must be a loopback name."""
    port: int = 8080
    max_queue: int = 64
    """Requests that may wait for the lane, not counting the running one."""
    max_output_tokens: int | None = None
    """The most tokens of an answer; None: up to the end of the context."""
    api_keys: tuple[str, ...] = ()
    """Keys that each have their own namespace. If there are neither these nor named keys, clients need none."""
    named_keys: tuple[NamedKey, ...] = ()
    operator_keys: tuple[str, ...] = ()
    """Keys that may also see what all keys do together. If there are any keys at all, only these may."""
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES
    bodies_limit_bytes: int = 256 * 1024 * 1024
    """Limit for all bodies together that are being read, wait or run. Each body also has its own limit."""
    body_silence_s: float = 60.0
    """A request fails if no part of its body arrives for this long, which frees the memory charged for it."""
    idle_connection_s: int = 75
    """A connection without a complete request header is closed after this long. Longer than clients keep idle
    connections, so that a client does not send a request just as the server closes."""
    first_byte_deadline_s: float = 10.0
    """Headers of a streamed answer are sent after this long at the latest, with `pending` if the start of the turn is
    not known yet."""
    keep_alive_s: float = 10.0
    """The longest silence on a stream; then a keep-alive is sent."""
    resend_grace_s: float = 0.0
    """A turn whose client has disconnected waits this long for the same request to be sent again; 0: the turn is given
    up at once."""
    shutdown_deadline_s: float = 20.0
    """The time that the running answer has to end after a stop is requested; then it is cut."""
    alias: str | None = None
    """The name that `/v1/models` shows; None: the model's own."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server, besides loopback ones and its own host."""


class BuildIdentity(Protocol):
    """`IdentityBuilder.build`; runs in a worker thread. Raises InvalidRequest."""

    def __call__(self, request: TurnRequest, *, steering: bytes = b"") -> PromptIdentity: ...


BuildMask = Callable[[TurnRequest, str], TokenMask | None]
"""(request, end of its rendered prompt) -> the mask for its answer, or None. Runs in a worker thread. Raises
InvalidRequest."""


@dataclass(frozen=True)
class Services:
    """The services that the app uses. Built once by the composition root."""

    engine: Engine
    build_identity: BuildIdentity
    store: ConversationStore | None
    """None: parking is off; the live conversation is still reused."""
    config: ProxyConfig = ProxyConfig()
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
    chat_template: str | None = None
    """The source of the chat template, for `/props`."""
    files: FileSystem | None = None
    """The file system of a `TieredStore`; None: the store is in RAM only."""
    trace: TurnTrace | None = None
    """Called for each turn; None: nothing is recorded."""
    return_memory: Callable[[], None] = lambda: None
    """Returns freed memory to the system. Called in a worker thread after large bodies."""
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
