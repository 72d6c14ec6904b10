"""The one protocol that every engine meets, whether its state is rows or opaque, in this process or in another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from parkd.engine_adapter.base.text import ChatTemplate, Embedder, ImageReader, TextStream, Tokenizer
from parkd.errors import InvalidRequest
from parkd.state import Checksums, DraftCounts, StateLayout, StateSizes, Transfer
from parkd.types import FinishReason, ImageSpan, SamplingParams, TextForm, TokenIds, TokenMask, Told, TurnRequest, Unit


@dataclass(frozen=True, slots=True)
class HostExpertsInfo:
    """Experts that stay in main memory."""

    layers: tuple[int, ...]
    bytes: int
    fetched_from_tokens: int
    """Chunks of at least so many tokens fetch them to the card; shorter ones, and steps, compute in main memory."""
    seconds: Mapping[int, tuple[float, float]]
    """Tokens -> seconds for one layer in main memory, and fetched, as measured at start."""


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that do not change."""

    model_name: str
    architecture: str
    fingerprint: bytes
    """16 bytes over everything that shapes state: weights, configuration, compute dtype, KV dtype, adapter."""
    context_tokens: int
    """Most tokens of a conversation."""
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
    """Conversations whose state the engine can keep at once: those in its seats, and parked ones whose restore then
    copies nothing."""
    row_tokens: int = 0
    """Rows that the conversations in all seats have together; 0: each seat has `context_tokens` of its own. The engine
    moves rows so that every conversation stays contiguous. A seat that needs more rows than are free empties others,
    the one used longest ago first (`lane/seating.py` parks what that would lose)."""
    reads_while_restoring: bool = False
    """`restore_and_read` saves time on the engine's devices."""
    enforces_schemas: bool = False
    """The engine itself makes answers obey a schema, and takes no mask."""
    can_pause: bool = False
    """Between two chunks or steps, the state can be captured and later restored so that all that follows has the same
    bits as if it had stayed; `generate` goes on after it."""
    model_tokens: int = 0
    """The longest context that the model supports; 0 if that is not known."""
    memory: tuple[Mapping[str, int], ...] = ()
    """For each stage what takes its device's memory: name -> bytes. Empty if the engine does not say."""
    host_experts: HostExpertsInfo | None = None
    """None: all weights are where they are computed."""
    build: str = ""
    """What else decides how state is computed and moved: versions of libraries, kinds of devices, sizes of chunks."""
    resumes_near: bool = False
    """State that is cut is resumed at the last checkpoint that another process finds in it, which `begin` tells. So a
    start in which that is less than was asked for is no sign of damage."""
    parked_state_lacks: str = ""
    """What a parked state does not include, for explaining why tokens were read again; empty: nothing."""
    holds_state: bool = True
    """What a turn leaves in its seat can be built on. False: the engine is a server that keeps state as it likes, so
    nothing is live after a turn, and nothing is parked."""
    unit: Unit = Unit.TOKEN
    """What the ids are: where they are characters, the engine itself ends answers at their limit, and counts tokens
    (`Seat.told`)."""

    @property
    def most_units(self) -> int | None:
        """Most units of a prompt; None: only the engine can tell."""
        return self.context_tokens if self.unit is Unit.TOKEN else None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that was loaded at start."""

    name: str
    scale: float
    """Where a request does not say another."""


def check_adapters(known: Sequence[AdapterInfo], adapters: Mapping[int, float] | None) -> None:
    """Raises InvalidRequest for a place at which there is no adapter."""
    for place in adapters or {}:
        if not 0 <= place < len(known):
            these = f"their ids are 0 to {len(known) - 1}" if known else "none is loaded: start with --lora"
            raise InvalidRequest(f"There is no adapter {place}: {these}.", param="lora")


class Cancel(Protocol):
    """Checked between chunks and tokens; thread-safe. `threading.Event` is one."""

    def is_set(self) -> bool: ...


class CaptureInFlight(Protocol):
    """A capture whose copy goes on while the engine works."""

    def wait(self) -> Checksums:
        """Blocks until every byte is in the buffers; from any thread. Raises EngineFailure, EngineLost.

        The buffers may be written to until this returns or raises.
        """


class ScoredToken(Protocol):
    """A generated token with its logprob: the log-softmax of the model's logits before anything shapes them."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """The most probable ids in its place with their logprobs, most probable first."""


@dataclass(frozen=True, slots=True, eq=False)
class BegunPrompt:
    """What `Engine.begin` was given."""

    token_ids: TokenIds
    """`[n]`, all of the prompt."""
    sampling: SamplingParams
    images: Sequence[ImageSpan] = ()
    mask: TokenMask | None = None


class Seat(ABC):
    """The place of one live conversation in an engine. Methods that are not abstract answer for an engine that does no
    more than it must.

    `position` counts the tokens whose state is valid in the arenas of all stages. Every method leaves a valid
    position, also when it raises: the same, an earlier one, or 0.

        begin ------> extend ... extend ------> generate          one prompt and its answer
          `position`    up to its last token      from its last token on
    """

    info: EngineInfo
    """The engine's."""
    is_held: bool = False
    """A turn is under way here, so what is live is not to be given up for another seat. Set by the lane on its own
    thread, read by the engine on the engine's."""
    _begun: BegunPrompt | None = None

    @property
    @abstractmethod
    def position(self) -> int: ...

    @property
    @abstractmethod
    def checkpoints(self) -> tuple[int, ...]:
        """Positions at which a copy of the fixed state of all stages is held, ascending; empty without fixed state."""

    @property
    @abstractmethod
    def rewind_floor(self) -> int:
        """`truncate` accepts every position from here to `position`. 0 without fixed state; `position` if the state is
        exact only there; in between where sliding windows have slack."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Takes a checkpoint at `position`. Does nothing without fixed state, or at 0.

        If there are `info.ctx_checkpoints` already, the least recently used makes room; the earliest always stays.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forgets the live conversation: `position` becomes 0. Cheap; rows are not cleared."""

    @abstractmethod
    def truncate(self, position: int) -> None:
        """Keeps `[0, position)` and forgets checkpoints beyond it.

        `position` is 0, one of `checkpoints`, or from `rewind_floor` on; else raises ValueError. An engine whose
        library refuses all the same resets itself and raises RestoreFailed.
        """

    def begin(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        images: Sequence[ImageSpan] = (),
        mask: TokenMask | None = None,
        schema: Mapping[str, Any] | None = None,  # noqa: ARG002 - for engines that enforce schemas
        form: TextForm | None = None,  # noqa: ARG002 - the same
        limit: int | None = None,  # noqa: ARG002 - for engines that are asked for a whole answer at once
        request: TurnRequest | None = None,  # noqa: ARG002 - the same
        cancel: Cancel | None = None,  # noqa: ARG002 - for engines that wait for another server
    ) -> int:
        """Tells the whole prompt, which begins with what is live, and how it is to be answered: `extend` and
        `generate` then follow. Called once a turn, after its steering is set.

        `images` are all images of the prompt, with their files. `mask` says which tokens may come next. `schema` or
        `form` is what the answer must obey, if `info.enforces_schemas`. `limit` is the most tokens of the answer.
        `request` is what the prompt was made of, for what else it asks; `cancel` ends a wait for another server.

        Returns the position from which the engine really starts, now also `position`. It is lower than before if
        another process no longer held that state. Raises EngineFailure and InvalidRequest, after which nothing is live.
        """
        self._begun = BegunPrompt(token_ids, sampling, images, mask)
        return self.position

    @property
    def begun(self) -> BegunPrompt:
        """The prompt that was begun last."""
        assert self._begun is not None, "`begin` comes before `generate`"
        return self._begun

    @property
    def begun_images(self) -> Sequence[ImageSpan]:
        return () if self._begun is None else self._begun.images

    @abstractmethod
    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
    ) -> int:
        """Reads tokens of the prompt from `position` on, in chunks that end at absolute multiples of the batch size.

        With fixed state, chunks also end at the positions `checkpoint_at`, and a checkpoint is taken there.

        Images of the prompt that end before `position` are not decoded. No chunk ends and no checkpoint is taken inside
        an image that sees itself.

        Stops after the chunk in which `cancel` was set. `on_chunk` is told the position after each chunk.
        Returns the position reached. Raises EngineFailure.
        """

    @abstractmethod
    def generate(self) -> Iterator[Sequence[int]]:
        """Yields the ids of one decoding step after another. The first step reads the prompt's last token.

        When ids are yielded, the state of all tokens before the last of them is in the arenas. Ends by itself only when
        the context is full: at an end token, a stop string or a limit the caller stops and calls `close()`. Penalties
        cover the whole prompt. Raises EngineFailure.

        If `info.can_pause` and `position` is that of the tokens yielded so far, the iterator can rest while the seat
        serves other prompts: see `set_aside`. Closing it then touches nothing of the seat.

        Where turns take turns on one thread (`Engine.turns_at_once`), other seats compute between two steps.
        """

    def set_aside(self) -> Callable[[Seat], None]:
        """Keeps what later calls of `begin` and `generate` replace of the prompt under way and its answer, which rests
        between two chunks or steps. Returns the function that puts it into a seat of the same engine, this one or
        another, to be called once the state and the steering there are those of now. The iterator of `generate` goes
        on there, and the seat that it leaves knows it no more."""
        begun = self._begun

        def put_back(seat: Seat) -> None:
            seat._begun = begun

        return put_back

    @property
    def ended(self) -> FinishReason:
        """Why `generate` ended by itself: the context is full, unless the engine is told another reason."""
        return FinishReason.LENGTH

    @property
    def drafts(self) -> DraftCounts:
        """How many tokens of the last answer a draft head guessed, and how many of these were right."""
        return DraftCounts()

    @property
    def logprobs(self) -> Sequence[ScoredToken]:
        """Of each id that `generate` yielded since it was called, if `sampling.top_logprobs` asks for them."""
        return ()

    @property
    def told(self) -> Told | None:
        """How another server counts the tokens of the turn under way, or of the last one; None: what is counted here is
        right. Thread-safe."""
        return None

    @abstractmethod
    def steer(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        """Steers everything that is read and generated from now on; rows stay. Returns the digest now in effect.

        Arguments as for `Engine.steering_digest`. Call it before a turn reads. Raises InvalidRequest as that does, and
        EngineFailure.
        """

    def state_parts(self) -> Mapping[str, bytes]:
        """Name of each part of the live state -> digest of its bytes, such as `layer 3 key`. Empty if the engine cannot
        tell parts."""
        return {}

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        """The bytes of the whole live state, and of the fixed state at each of `checkpoints`, which are among the
        engine's own. Opaque states have sizes of their own, and each capture asks for them. `capture` follows, or
        `forget_sizes`. Raises EngineFailure."""
        layout = self.info.layout
        whole = self.position * layout.row_bytes + layout.fixed_bytes
        return StateSizes(whole, (layout.fixed_bytes,) * len(checkpoints))

    def forget_sizes(self) -> None:  # noqa: B027 - most engines know sizes without doing anything
        """What `state_sizes` returned will not be captured: removes what was written to find it out."""

    @abstractmethod
    def capture(self, transfer: Transfer) -> Checksums:
        """Copies live state into the transfer's buffers; the live state stays. Raises EngineFailure, after which the
        content of the buffers is undefined.

        ROWS, by `info.layout.grain`: rows and fixed state of every stage. `transfer.stop <= position`. Fixed parts are
        of `position` or of one of `checkpoints`.

        OPAQUE and FILE: the layout has one stage. The transfer has one run `[0, stop)`, whose buffer has the size that
        `state_sizes` returned, and a fixed part for each checkpoint. A capture that adds only checkpoints has no run.

            capture    run: the whole state, at `position`        fixed: partial states at earlier `checkpoints`
            restore    run: restored whole, to `stop`             fixed: the one at `position`, if that is earlier
                       then cut to `position`: by the engine itself if the layout's `fixed_bytes` is 0, else by
                       restoring the partial state of that position over it

        A fixed part at the end of the run has no bytes, because the run includes it; its checksum is that of no bytes.
        Checksums are `[1, 1]` for the run and `[parts, 1]` for the parts.

        FILE: the buffer is empty, and `run.file` is a path in the store's directory. A capture puts the state there,
        with mode 0600 and at most `file.bytes` long; a file written elsewhere on the same file system is renamed into
        place. It returns the length in `Checksums.file_bytes`, and the file's XXH3-64 as the run's checksum. If it
        fails, there is nothing at the path. The store syncs the file and names it in a manifest. A restore reads
        `file.bytes` bytes and leaves the file there; the store has compared its checksum when it read the file back
        from disk. There are no checkpoints: `fixed_bytes` is 0 if the engine can cut the state, or finds the nearest
        place itself (`info.resumes_near`), else 1, which means that it resumes only at its end.
        """

    def start_capture(self, transfer: Transfer) -> CaptureInFlight | None:  # noqa: ARG002 - see below
        """Begins a capture that the next prompt need not wait for, and returns at once; None if this state can only be
        captured with `capture`.

        The engine makes sure that no row is overwritten before it is copied. Raises as `capture`.
        """
        return None

    @abstractmethod
    def restore(self, transfer: Transfer) -> None:
        """Makes the transfer's state live and `position` its position. Raises RestoreFailed after a reset.

        ROWS: the transfer holds the rows from `transfer.start` on; those before it must be live already, and stay.
        Layout digest, stage count, ranges and sizes are checked before anything is written. Checksums are compared
        after the copy and before the position is committed. A failure resets all stages.

        OPAQUE and FILE: checksums of run and parts are compared before anything is set, and the position that the
        library reports is checked afterwards. Then a checkpoint is taken at `position`.
        """

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        """Does `restore`, then `extend` by `token_ids`, which contain no image and fit the context; both at once if
        `info.reads_while_restoring`.

        The position is committed only after all checksums were compared: nothing stays of damaged rows, nor of what
        was read after them. Raises RestoreFailed and EngineFailure, each after a reset.
        """
        self.restore(transfer)
        with self.emptied_by_failures():
            self.extend(token_ids, cancel=Event(), checkpoint_at=checkpoint_at)

    @contextmanager
    def emptied_by_failures(self) -> Iterator[None]:
        """A context in which a restore runs. A failure leaves the seat empty, since its prompt is then read cold."""
        try:
            yield
        except BaseException:
            self.reset()
            raise


class Engine(ABC):
    """What every engine has beside the live state, which is in its seats. Methods that are not abstract answer for an
    engine that does no more than it must."""

    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    images: ImageReader | None
    """None: the model reads text only."""
    adapters: Sequence[AdapterInfo] = ()
    """The LoRA adapters that requests can choose."""
    embedder: Embedder | None = None
    """None: the model embeds no texts."""

    @property
    @abstractmethod
    def seats(self) -> Sequence[Seat]:
        """The places for live conversations; at least one. Calls to all of them come from the engine's one thread,
        unless `has_own_threads`."""

    @property
    def turns_at_once(self) -> int:
        """How many turns can be under way at once, each in a seat of its own: at most as many as there are seats. Their
        calls of `extend` and steps of `generate` are mixed, but never two calls at once of one seat. Each answer has
        the bits that it has alone. Turns under way at once have the same steering, and their rows fit together
        (`EngineInfo.row_tokens`)."""
        return 1

    @property
    def has_own_threads(self) -> bool:
        """Whether each seat is called from a thread of its own, all at the same time: for engines that wait for others
        to compute. Methods of the engine itself may then be called from each of them."""
        return False

    @property
    def stats(self) -> Mapping[str, Callable[[], object]]:
        """What `/metrics` shows of the engine: a prefix of names, and what gives a frozen dataclass of numbers."""
        return {}

    def step_ahead(self, seats: Sequence[Seat]) -> None:  # noqa: B027 - each seat can make its step alone
        """Told before the answers in `seats` make their next step, one after the other: makes at once what these steps
        compute, as far as it can, with the bits that each has alone.

        A seat that this says nothing about computes its step itself. A raised EngineFailure leaves every seat as it
        was, and each then makes its step alone.
        """

    @property
    def is_awake(self) -> bool:
        """Whether the live state is known to be there without asking. An engine in another process, which may restart,
        has to be asked now and then. Never waits. May be called from any thread, between engine calls."""
        return True

    def awake(self) -> None:  # noqa: B027 - in this process there is nothing to ask
        """Call it before a turn decides how to start, unless `is_awake`: if the process was restarted, nothing is live
        in any seat.

        Raises EngineFailure, and EngineLost if it serves another model now.
        """

    def copy_bytes_per_s(self) -> float | None:
        """How fast parked state in memory gets into the engine, measured by a small copy before the first turn; None
        where only a restore can tell."""
        return None

    def template_within(self, namespace: str) -> ChatTemplate:  # noqa: ARG002 - most remember nothing
        """The template for the requests of a namespace of keys, apart from others if it remembers what it rendered."""
        return self.template

    def piece(self, token_id: int) -> bytes:
        """What the token writes, also if that is part of a character or the text of a special token. Thread-safe."""
        return self.tokenizer.decode([token_id]).encode()

    def tokens_in(self, units: int) -> int:
        """How many tokens so many units of a prompt are: an estimate, where they are characters. Thread-safe."""
        return units

    def check(self, request: TurnRequest, *, thinks: bool) -> None:  # noqa: B027 - most enforce all by masks
        """Raises InvalidRequest for what an engine that `enforces_schemas` cannot enforce. `thinks`: the answer begins,
        or may begin, with thinking. Thread-safe."""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What the tokens write together; U+FFFD for parts of characters. Thread-safe."""
        return b"".join(map(self.piece, token_ids)).decode(errors="replace")

    @property
    def opening_ids(self) -> Sequence[int]:
        """The tokens that the vocabulary puts before plain text, such as the one for a beginning."""
        return ()

    @abstractmethod
    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        """The digest of a set of control vectors and of adapters: 16 bytes, or empty if nothing steers beyond what is
        in the fingerprint. Thread-safe.

        `scales` is the complete set of vectors, by name; `adapters` that of LoRA adapters, by their places in
        `self.adapters`. None: the engine's default. Raises InvalidRequest for an unknown name or place.
        """

    @abstractmethod
    def text_stream(self) -> TextStream:
        """Thread-safe."""

    @abstractmethod
    def close(self) -> None: ...


class OneSeatEngine(Engine, Seat):
    """An engine for one live conversation: it is its only seat."""

    info: EngineInfo

    @property
    def seats(self) -> tuple[Seat]:
        return (self,)
