"""The one seam between the daemon and an engine.

An adapter is used from one thread only, the engine's own; the event loop never calls it, except for what is marked
thread-safe. The adapter owns the live state; the daemon owns what that state means (which units are in it).

    arena rows   0 ............ position ................ context_tokens
                 |-- valid ----|-- whatever was there --|

Engines differ in the grain of their state. Some give rows of each stage, which are cut in blocks and shared; others
give a conversation whole, as bytes or as a file. All that is above this seam is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from parkd.types import (
    Checksums,
    DraftCounts,
    ImageSpan,
    Proof,
    SamplingParams,
    StateLayout,
    StateSizes,
    TokenIds,
    TokenMask,
    Transfer,
)

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


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    special_tokens: tuple[str, ...]
    """Texts that the tokenizer cuts out before anything else, so that what lies between them is tokenised alone."""

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt; special tokens in the text are recognised, none is added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included: for reports, not for answers."""


class UnprovenText(str):
    """A rendered prompt that is to be confirmed yet: it may be worked with, but nothing of its answer given out."""

    proof: Proof

    def __new__(cls, text: str, proof: Proof) -> UnprovenText:
        made = super().__new__(cls, text)
        made.proof = proof
        return made


def proven(text: str) -> str:
    """The text, once it is confirmed. Raises what speaks against it."""
    if isinstance(text, UnprovenText):
        text.proof.result()
    return str(text)


class ChatTemplate(Protocol):
    """Messages to the text a model reads. Thread-safe."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """May be an `UnprovenText`. Raises InvalidRequest when the template refuses the messages, with its words."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How pictures stand in a prompt."""

    placeholder: str
    """What the chat template writes for one picture."""
    wrapped: str
    """What is tokenised in its place; it holds `token_id` once."""
    token_id: int
    """Stands at every position of a picture: what is there is told by the picture alone."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a prompt's identity needs of a picture."""

    digest: bytes
    """32 bytes over pixels, size, mode and preprocessing: equal for equal pictures, however their files are packed."""
    tokens: int
    """Positions that it takes."""


class ImageReader(Protocol):
    """What an engine does with pictures before they are read. Thread-safe, and slow: not for the event loop."""

    tokens: ImageTokens
    sees_itself: bool
    """State inside a picture depends on all of it, so nothing can go on from there."""

    def facts(self, data: bytes) -> ImageFacts:
        """Of a picture's file. Raises InvalidRequest for one that cannot be read, or is too large."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What became visible when tokens were pushed."""

    text: str
    stop_string: str | None = None
    """Set when a stop string was met: `text` ends before it and nothing comes after."""


class TextStream(Protocol):
    """Turns ids into text a piece at a time. Never gives out half a character, nor text that may turn out to be the
    head of a stop string."""

    def push(self, token_ids: Sequence[int]) -> TextPiece: ...

    def flush(self) -> TextPiece:
        """The rest, once no token follows."""


class ResponseReader(Protocol):
    """Reads one answer as the model's own files say it is to be read.

    Events have a `type`, `region_open`, `region_chunk` (with `text`, and `dirty` where only the whole has a meaning) or
    `region_close` (with `value`), and a `field`, the key of the message.
    """

    initial: Sequence[Mapping[str, Any]]
    """What the prompt has opened already."""

    def closing(self, field: str, text: str) -> int:
        """Length of the mark at the start of `text` that closes the field's region; 0 if there is none."""

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """Raises, mostly ValueError, for an answer that does not fit; then the reader is not used again."""

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """No text follows. Raises as `feed` does."""


class CaptureInFlight(Protocol):
    """A capture that goes on while the engine does other things."""

    def wait(self) -> Checksums:
        """Blocks until every byte is in the buffers; from any thread. Raises EngineFailure, EngineLost.

        Until it returns, or has raised, the buffers may be written to.
        """


@runtime_checkable
class OverlappingEngine(Protocol):
    """What an engine may offer besides: captures that the next prompt does not wait for."""

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:
        """Begins what `capture` does and returns at once; None if this state can only be captured by waiting.

        The engine itself sees to it that no row is overwritten before it is copied.
        """


@runtime_checkable
class ReadingRestoreEngine(Protocol):
    """What an engine may offer besides: it reads on while what is restored is still on its way."""

    @property
    def reads_while_restoring(self) -> bool:
        """Whether that gains anything where this engine runs."""

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        """`restore`, then `extend` by `token_ids`, which hold no picture and fit the context, whatever the batch size.

        As with `restore`, the position is committed only once every checksum was compared: of damaged rows, and of what
        was read behind them, nothing is left. Raises RestoreFailed and EngineFailure, each after a reset.
        """


@runtime_checkable
class RemoteEngine(Protocol):
    """What an engine that is another process does besides: it may go away, and it decides itself what it reuses."""

    def awake(self) -> None:
        """To be called before a turn decides how to start: what was live is gone if the process is another one.

        Raises EngineFailure; EngineLost if it serves another model now.
        """

    def begin_prompt(
        self, token_ids: TokenIds, sampling: SamplingParams, mask: TokenMask | None, limit: int | None
    ) -> int:
        """Sends the whole prompt ahead; `extend` and `generate` then follow the answer to it. `limit` is the longest.

        Returns the position at which the engine really starts, which is `position` then: less than before if the
        process did not hold what it was believed to. Raises EngineFailure, InvalidRequest; then nothing is live.
        """


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


@runtime_checkable
class DraftingEngine(Protocol):
    """What an engine may offer besides: it guesses tokens ahead, and says how well it did."""

    @property
    def drafts(self) -> DraftCounts:
        """Of the answer generated last."""


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
