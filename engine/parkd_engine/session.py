"""The live timeline: one conversation's tokens in the arenas of all stages.

arena rows   0 ............ position ................ context_tokens
             |-- valid ----|-- undefined -----------|

An engine with several seats has a session for each. They share stages, rows, captures and steering; the rows of one lie
where `parkd_engine.arenas.row_space` says, and every row number here counts from the first of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from parkd.errors import ContextFull
from parkd.state import StateLayout, chunk_end
from parkd.state.engine_config import CTX_CHECKPOINTS
from parkd.words.steering import Steering
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.fixed_state import FixedState
from parkd_engine.arenas.row_space import RowSpace
from parkd_engine.arenas.timeline_images import TimelineImages
from parkd_engine.draft.head import Choose, DraftHead
from parkd_engine.forward.forward import ChunksUnderWay, ModelForward
from parkd_engine.forward.stages import Stage
from parkd_engine.forward.step_by_step import step_by_step
from parkd_engine.moves.captures import CapturesUnderWay
from parkd_engine.moves.checksum import Checksum, checksum_for
from parkd_engine.vision.tower import PromptImage, VisionTower
from parkd_engine.words.steering import SteeringHooks

TAIL_TOKENS = 16
"""About the tokens that a turn adds to a known prompt. Different kernels are chosen for so few than for a chunk."""


class Cancel(Protocol):
    """A cancellation flag, checked before each chunk. `threading.Event` satisfies it."""

    def is_set(self) -> bool: ...


class Session:
    """One mutable timeline over all stages. Not thread-safe: use it from one thread at a time.

    `position` counts the tokens whose rows are valid in every stage. Every method leaves it valid, even when it raises.
    Rows beyond the position are undefined.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arenas: Sequence[StageArena],
        batch_tokens: int = 512,
        config: Any = None,
        ctx_checkpoints: int = CTX_CHECKPOINTS,
        vision: VisionTower | None = None,
        *,
        draft_model: Any = None,
        draft_tokens: int = 0,
        peer_access: bool = True,
        space: RowSpace | None = None,
        beside: Session | None = None,
    ) -> None:
        """`config` is the transformers configuration of the text model; without it, decoding is never recorded.
        `vision` encodes the images of prompts. `draft_model` is the model's draft head (`MtpModel`), whose state must
        be part of the layouts; it guesses at most `draft_tokens` at once. Without `peer_access`, hidden states pass
        between GPUs through main memory. If there are several seats, `space` holds the ranges of all, and `beside` is
        the session of the first; the others are made before it computes. Raises ValueError unless there is one arena
        for each stage."""
        if len(stages) != len(arenas):
            raise ValueError(f"{len(stages)} stages need as many arenas, not {len(arenas)}")
        self.stages = tuple(stages)
        self.arenas = tuple(arenas)
        self.batch_tokens = batch_tokens
        self.config = config
        self.context_tokens = min(arena.context_tokens for arena in arenas)
        self.checksum: Checksum = checksum_for(arena.device for arena in arenas)
        self.layout = StateLayout(tuple(arena.layout for arena in arenas), self.checksum.name)
        """What is captured can be restored here only if its layout's digest is the same."""
        self.caches = [
            StageCache(arena, stage.num_layers, draft_tokens) for stage, arena in zip(stages, arenas, strict=True)
        ]
        """What the layers of each stage read and write."""
        self.captures: CapturesUnderWay = CapturesUnderWay() if beside is None else beside.captures
        """Captures that run while the engine computes, of all seats. Whoever starts one adds it."""
        self.fixed_state = FixedState(arenas, self.caches, ctx_checkpoints, self.captures.any)
        self.vision = vision
        self._images = TimelineImages(self.arenas[0], vision)
        self.draft: DraftHead | None = None
        if draft_model is not None:
            history = self.caches[-1].history
            self.draft = DraftHead(draft_model, self.stages, self.arenas[-1], history, self._images.offset)
            for stage, cache in zip(self.stages, self.caches, strict=True):
                step_by_step(stage, cache.history)
        self.draft_tokens = draft_tokens if draft_model is not None else 0
        """The most tokens guessed at once; 0 without a draft head."""
        self.draft_pauses = True
        """Whether guessing pauses while guesses are rarely accepted (`parkd_engine.draft.pace`)."""
        self.is_held = False
        """A turn is under way here, so no other session takes its rows. Set from any thread."""
        self._position = 0
        self._steered: SteeringHooks = SteeringHooks(self.stages) if beside is None else beside._steered
        self.forward: ModelForward = ModelForward(
            self.stages,
            self.arenas,
            self.caches,
            config,
            self.captures,
            self.draft,
            guesses=self.draft_tokens,
            peer_access=peer_access,
            beside=None if beside is None else beside.forward,
        )
        self._make_room = None if space is None else space.add(self)
        self._is_first = beside is None

    @property
    def base(self) -> int:
        """The row of the arenas at which this session's begin."""
        return self.arenas[0].base

    @property
    def position(self) -> int:
        return self._position

    @property
    def position_offset(self) -> int:
        """Rotary position of the next token minus its position; 0 before any image."""
        return self._images.offset.value

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions of the checkpoints, ascending. The timeline can be cut to each of them."""
        return self.fixed_state.positions

    @property
    def rewind_floor(self) -> int:
        """The timeline can be cut to any position from this one up to the present; 0 without fixed state."""
        # After a reset, windows keep their old floor until something is read.
        return min(self._position, max(self.fixed_state.floor(self._position), self._images.floor))

    def checkpoint(self) -> None:
        """Takes a checkpoint at the position, if the model has fixed state and the timeline is not empty."""
        if self._position > 0:
            self.fixed_state.keep(self._position)

    @property
    def steering_digest(self) -> bytes:
        """The digest of the control vectors in effect; empty if there are none."""
        return self._steered.steering.digest

    def steer(self, steering: Steering) -> None:
        """Steers every forward pass from now on. Existing rows stay: the caller must track which steering made them.

        Raises StageFailed; the steering is then unchanged.
        """
        self._steered.change(steering)

    def use_kernels(self, progress: Callable[[str, float], None] | None = None) -> bool:
        """Records decoding as CUDA graphs and switches to fused kernels (`forward.dense`), where possible. Reads dummy
        chunks so that kernels are compiled and tuned now, with the first seat only.

        Returns whether decoding is recorded. Resets the timeline. Call it once, before the first token.
        """
        self.reset()
        if not self.forward.record(min(self.batch_tokens, self.context_tokens), progress):
            return False
        if self._is_first:
            self._tune_prompts(progress)
        return self.forward.decode_graph is not None

    def _tune_prompts(self, progress: Callable[[str, float], None] | None) -> None:
        """Reads chunks of token 0, in lengths typical of prompts, so that kernels are compiled and tuned."""
        if progress is not None:
            progress("Tuning the prompt kernels", 0.0)
        chunk = np.zeros(min(self.batch_tokens, self.context_tokens), dtype=np.int64)
        for tokens in (len(chunk), len(chunk) // 2, TAIL_TOKENS):
            self.extend(chunk[:tokens])
            # After existing rows.
            self.extend(chunk[: min(TAIL_TOKENS, self.context_tokens - self.position)])
            self.reset()
        if progress is not None:
            progress("Tuning the prompt kernels", 1.0)

    def reset(self) -> None:
        """Empties the timeline. Rows are not cleared, since rows beyond the position are never read."""
        self._position = 0
        self._images.reset()
        self.fixed_state.forget_beyond(0)

    def make_room(self, tokens: int) -> None:
        """Makes room for the rows `[0, tokens)`. Other seats may be emptied for it. Raises ContextFull."""
        if tokens > self.context_tokens:
            raise ContextFull(self._position, tokens - self._position, self.context_tokens)
        if self._make_room is not None:
            self._make_room(tokens)

    def move_rows(self, base: int) -> None:
        """Copies the rows to row `base` of the arenas, where they begin from now on; no others may be there. After a
        failure the timeline is empty."""
        try:
            for stage, arena in enumerate(self.arenas):
                if arena.device.type == "cuda":
                    stream = torch.cuda.current_stream(arena.device)
                    self.captures.before_write(stage, stream, base, base + self._position)
                arena.copy_rows(self._position, base)
        except BaseException:
            self.reset()
            raise
        for arena, cache in zip(self.arenas, self.caches, strict=True):
            arena.move_to(base)
            cache.move_to(base)
        if self.draft is not None:
            self.draft.move_to(base)

    def before_write(self, stage: int, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes `stream` wait until this session's rows `[start, stop)` of `stage` may be overwritten: captures copy
        them."""
        self.captures.before_write(stage, stream, self.base + start, self.base + stop)

    def truncate(self, position: int) -> None:
        """Cuts the timeline to `[0, position)`. Raises ValueError unless `position` is 0, a checkpoint, or between
        `rewind_floor` and the present position; also if it is inside an image with bidirectional attention."""
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot truncate to {position}: the session is at {self._position}")
        self._images.check_cut(position)
        if position == 0:
            self.reset()
        elif position >= self.rewind_floor:
            self.fixed_state.cut(position, self._position)
            self._images.cut(position)
        elif position in self.checkpoints:
            self._go_back(position)
        else:
            raise ValueError(f"cannot truncate to {position}: exact are {self.checkpoints} and {self.rewind_floor} on")
        self._position = position

    def adopt(self, position: int, kept: int = 0) -> None:
        """Declares the rows `[0, position)` and `fixed` of every arena valid, after the caller has written them.

        The rows `[0, kept)` were live before and stay, with their checkpoints. Raises ValueError beyond the context.
        """
        if not 0 <= position <= self.context_tokens:
            raise ValueError(f"{position} rows are more than the context of {self.context_tokens}")
        self.fixed_state.forget_beyond(min(kept, position - 1))
        for cache in self.caches:
            cache.rows_changed_from(kept)
        if self.draft is not None:
            self.draft.rows_changed_from(kept)
        self.fixed_state.unpack(position)
        self._images.was_restored(position, kept)
        self._position = position
        if position > 0:
            self.fixed_state.keep(position, is_packed=True)

    def extend(
        self,
        token_ids: npt.NDArray[np.int64] | Sequence[int],
        *,
        cancel: Cancel | None = None,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[PromptImage] = (),
    ) -> int:
        """Prefills tokens from the position on, in chunks that end at absolute multiples of `batch_tokens`. Computes
        no logits.

        With fixed state, chunks also end at the positions `checkpoint_at`, and a checkpoint is taken there. At the
        positions of `images`, the images are read instead of the ids; images that end before the position are ignored.
        If the model attends to images bidirectionally, no chunk ends and no checkpoint is taken inside one.

        `cancel` is checked before each chunk. `on_chunk` is called with the position after each; on CUDA, as many
        chunks as there are stages may still be running then.

        Returns the position reached. Raises ContextFull, with nothing read; StageFailed, keeping the chunks before the
        failed one (with linear layers, only what precedes the last checkpoint); UnreadableImage; and ValueError if the
        position or the end of `token_ids` cuts an image with bidirectional attention.
        """
        ids = np.ascontiguousarray(token_ids, dtype=np.int64)
        origin, end = self._position, self._position + len(ids)
        self.make_room(end)
        reading = self._images.reading(images, self._position, end)
        stops = sorted(set(checkpoint_at)) if self.fixed_state.exists else []
        if reading is not None:
            stops = [place for place in stops if not reading.cuts(place)]
        running = ChunksUnderWay(self.stages)
        while self._position < end and not (cancel is not None and cancel.is_set()):
            start = self._position
            stop = chunk_end(start, end, self.batch_tokens, stops)
            if reading is not None:
                stop = reading.stop_for(start, stop)
            chunk = self._images.chunk(reading, start, stop)
            with self._recovering():
                self.forward.run(ids[start - origin : stop - origin], start, "prefill", chunk)
            self._images.was_read(start, chunk)
            self._position = stop
            if stop in stops:
                self.checkpoint()
            running.add()
            if on_chunk is not None:
                on_chunk(stop)
        running.wait()
        return self._position

    def step(self, token_id: int) -> torch.Tensor:
        """Decodes one token at the position.

        Returns the logits of the next token, float32 `[vocab]`, on the last device. Raises ContextFull, StageFailed.
        """
        self.make_room(self._position + 1)
        return self._decoded([token_id])[0]

    def guess(self, token_id: int, count: int, choose: Choose) -> list[int]:
        """Returns the draft head's guesses of the tokens after `token_id`, itself the next token at the position: at
        most `count`, and no more than fit the context. Does not change the timeline. Raises StageFailed."""
        start = self._position
        count = min(count, self.draft_tokens, self.context_tokens - start - 1)
        if self.draft is None or count < 1:
            return []
        self.make_room(start + count)
        return self.forward.guess(self.draft, token_id, start, self._images.offset.value, count, choose)

    def verify(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Decodes a token and up to `draft_tokens` guesses of the tokens after it in one forward pass.

        Returns the logits after each, float32 `[q, vocab]`. Until more is read, the timeline can be cut to any position
        after the first token, as if the guesses beyond it had never been read. Raises ContextFull, StageFailed.
        """
        self.make_room(self._position + len(token_ids))
        with self.fixed_state.recorded(self._position, len(token_ids)):
            return self._decoded(token_ids)

    def has_stepped(self) -> None:
        """A token was decoded at the position in a step of several seats (`parkd_engine.together`)."""
        self._position += 1

    def _decoded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits after each token, float32 `[q, vocab]`, and advances the position."""
        forward, start, offset = self.forward, self._position, self._images.offset
        # At 0, linear layers have no previous state, and the recorded computation assumes one.
        goes_on = start > 0 or not self.fixed_state.is_exact_once
        with self._recovering():
            if goes_on and forward.is_recorded(len(token_ids)):
                logits = forward.step_recorded(token_ids, start, offset.value)
            else:
                chunk, ids = offset.plain(start, start + len(token_ids)), np.array(token_ids, dtype=np.int64)
                logits = forward.logits(forward.run(ids, start, "decode", chunk))
                self.fixed_state.check_step()
        self._position += len(token_ids)
        return logits

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Restores a valid position if a forward pass inside fails."""
        try:
            yield
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Goes back to the last checkpoint if the model has linear layers: a failed forward pass has advanced the state
        of some and not of others."""
        if not self.fixed_state.is_exact_once:
            return  # Rows beyond the position are ignored, and windows still hold what precedes it.
        position = self.fixed_state.last_before(self._position)
        if position:
            self._go_back(position)
            self._position = position
        else:
            self.reset()

    def _go_back(self, position: int) -> None:
        """Restores the checkpoint at `position`."""
        self.fixed_state.go_back(position)
        self._images.was_restored(position, position)
