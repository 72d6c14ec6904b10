"""The protocol of every engine, and its two kinds: engines whose state is rows, and engines whose state is opaque."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from parkd.engine_adapter.base.text import ChatTemplate, ImageReader, TextStream, Tokenizer
from parkd.state import Checksums, StateLayout, StateSizes, Transfer
from parkd.types import ImageSpan, SamplingParams, TokenIds, TokenMask

BLOCK_TOKENS = 256
"""Rows in a block. Blocks begin at absolute multiples of this."""


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that do not change."""

    model_name: str
    architecture: str
    fingerprint: bytes
    """16 bytes over everything that shapes state: weights, configuration, compute dtype, KV dtype, adapter."""
    context_tokens: int
    """Most tokens of a conversation: the rows of the arenas."""
    vocab_size: int
    end_token_ids: frozenset[int]
    """Sampling one of these ends the answer."""
    layout: StateLayout
    devices: tuple[str, ...]
    """One per stage."""
    weights_bytes: int
    arena_bytes: int
    is_demo_model: bool = False
    ctx_checkpoints: int = 0
    """Most checkpoints that the engine keeps; 0 without fixed state."""
    live_conversations: int = 1
    """Conversations that can stay live at once; one of them is current."""
    parked_state_lacks: str = ""
    """What a parked state does not include, for explaining why tokens were read again; empty: nothing."""


class Cancel(Protocol):
    """Checked between chunks and tokens; thread-safe. `threading.Event` is one."""

    def is_set(self) -> bool: ...


class Engine(Protocol):
    """What every engine does. How its state is captured and restored depends on its kind, see below.

    `position` counts the tokens whose state is valid in the arenas of all stages. Every method leaves a valid
    position, also when it raises: the same, an earlier one, or 0.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    images: ImageReader | None
    """None: the model reads text only."""

    @property
    def position(self) -> int: ...

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions at which a copy of the fixed state of all stages is held, ascending; empty without fixed state."""

    @property
    def rewind_floor(self) -> int:
        """`truncate` accepts every position from here to `position`. 0 without fixed state; `position` if the state is
        exact only there; in between where sliding windows have slack."""

    def checkpoint(self) -> None:
        """Takes a checkpoint at `position`. Does nothing without fixed state, or at 0.

        If there are `info.ctx_checkpoints` already, the least recently used makes room; the earliest always stays.
        """

    def reset(self) -> None:
        """Forgets the live conversation: `position` becomes 0. Cheap; rows are not cleared."""

    def truncate(self, position: int) -> None:
        """Keeps `[0, position)` and forgets checkpoints beyond it.

        `position` is 0, one of `checkpoints`, or from `rewind_floor` on; else raises ValueError. An engine whose
        library refuses all the same resets itself and raises RestoreFailed.
        """

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),
    ) -> int:
        """Reads tokens from `position` on, in chunks that end at absolute multiples of the batch size.

        With fixed state, chunks also end at the positions `checkpoint_at`, and a checkpoint is taken there.

        `images` are all images of the prompt, with their files. Those that end before `position` are not decoded. No
        chunk ends and no checkpoint is taken inside an image that sees itself.

        Stops after the chunk in which `cancel` was set. `on_chunk` is told the position after each chunk.
        Returns the position reached. Raises EngineFailure.
        """

    def generate(
        self,
        last_token_id: int,
        sampling: SamplingParams,
        *,
        history: TokenIds,
        mask: TokenMask | None = None,
    ) -> Iterator[Sequence[int]]:
        """Yields the ids of one decoding step after another. The first step reads `last_token_id`, the prompt's last.

        When ids are yielded, the state of all tokens before the last of them is in the arenas. Ends by itself only when
        the context is full: at an end token, a stop string or a limit the caller stops and calls `close()`. `history`
        are the prompt's ids, for penalties. Raises EngineFailure.
        """

    def steering_digest(self, scales: Mapping[str, float] | None) -> bytes:
        """The digest of a set of control vectors: 16 bytes, or empty if nothing steers. Thread-safe.

        `scales` is the complete set, by name; None: the engine's default. Raises InvalidRequest for an unknown name.
        """

    def steer(self, scales: Mapping[str, float] | None) -> bytes:
        """Steers everything that is read and generated from now on; rows stay. Returns the digest now in effect.

        Call it before a turn reads. Raises InvalidRequest as `steering_digest` does, and EngineFailure.
        """

    def text_stream(self) -> TextStream:
        """Thread-safe."""

    def capture(self, transfer: Transfer) -> Checksums:
        """Copies live state into the transfer's buffers; the live state stays. Raises EngineFailure, after which the
        content of the buffers is undefined."""

    def restore(self, transfer: Transfer) -> None:
        """Makes the transfer's state live and `position` its position. Raises RestoreFailed after a reset."""

    def close(self) -> None: ...


class RowEngine(Engine, Protocol):
    """An engine that exposes rows and fixed state of each stage: `info.layout.grain` is ROWS."""

    def capture(self, transfer: Transfer) -> Checksums:
        """Copies rows and fixed state of every stage into the transfer's buffers; the live state stays.

        `transfer.stop <= position`. Fixed parts are of `position` or of one of `checkpoints`. Raises EngineFailure,
        after which the content of the buffers is undefined.
        """

    def restore(self, transfer: Transfer) -> None:
        """Makes the rows `[0, transfer.position)` live, and `position` equal to `transfer.position`.

        The transfer holds the rows from `transfer.start` on; those before it must be live already, and stay. Layout
        digest, stage count, ranges and sizes are checked before anything is written. Checksums are compared after the
        copy and before the position is committed. Raises RestoreFailed after a reset of all stages.
        """


@runtime_checkable
class WholeState(Protocol):
    """What an engine with opaque state must tell about it."""

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        """The bytes of the whole live state, and of the fixed state at each of `checkpoints`, which are among the
        engine's own. Raises EngineFailure."""


class OpaqueEngine(Engine, WholeState, Protocol):
    """An engine that gives a conversation only as a whole, in bytes that it alone can read.

    `info.layout.grain` is OPAQUE or FILE, and the layout has one stage. A transfer has one run `[0, stop)`, whose
    buffer has the size that `state_sizes` returned, and a fixed part for each checkpoint. A capture that adds only
    checkpoints has no run.

        capture    run: the whole state, at `position`            fixed: partial states at earlier `checkpoints`
        restore    run: restored whole, to `stop`                 fixed: the one at `position`, if that is earlier
                   then cut to `position`: by the engine itself if the layout's `fixed_bytes` is 0, else by restoring
                   the partial state of that position over it

    A fixed part at the end of the run has no bytes, because the run includes it; its checksum is that of no bytes.
    Checksums are `[1, 1]` for the run and `[parts, 1]` for the parts. A restore compares both before it sets anything,
    and afterwards checks the position that the library reports. It then takes a checkpoint at `position`.

    FILE: the buffer is empty, and `run.file` is a path in the store's directory. A capture puts the state there, with
    mode 0600 and at most `file.bytes` long; a file written elsewhere on the same file system is renamed into place. It
    returns the length in `Checksums.file_bytes`, and the file's XXH3-64 as the run's checksum. If it fails, there is
    nothing at the path. The store syncs the file and names it in a manifest. A restore reads `file.bytes` bytes and
    leaves the file there; the store has compared its checksum when it read the file back from disk. There are no
    checkpoints: `fixed_bytes` is 0 if the engine can cut the state, else 1, which means that it resumes only at its
    end.
    """
