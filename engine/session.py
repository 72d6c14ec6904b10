"""The live timeline: one conversation's tokens in the arenas of all stages.

arena rows   0 ............ position ................ context_tokens
             |-- valid ----|-- whatever was there --|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.arena import StageArena
from engine.cache import StageCache
from engine.captures import CapturesUnderWay
from engine.checksum import Checksum, checksum_for
from engine.draft import Choose, DraftHead
from engine.errors import ContextFull
from engine.fixed_state import FixedState
from engine.forward import ChunksUnderWay, ModelForward
from engine.layout import state_digest
from engine.stages import Stage
from engine.steering import Steering, SteeringHooks
from engine.step_history import step_by_step
from engine.timeline_images import TimelineImages
from engine.vision import PromptImage, VisionTower
from engine.warm_up import tune_prompts


class Cancel(Protocol):
    """Asked between chunks. `threading.Event` is one."""

    def is_set(self) -> bool: ...


class Session:
    """One mutable timeline over all stages. Used from one thread at a time.

    `position` counts the tokens whose rows are valid in every stage. Every method leaves a valid position behind,
    also when it raises: the rows beyond it mean nothing.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arenas: Sequence[StageArena],
        batch_tokens: int = 512,
        config: Any = None,
        ctx_checkpoints: int = 8,
        vision: VisionTower | None = None,
        *,
        draft_model: Any = None,
        draft_tokens: int = 0,
        peer_access: bool = True,
    ) -> None:
        """`config` is the library's, of the model's text; without it decoding is never recorded. `vision` reads the
        pictures of prompts that have some. `draft_model` is the model's draft head, the library's `MtpModel`, for
        which the layouts have room; `draft_tokens` are the most it may guess. Without `peer_access` cards hand hidden
        states on through main memory."""
        if len(stages) != len(arenas):
            raise ValueError(f"{len(stages)} stages need as many arenas, not {len(arenas)}")
        self.stages = tuple(stages)
        self.arenas = tuple(arenas)
        self.batch_tokens = batch_tokens
        self.config = config
        self.context_tokens = min(arena.context_tokens for arena in arenas)
        self.checksum: Checksum = checksum_for(arena.device for arena in arenas)
        self.layout_digest = state_digest([arena.layout for arena in arenas], self.checksum.name)
        """16 bytes; a snapshot belongs here only if it carries the same."""
        self._caches = [
            StageCache(arena, stage.num_layers, draft_tokens) for stage, arena in zip(stages, arenas, strict=True)
        ]
        self.captures = CapturesUnderWay()
        """Those that go on beside what runs here: whoever starts one adds it."""
        self.fixed_state = FixedState(arenas, self._caches, ctx_checkpoints, self.captures.any)
        self.vision = vision
        self._images = TimelineImages(self.arenas[0], vision)
        self.draft: DraftHead | None = None
        if draft_model is not None:
            history = self._caches[-1].history
            self.draft = DraftHead(draft_model, self.stages, self.arenas[-1], history, self._images.offset)
            for stage, cache in zip(self.stages, self._caches, strict=True):
                step_by_step(stage, cache.history)
        self.draft_tokens = draft_tokens if draft_model is not None else 0
        """The most tokens that are guessed at once; 0 without a draft head."""
        self.draft_pauses = True
        """Whether guessing pauses while it is rarely right (`engine.draft_pace`)."""
        self._position = 0
        self._steered = SteeringHooks(self.stages)
        self._forward = ModelForward(
            self.stages,
            self.arenas,
            self._caches,
            config,
            self.captures,
            self.draft,
            guesses=self.draft_tokens,
            peer_access=peer_access,
        )

    @property
    def position(self) -> int:
        return self._position

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions at which a copy of the fixed state is held, ascending; the timeline can be cut to each."""
        return self.fixed_state.positions

    @property
    def rewind_floor(self) -> int:
        """The timeline can be cut to every position from here on: 0 without fixed state."""
        # Windows hear of a fresh start only when it reads.
        return min(self._position, self.fixed_state.floor(self._position))

    def checkpoint(self) -> None:
        """Keeps the fixed state at the present position, if the model has any and the timeline is not empty."""
        if self._position > 0:
            self.fixed_state.keep(self._position)

    @property
    def steering_digest(self) -> bytes:
        """Of what steers from here on; empty when nothing does."""
        return self._steered.steering.digest

    def steer(self, steering: Steering) -> None:
        """From now on forwards are steered so. Rows stay: what they were made under is the caller's to know.

        Raises StageFailed; then the steering is as before.
        """
        self._steered.change(steering)

    def use_kernels(self, progress: Callable[[str, float], None] | None = None) -> bool:
        """Records decoding as CUDA graphs, and runs the model through few kernels (`engine.dense`), where that is
        possible. Reads a chunk of nothing, so that what compiles or tunes does so now.

        True if decoding is recorded. Forgets the timeline. To be called once, before the first token.
        """
        self.reset()
        if not self._forward.record(min(self.batch_tokens, self.context_tokens), progress):
            return False
        tune_prompts(self, progress)
        return self._forward.decode_graph is not None

    def reset(self) -> None:
        """Forgets the timeline. Rows are not cleared: what is beyond the position is never read."""
        self._position = 0
        self._images.reset()
        self.fixed_state.forget_beyond(0)

    def truncate(self, position: int) -> None:
        """Keeps `[0, position)`. Raises ValueError beyond the present position, and where the state is not exact:
        below `rewind_floor` and not at a checkpoint (or 0), and inside a picture that sees itself."""
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot truncate to {position}: the session is at {self._position}")
        self._images.check_cut(position)
        if position == 0:
            self.reset()
        elif position >= self.rewind_floor:
            self.fixed_state.cut(position, self._position)
        elif position in self.checkpoints:
            self._go_back(position)
        else:
            raise ValueError(f"cannot truncate to {position}: exact are {self.checkpoints} and {self.rewind_floor} on")
        self._position = position
        self._images.forget_beyond(position)

    def adopt(self, position: int, kept: int = 0) -> None:
        """Declares the rows `[0, position)` and `fixed` of every arena valid. Only for who has just written and
        checked them; `[0, kept)` are the rows that were live before, with their checkpoints."""
        if not 0 <= position <= self.context_tokens:
            raise ValueError(f"{position} rows are more than the context of {self.context_tokens}")
        self.fixed_state.forget_beyond(min(kept, position - 1))
        for cache in self._caches:
            cache.rows_changed_from(kept)
        if self.draft is not None:
            self.draft.rows_changed_from(kept)
        self.fixed_state.unpack(position)
        self._images.forget_beyond(kept)
        self._images.offset.reload()
        self._position = position
        self.checkpoint()

    def extend(
        self,
        token_ids: npt.NDArray[np.int64] | Sequence[int],
        *,
        cancel: Cancel | None = None,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
        images: Sequence[PromptImage] = (),
    ) -> int:
        """Reads tokens behind the position, in chunks that end at absolute multiples of `batch_tokens`.

        With fixed state chunks also end at the positions `checkpoint_at`, where a checkpoint is taken. Makes no logits.
        At the positions of `images`, which are the timeline's, the pictures are read instead of the ids; those that end
        before the position are not looked at. Where the model lets a picture see itself, no chunk ends inside one and
        no checkpoint is taken there.
        `cancel` is asked before each chunk. `on_chunk` is told the position after each; on CUDA as many chunks as there
        are stages may then still be running. Returns the position reached. Raises ContextFull (nothing was read) and
        StageFailed (whole chunks before it are kept, with linear layers those before the last checkpoint). For images:
        UnreadableImage, and ValueError if one that sees itself is cut by the position or by the end of `token_ids`.
        """
        ids = np.ascontiguousarray(token_ids, dtype=np.int64)
        origin, end = self._position, self._position + len(ids)
        self._check_room(len(ids))
        reading = self._images.reading(images, self._position, end)
        stops = sorted(set(checkpoint_at)) if self.fixed_state.exists else []
        if reading is not None:
            stops = [place for place in stops if not reading.cuts(place)]
        running = ChunksUnderWay(self.stages)
        while self._position < end and not (cancel is not None and cancel.is_set()):
            start = self._position
            edge = (start // self.batch_tokens + 1) * self.batch_tokens
            stop = min(end, edge, next((place for place in stops if place > start), end))
            if reading is not None:
                stop = reading.stop_for(start, stop)
            chunk, offset = self._images.chunk(reading, start, stop)
            with self._recovering():
                self._forward.run(ids[start - origin : stop - origin], start, "prefill", chunk)
            self._images.was_read(start, chunk, offset)
            self._position = stop
            if stop in stops:
                self.checkpoint()
            running.add()
            if on_chunk is not None:
                on_chunk(stop)
        running.wait()
        return self._position

    def step(self, token_id: int) -> torch.Tensor:
        """Runs one token at the position, through the path that decoding takes.

        Returns the logits of what follows it, float32 `[vocab]`, on the last device. Raises ContextFull, StageFailed.
        """
        self._check_room(1)
        return self._decoded([token_id])[0]

    def guess(self, token_id: int, count: int, choose: Choose) -> list[int]:
        """Tokens that the draft head guesses to follow `token_id`, which comes at the position: `count`, or fewer where
        the context ends. The timeline stays as it is. Raises StageFailed."""
        start = self._position
        count = min(count, self.draft_tokens, self.context_tokens - start - 1)
        if self.draft is None or count < 1:
            return []
        return self._forward.guess(self.draft, token_id, start, self._images.offset.value, count, choose)

    def verify(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Runs a token and guesses of what follows it, at most `draft_tokens`, all at once.

        Returns the logits behind each, float32 `[q, vocab]`. Until more is read the timeline can be cut to every
        position from behind the first token on, as if the guesses beyond had never been made. Raises ContextFull,
        StageFailed.
        """
        self._check_room(len(token_ids))
        with self.fixed_state.recorded(self._position, len(token_ids)):
            return self._decoded(token_ids)

    def _decoded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 `[q, vocab]`."""
        forward, start, offset = self._forward, self._position, self._images.offset
        # At 0 a layer of linear attention has no state to go on from, which is another computation than was recorded.
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
        """A forward inside that fails leaves the position a valid one."""
        try:
            yield
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """After a forward that broke midway: some layers have moved on, others have not."""
        if not self.fixed_state.is_exact_once:
            return  # rows beyond the position mean nothing, and windows reach back behind it
        position = self.fixed_state.last_before(self._position)
        if position:
            self._go_back(position)
            self._position = position
        else:
            self.reset()

    def _go_back(self, position: int) -> None:
        """To the checkpoint held there."""
        self.fixed_state.go_back(position)
        self._images.offset.reload()

    def _check_room(self, tokens: int) -> None:
        if self._position + tokens > self.context_tokens:
            raise ContextFull(self._position, tokens, self.context_tokens)
