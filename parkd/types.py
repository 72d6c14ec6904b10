"""Plain values that every part of parkd knows.

Nothing here has behaviour beyond deriving one value from another. Positions count tokens from the start of a
conversation; sizes are bytes; a `[start, stop)` pair is half-open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.uint64]
"""The identity of a prompt, `[n]`: a token id, or for an image position a value with the top bit set, derived from
the image's digest and the position inside the image. Two prompts share state exactly where these are equal."""

TokenIds = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Everything besides the units that must be equal before state may be reused (design rule 6)."""

    namespace: str
    """The cache namespace of the caller's API key."""
    fingerprint: bytes
    """Digest of weights, configuration, compute dtype, KV dtype and adapter: `EngineInfo.fingerprint`."""
    steering: bytes = b""
    """Digest of the effective steering vectors, scales and layers; empty when nothing steers."""

    @property
    def digest(self) -> bytes:
        """16 bytes; seeds the prefix hashes and is the hash of the empty prefix."""
        parts = (self.namespace.encode(), self.fingerprint, self.steering)
        hasher = blake2b(digest_size=HASH_BYTES, person=b"parkd-key")
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class NamedKey:
    """An API key as the operator wrote it down."""

    name: str
    """For logs and people."""
    key: str = field(repr=False)
    namespace: str | None = None
    """Keys of one namespace share parked conversations; None: a namespace of its own."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A named piece of a prompt, so that a cold read can say where it diverged."""

    start: int
    stop: int
    label: str
    """For people: `system`, `tools`, `message 3 (user)`, `generation prompt`."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions `[start, stop)` that one image takes in a prompt."""

    start: int
    stop: int
    digest: bytes
    """SHA-256 of mode, width, height, decoded pixels and preprocessing configuration."""


@dataclass(frozen=True)
class PromptIdentity:
    """A rendered, tokenised and hashed prompt."""

    key: ConversationKey
    token_ids: TokenIds
    """`[n]` ids as the model reads them."""
    units: Units
    """`[n]`; equal to `token_ids` where there is no image."""
    prefix_hashes: tuple[bytes, ...]
    """`prefix_hashes[i]` covers `units[: (i + 1) * block_tokens]`, chained from `key.digest`; full blocks only."""
    segments: tuple[SegmentSpan, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    """Ascending positions where a later prompt is likely to fork: checkpoint places."""

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What the store must know of one stage's state. The engine knows the fields; here they are bytes."""

    first_layer: int
    end_layer: int
    """The stage holds layers `[first_layer, end_layer)`."""
    row_bytes: int
    """Bytes one token leaves in this stage; a multiple of 8."""
    fixed_bytes: int
    """Bytes of state that does not grow with length; 0 when the stage has none."""
    digest: bytes
    """16 bytes over the names, dtypes, shapes and offsets of all fields."""


@dataclass(frozen=True)
class StateLayout:
    """The state of one conversation over all stages."""

    stages: tuple[StageLayout, ...]
    checksum: str
    """Name of the 64-bit checksum the engine computes over a part's bytes (`xxh3-64`, `weighted-sum-64`)."""

    @property
    def row_bytes(self) -> int:
        return sum(stage.row_bytes for stage in self.stages)

    @property
    def fixed_bytes(self) -> int:
        return sum(stage.fixed_bytes for stage in self.stages)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; two layouts with equal digests hold interchangeable bytes."""
        hasher = blake2b(digest_size=HASH_BYTES, person=b"parkd-layout")
        hasher.update(self.checksum.encode())
        for stage in self.stages:
            for number in (stage.first_layer, stage.end_layer, stage.row_bytes, stage.fixed_bytes):
                hasher.update(number.to_bytes(8, "little"))
            hasher.update(stage.digest)
        return hasher.digest()


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """Rows `[start, stop)` of one stage and the host bytes that hold them (or will).

    A run may span several blocks when they lie side by side in host memory, so that one copy moves them all.
    """

    start: int
    stop: int
    buffer: Bytes
    """`[(stop - start) * row_bytes]`, contiguous; row `start` first."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedPart:
    """The fixed state of one stage at one position, in host bytes."""

    position: int
    buffer: Bytes
    """`[fixed_bytes]`, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfer:
    """What one stage copies out of, or into, its arena."""

    rows: tuple[RowRun, ...]
    """Ascending and without gaps inside the transfer's `[start, stop)`."""
    fixed: tuple[FixedPart, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One atomic move of a conversation's state between the arenas and host memory, every stage in it.

    The rows `[start, stop)` are cut in blocks of `block_tokens` at absolute multiples; each block of each stage has a
    checksum of its own. For a capture `checksums` is None and the engine returns the array; for a restore the engine
    recomputes and compares before it commits.
    """

    layout_digest: bytes
    start: int
    stop: int
    block_tokens: int
    stages: tuple[StageTransfer, ...]
    checksums: npt.NDArray[np.uint64] | None = None
    """`[blocks, stages]` for the blocks that overlap `[start, stop)`, in order."""
    fixed_checksums: npt.NDArray[np.uint64] | None = None
    """`[fixed parts, stages]`."""
    resume_at: int | None = None
    """Restore only: the position that becomes live, in the last block; None means `stop`. The rows behind it come along
    because a block's checksum covers the whole block; they are copied, compared and then not live."""

    @property
    def position(self) -> int:
        """The engine's position after a restore; where the fixed state, if any, is true."""
        return self.stop if self.resume_at is None else self.resume_at

    @property
    def bytes(self) -> int:
        """Bytes moved, all stages."""
        rows = sum(run.buffer.nbytes for stage in self.stages for run in stage.rows)
        return rows + sum(part.buffer.nbytes for stage in self.stages for part in stage.fixed)


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """What a capture returns."""

    rows: npt.NDArray[np.uint64]
    """`[blocks, stages]`."""
    fixed: npt.NDArray[np.uint64]
    """`[fixed parts, stages]`."""


class CacheOutcome(StrEnum):
    """Where the reused state of a turn came from."""

    LIVE = "live"
    RESTORED_RAM = "restored-ram"
    RESTORED_DISK = "restored-disk"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what was known. The texts are a few tokens of both, so they are for their owner, never
    for a log."""

    position: int
    """The first token that differs."""
    label: str
    """The segment it is in."""
    text: str
    known_text: str

    def __str__(self) -> str:
        where = f" in {self.label}" if self.label else ""
        return f"token {self.position}{where} is the first that differs: {self.text} where {self.known_text} was known"


class DiagnosisKind(StrEnum):
    HIT = "hit"
    CHANGED = "changed"
    NOT_FOUND = "not_found"
    """The request to compare with is not remembered, or is another caller's."""
    UNAVAILABLE = "unavailable"
    """The prompts agree and still tokens were read: what was parked had gone."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A prompt against the one of an earlier request that the client named."""

    kind: DiagnosisKind
    changed: str = ""
    """The first part that differs: `model`, `system`, `tools` or `messages`."""
    common_tokens: int = 0
    missed_tokens: int = 0
    """Tokens of the earlier prompt behind the common ones."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the client and the operator are told of one turn's start."""

    outcome: CacheOutcome
    prompt_tokens: int
    reused_tokens: int
    why: str = ""
    """Why tokens had to be read although something was known of this prompt; empty when nothing is to be said."""
    divergence: Divergence | None = None
    """Where the prompt leaves the conversation that it shares most with."""
    diagnosis: Diagnosis | None = None
    """None if the client did not ask."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class TokenMask(Protocol):
    """Constrains what may be sampled next (structured output)."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """`[vocab]`, True where the token may come next."""

    def accept(self, token_id: int) -> None:
        """Advances by the token that was sampled."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings as in the OpenAI API and llama.cpp."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


Message = Mapping[str, Any]
"""A chat message in the canonical form that chat templates take (`role`, `content`, `tool_calls`, ...)."""


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    """The tool that must be called; set exactly when `mode` is `NAMED`."""


@dataclass(frozen=True, slots=True)
class ReasoningParams:
    """How much the client wants the model to think. Dialects also put what templates know into `template_kwargs`."""

    enabled: bool | None = None
    """None leaves it to the template."""
    effort: str | None = None
    """In the client's word: `none`, `minimal`, `low`, `medium`, `high`, `max`, ..."""
    budget_tokens: int | None = None


class CacheMode(StrEnum):
    USE = "use"
    READ = "read"
    """Reuses what is held, keeps nothing of this turn."""
    OFF = "off"
    """Neither reuses nor keeps."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """What the client said about keeping this conversation. Hints, never proof of identity."""

    mode: CacheMode = CacheMode.USE
    min_retention_s: float | None = None
    """The longest `cache_control.ttl` of the request."""
    group: str | None = None
    """`prompt_cache_key`."""
    salt: str | None = None
    """`cache_salt`: narrows the caller's namespace, never widens it."""
    compare_to: str | None = None
    """The id of an earlier answer: the client asks why its prompt was not reused whole."""
    wants_diagnosis: bool = False
    """This request or a later one will be compared."""


@dataclass(frozen=True)
class TurnRequest:
    """One request, freed of the dialect it came in."""

    messages: Sequence[Message] = ()
    prompt: str | None = None
    """Raw text for the legacy completions endpoint; then `messages` is empty."""
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    """None: up to the server's limit and the context's end. 0: the prompt is read and kept, nothing is generated."""
    stream: bool = False
    namespace: str = ""
    model: str = ""
    """As the client named it; echoed, never checked."""
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    response_schema: Mapping[str, Any] | None = None
    """A JSON schema the answer must obey; `{"type": "object"}` for any JSON object."""
    reasoning: ReasoningParams = field(default_factory=ReasoningParams)
    cache: CacheHints = field(default_factory=CacheHints)
    steering: Mapping[str, float] | None = None
    """Scales by control vector: the whole set: what it leaves out does not steer. None: the server's default."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts of one turn, measured by the turn itself."""

    wait_s: float = 0.0
    """In the queue, before the lane took it."""
    restore_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the arrival of the request to its first token."""
    decode_s: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's start is settled: restored, live or cold. Comes before any text."""

    report: CacheReport


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens read so far, of all that must be read; keeps a waiting client alive."""

    read_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking, apart from its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call carries its id and name; `arguments` pieces concatenate to JSON."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a turn that went well."""

    reason: FinishReason
    report: CacheReport
    timings: Timings
    reasoning_tokens: int = 0
    stop_string: str | None = None


Event = Started | Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished
"""A failed turn raises a `ParkdError` instead of yielding an event."""
