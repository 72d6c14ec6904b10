"""What every engine does, and the two kinds that tell how its state moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from parkd.engine_adapter.base.text import ChatTemplate, ImageReader, TextStream, Tokenizer
from parkd.types import Checksums, ImageSpan, SamplingParams, StateLayout, StateSizes, TokenIds, TokenMask, Transfer

BLOCK_TOKENS = 256
"""Rows in a block, at absolute multiples."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, fixed for its life."""

    model_name: str
    architecture: str
    fingerprint: bytes
    """16 bytes over everything that shapes state: weights, configuration, compute dtype, KV dtype, adapter."""
    context_tokens: int
    """Rows the arenas hold."""
    vocab_size: int
    end_token_ids: frozenset[int]
    """Sampling one of these ends the answer."""
    layout: StateLayout
    devices: tuple[str, ...]
    """One a stage."""
    weights_bytes: int
    arena_bytes: int
    is_demo_model: bool = False
    ctx_checkpoints: int = 0
    """Checkpoints that the engine keeps at most; 0 without fixed state."""
    live_conversations: int = 1
    """That can stay live at once; one of them is current."""
    parked_state_lacks: str = ""
    """What is not in a parked state, said to whoever asks why tokens had to be read again."""


class Cancel(Protocol):
    """Asked between chunks and tokens; thread-safe. `threading.Event` is one."""

    def is_set(self) -> bool: ...


class Engine(Protocol):
    """What every engine does. How its state moves is said by one of the two kinds below.

    `position` counts the tokens whose state is valid in the arenas of all stages. Every method leaves a valid
    position behind, also when it raises: unchanged, an earlier one, or 0.
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
        """`truncate` takes every position from here to `position`: 0 without fixed state, `position` if the state is
        exact there only, less where sliding windows have slack."""

    def checkpoint(self) -> None:
        """Keeps the fixed state at `position`; nothing without fixed state, nothing at 0. A bound of the engine's own
        applies: the earliest checkpoint stays, of the others the least recently used goes."""

    def reset(self) -> None:
        """Forgets the live conversation: `position` is 0. Cheap; rows are not cleared."""

    def truncate(self, position: int) -> None:
        """Keeps `[0, position)`. Raises ValueError if the state at `position` is not exact: below `rewind_floor` and
        not one of `checkpoints`, nor 0. Checkpoints beyond are forgotten. An engine whose library may refuse what it
        promised raises RestoreFailed then, after a reset."""

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),
    ) -> int:
        """Reads tokens behind `position`, a chunk at a time at absolute multiples of the batch size.

        With fixed state chunks also end at the positions `checkpoint_at`, where a checkpoint is taken.

        `images` are the whole prompt's, with their files: those that end before `position` are not looked at, and no
        chunk ends, nor is a checkpoint taken, inside one that sees itself. Without any, the argument may be left out.

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
        """Yields newly sampled ids, one step each `next`; the first step runs `last_token_id`, the prompt's last.

        When ids are yielded, the state of all tokens before the last yielded one is in the arenas. It ends by itself
        when the context is full; the caller ends it at an end token, a stop or a limit (then `close()`). `history` are
        the prompt's ids, for the penalties. Raises EngineFailure.
        """

    def steering_digest(self, scales: Mapping[str, float] | None) -> bytes:
        """Of the effective set of control vectors: 16 bytes, empty when nothing steers. Thread-safe.

        `scales` is the whole set, by name; None is the engine's default. Raises InvalidRequest for an unknown name.
        """

    def steer(self, scales: Mapping[str, float] | None) -> bytes:
        """What is read and generated from here on is steered so; rows stay. Returns the digest now in effect.

        To be called before a turn reads. Raises InvalidRequest as `steering_digest` does, EngineFailure.
        """

    def text_stream(self, stop: Sequence[str]) -> TextStream:
        """Thread-safe."""

    def capture(self, transfer: Transfer) -> Checksums:
        """Copies live state into the transfer's buffers; the live state stays. Raises EngineFailure; then the buffers'
        content means nothing."""

    def restore(self, transfer: Transfer) -> None:
        """Makes the transfer's state live and `position` its position. Raises RestoreFailed after a reset."""

    def close(self) -> None: ...


class RowEngine(Engine, Protocol):
    """An engine that exposes rows and fixed state of each stage: `info.layout.grain` is ROWS."""

    def capture(self, transfer: Transfer) -> Checksums:
        """Copies rows and fixed state of every stage into the transfer's buffers; the live state stays. Fixed parts are
        of `position` or of one of `checkpoints`.

        `transfer.stop <= position`. Raises EngineFailure; then the buffers' content means nothing.
        """

    def restore(self, transfer: Transfer) -> None:
        """Makes the transfer's rows `[0, transfer.position)` the live state and `position` that position.

        `transfer.start` is 0, or a position up to which the live rows are the ones meant (they stay). Everything is
        checked before anything is written (layout digest, stage count, ranges, sizes); checksums are compared after
        the copy, before the position is committed. Raises RestoreFailed after a reset of all stages.
        """


@runtime_checkable
class WholeState(Protocol):
    """What an engine must say of a state that is no rows."""

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        """Bytes that the live state takes whole, and those of the fixed state at each of `checkpoints`, all of them
        positions that the engine's own `checkpoints` names. Raises EngineFailure."""


class OpaqueEngine(Engine, WholeState, Protocol):
    """An engine that only gives a conversation as a whole, in bytes that it alone can read.

    `info.layout.grain` is OPAQUE or FILE, and the layout has one stage. A transfer's only stage has one run
    `[0, stop)`, whose buffer has the size that `state_sizes` said, and a fixed part a checkpoint that goes along.
    A capture that has nothing new but checkpoints has no run.

        capture    run: the whole state, at `position`            fixed: partial states at earlier `checkpoints`
        restore    run: set whole, at `stop`                      fixed: the one at `position`, if that is earlier
                   then cut to `position`: by the engine's own means where the layout's `fixed_bytes` is 0, else by
                   setting the partial state of that position over it

    A fixed part without bytes is of the end of the run, which holds it: its checksum is that of no bytes. Checksums are
    `[1, 1]` for the run and `[parts, 1]`; a restore compares both before anything is set, and the position that the
    engine then reports before it is believed. A restored state has all that the captured one had; so the engine keeps
    the checkpoint at `position` for itself, as after `checkpoint()`.

    FILE: the buffer is empty and `run.file` names a path in the store's own directory. A capture leaves the state
    there, moved into place by a rename if it was written elsewhere on the same file system, with mode 0600, no longer
    than `file.bytes`, and returns its length in `Checksums.file_bytes` and its XXH3-64 as the run's checksum; it is the
    store that syncs it and names it in a manifest. If it fails, nothing lies at the path. A restore reads
    `file.bytes` bytes from there, which the store has compared with the checksum when it took the file up again, and
    leaves the file as it is. There are no checkpoints: a file holds the end alone, so `fixed_bytes` is 0 if the engine
    can cut what it read, and else 1, which says that it resumes at the end only.
    """
