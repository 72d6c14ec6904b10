"""What the HTTP side may choose, and what it is built from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from parkd.engine_adapter.base import Engine
from parkd.identity.output_memory import Said
from parkd.proxy.output.base import OutputFormat
from parkd.types import NamedKey, PromptIdentity, TokenMask, TurnRequest, Units

if TYPE_CHECKING:
    from parkd.store.fs import FileSystem
    from parkd.store.store import ConversationStore

MIB = 1024 * 1024
DEFAULT_BODY_LIMIT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    host: str = "127.0.0.1"
    """The address listened on: only there are Host and Origin checked against loopback names."""
    port: int = 8080
    max_queue: int = 64
    """Requests that may wait for the lane; the one that runs is not among them."""
    max_output_tokens: int | None = None
    """The longest answer; None: up to the context's end."""
    api_keys: tuple[str, ...] = ()
    """Keys with a namespace each. With neither these nor named ones, no key is asked for."""
    named_keys: tuple[NamedKey, ...] = ()
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES
    bodies_limit_bytes: int = 256 * 1024 * 1024
    """What the bodies of requests that are read, wait or run may hold together; one alone has its own limit."""
    body_silence_s: float = 60.0
    """A body of which nothing came for so long is given up, and the room that it holds with it."""
    idle_connection_s: int = 75
    """A connection is closed after this long without a request; longer than clients keep theirs, so that they do not
    race it. Headers that are not whole by then are no request."""
    first_byte_deadline_s: float = 10.0
    """A streamed answer's headers go out by then, with `pending` if the start is not settled."""
    keep_alive_s: float = 10.0
    """The longest silence on a stream."""
    resend_grace_s: float = 0.0
    """A turn whose client is gone waits this long for the same request to come again; 0: it is given up at once."""
    shutdown_deadline_s: float = 20.0
    """The running answer may take this long after a stop was asked for; then it is cut."""
    alias: str | None = None
    """The name that `/v1/models` shows; None: the model's own."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call this server; empty: none."""


class BuildIdentity(Protocol):
    """`IdentityBuilder.build`; runs in a worker thread. Raises InvalidRequest."""

    def __call__(self, request: TurnRequest, *, steering: bytes = b"") -> PromptIdentity: ...


BuildMask = Callable[[TurnRequest, str], TokenMask | None]
"""From a request and the end of its rendered prompt to what its answer must obey, None for nothing. Runs in a worker
thread. Raises InvalidRequest."""


class TurnTrace(Protocol):
    """Takes note of a turn that ended. Never waits, and writes no text."""

    def __call__(
        self,
        *,
        at_s: float,
        key_digest: bytes,
        prompt_tokens: int,
        units: Units,
        end: str,
        extra: Mapping[str, Any],
    ) -> None: ...


@dataclass(frozen=True)
class Services:
    """What the app is made of. Built once by the composition root."""

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
    """What would take the first request that needs it seconds; run once, in a worker thread, before any is answered."""
    render: Callable[[TurnRequest], str] | None = None
    """A request to the text that the model reads; runs in a worker thread. Raises InvalidRequest."""
    remember: Callable[[PromptIdentity, Sequence[int], Said], None] | None = None
    """Told of each answer, so that it is recognised when it comes back; must not wait."""
    chat_template: str | None = None
    """Its source, for `/props`."""
    files: FileSystem | None = None
    """Where a `TieredStore` keeps its files; None: the store is of RAM alone."""
    trace: TurnTrace | None = None
    """Told of every turn; None: nothing is recorded."""
    return_memory: Callable[[], None] = lambda: None
    """Lets the system have what was freed; run in a worker thread behind large bodies."""
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
