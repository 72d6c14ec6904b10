"""A session beside another that only ever read on: the two must agree in every bit.

log      [chunk 0..16) [chunk 16..30) [step 30) ...       the forwards that the session's state is made of
shadow   the log alone, on a new session with windows that never move
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import Session, restore
from parkd_engine.vision.tower import PromptImage

from parkd.state import FixedPart, RowRun, StageTransfer, Transfer
from parkd.words.steering import Steering
from tests.lives.life import Choices, History
from tests.unit.engine.kit.breakages import Fuse, MemoryFor, windows_move_in
from tests.unit.engine.kit.core_models import VOCAB, step_with_guesses
from tests.unit.engine.kit.live_forwards import BLOCK, Forward, Log, Parked, cut
from tests.unit.engine.kit.recordings import Replay
from tests.unit.engine.kit.vision_models import IMAGE_ID, png

CONTEXT, BATCH, SLACK = 176, 16, 6
ROOM = 24
"""Of the context, that is left for what comes next."""
SIZES = ((32, 32), (64, 48), (33, 90))
"""Width and height of pictures."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of models that have some."""

OpenSession = Callable[[int], Session]
"""Takes the slack of windows."""


class LoggedSession(Choices):
    """A session, the log of its live forwards, and its shadow."""

    def __init__(self, open_session: OpenSession, seed: int, graphs: Sequence[Replay] = ()) -> None:
        """`graphs` of the first session that is opened fill up with it."""
        super().__init__(np.random.default_rng(seed))
        self.history = History(seed)
        self._open = open_session
        self.session = open_session(SLACK)
        self.graphs = tuple(graphs)
        self.log: Log = []
        self.parked: list[Parked] = []
        self.steering = Steering()
        self._images: list[PromptImage] = []
        self._shadow: Session | None = None
        self._shadow_log: Log = []
        self._shadow_fixed: dict[int, list[torch.Tensor]] = {}
        """The shadow's fixed state where each of its forwards ended."""

    @property
    def has_fixed(self) -> bool:
        return self.session.fixed_state.exists

    @property
    def processor(self) -> Any:
        vision = self.session.vision
        return None if vision is None else vision.processor

    def text(self, count: int) -> list[int]:
        ids = self.random.integers(0, VOCAB, min(count, CONTEXT - self.session.position))
        return [0 if token == IMAGE_ID else int(token) for token in ids]

    def check(self) -> None:
        """The state is that of the log to the bit, and so is each checkpoint."""
        mine, other = self.session, self._caught_up()
        assert mine.position == other.position == (self.log[-1].stop if self.log else 0)
        assert all(0 < place <= mine.position for place in mine.checkpoints)
        assert 0 <= mine.rewind_floor <= mine.position
        if mine.fixed_state.is_exact_once and self.log:
            last = self.log[-1]  # Only of a checked step tokens can be taken back.
            assert mine.rewind_floor >= (last.start + 1 if last.how == "verify" else last.stop)
        if mine.position == 0:
            return
        for one, two in zip(mine.arenas, other.arenas, strict=True):
            for field in one.layout.row_fields:
                rows = (arena.field_view(field)[: mine.position] for arena in (one, two))
                assert torch.equal(*rows), f"{field.name} of layer {field.layer}"
        before = [arena.fixed.clone() for arena in mine.arenas]
        self._check_fixed(mine.position, mine.fixed_state.live(mine.position))
        for arena, fixed in zip(mine.arenas, before, strict=True):
            arena.fixed.copy_(fixed)  # Looking must not bring about what was forgotten.
        for place in mine.checkpoints:
            self._check_fixed(place, mine.fixed_state.at(place))

    def _check_fixed(self, position: int, states: list[torch.Tensor] | None) -> None:
        assert states is not None
        for arena, state, expected in zip(self.session.arenas, states, self._shadow_fixed[position], strict=True):
            for field in arena.layout.fixed_fields:
                parts = (each[field.offset : field.offset + field.nbytes] for each in (state, expected))
                assert torch.equal(*parts), f"{field.name} of layer {field.layer} at {position}"

    def compare_answers(self, token: int) -> None:
        """What is said next, and what a draft head guesses, are those of the log too."""
        other = self._caught_up()
        for mine, expected in zip(step_with_guesses(self.session, token), step_with_guesses(other, token), strict=True):
            assert torch.equal(mine, expected)
        self._note("step", [token])
        self._shadow_log.append(self.log[-1])
        self._look_at(other)

    @property
    def _may_verify(self) -> bool:
        return self.session.draft is not None or not self.session.fixed_state.is_exact_once

    def _prompt(self) -> list[int]:
        """More tokens, sometimes with a picture in their middle."""
        more = self.text(self.up_to(min(50, CONTEXT - ROOM // 2 - self.session.position)))
        if self.processor is None or self.chance(0.5):
            return more
        number = int(self.random.integers(len(SIZES)))
        data = png(number, *SIZES[number])
        half, tokens = len(more) // 2, self.processor.facts(data).tokens
        start = self.session.position + half
        if start + tokens + len(more) - half > CONTEXT - ROOM // 2:
            return more
        self._images.append(PromptImage(start, start + tokens, data))
        return [*more[:half], *[IMAGE_ID] * tokens, *more[half:]]

    def _extend(self, tokens: list[int], **arguments: Any) -> None:
        start, stops = self.session.position, [self.session.position]
        images = list(self._images)
        try:
            self.session.extend(tokens, on_chunk=stops.append, images=images, **arguments)
        finally:
            for first, last in pairwise(stops):
                self._note("chunk", tokens[first - start : last - start])
            self._go_to(self.session.position)
            self._images = images

    def _settle(self) -> None:
        """A picture that was left in its middle is read to its end: nothing else may follow there."""
        position = self.session.position
        self._images = [image for image in self._images if image.start < position]
        if self._images and self._images[-1].stop > position:
            self._extend([IMAGE_ID] * (self._images[-1].stop - position))

    def _note(self, how: str, tokens: Sequence[int]) -> None:
        start = self.log[-1].stop if self.log else 0
        stop = start + len(tokens)
        images = tuple(image for image in self._images if image.start < stop and start < image.stop)
        self.log.append(Forward(how, tuple(tokens), start, stop, images))

    def _go_to(self, position: int, *, truncate: bool = False) -> None:
        if truncate:
            self.session.truncate(position)
        self.log = cut(self.log, position)
        self._images = [image for image in self._images if image.start < position]

    def _whole_plan(self) -> Transfer:
        session = self.session
        places = sorted({*session.checkpoints, session.position}) if self.has_fixed else []
        stages = []
        for arena in session.arenas:
            rows = RowRun(0, session.position, np.empty(session.position * arena.layout.row_bytes, np.uint8))
            fixed = (FixedPart(place, np.empty(arena.layout.fixed_bytes, np.uint8)) for place in places)
            stages.append(StageTransfer((rows,), tuple(fixed)))
        return Transfer(session.layout.digest, 0, session.position, BLOCK, tuple(stages))

    def _ours(self) -> list[Parked]:
        ours = [parked for parked in self.parked if parked.steering.digest == self.steering.digest]
        return [ours[index] for index in self.random.permutation(len(ours))]

    def _start(self, parked: Parked) -> Transfer:
        """A plan that restores some position of it, and leaves in place what both have in common."""
        position = self.pick(parked.places or range(1, parked.plan.stop + 1))
        shared = 0
        for mine, theirs in zip(self.log, parked.log, strict=False):
            if mine != theirs:
                break
            shared = mine.stop
        start = self.pick(range(0, min(shared, position) + 1, BLOCK))
        return parked.part(start, position)

    def _restore(self, parked: Parked) -> None:
        plan = self._start(parked)
        restore(self.session, plan)
        self._adopt(parked, plan.position)

    def _adopt(self, parked: Parked, position: int) -> None:
        self.log = cut(parked.log, position)
        self._images = list(dict.fromkeys(image for forward in self.log for image in forward.images))
        self._images = [image for image in self._images if image.start < position]

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Inside, something fails sooner or later, if it is used at all."""
        fuse, session = Fuse(self.up_to(3)), self.session
        where = self.pick(["layer", "layer", "graph", "draft", "windows"])
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            wrap = self.pick([fuse.before, fuse.behind])
            if where == "graph" and self.graphs:
                graph = self.pick(self.graphs)
                patch.setattr(graph, "run", wrap(graph.run))
            elif where == "draft" and session.draft is not None:
                patch.setattr(session.draft, "read", wrap(session.draft.read))
            elif where == "windows":
                stack.enter_context(windows_move_in(MemoryFor(self.up_to(4) - 1)))
            else:
                layer = self.pick([layer for stage in session.stages for layer in stage.layers])
                patch.setattr(layer, "forward", wrap(layer.forward))
            yield

    def _caught_up(self) -> Session:
        """The shadow, once it has read the log."""
        shadow, known = self._shadow, len(self._shadow_log)
        if shadow is None or self.log[:known] != self._shadow_log or shadow.steering_digest != self.steering.digest:
            self._shadow = shadow = self._open(CONTEXT)
            shadow.steer(self.steering)
            self._shadow_fixed, known = {}, 0
        for forward in self.log[known:]:
            if forward.how == "chunk":
                shadow.extend(forward.tokens, images=forward.images)
            elif forward.how == "step":
                shadow.step(forward.tokens[0])
            else:
                shadow.verify(self._with_other_guesses(forward))
            shadow.truncate(forward.stop)
            self._look_at(shadow)
        self._shadow_log = list(self.log)
        return shadow

    def _look_at(self, shadow: Session) -> None:
        states = shadow.fixed_state.live(shadow.position)
        self._shadow_fixed[shadow.position] = [state.clone() for state in states]

    def _with_other_guesses(self, forward: Forward) -> list[int]:
        """In place of those that were taken back, which must have left no bit behind: but that experts take all tokens
        of a step together."""
        kept = forward.stop - forward.start
        if any(getattr(self.session.config, name, None) for name in EXPERTS):
            kept = len(forward.tokens)
        return [*forward.tokens[:kept], *((token + 7) % VOCAB for token in forward.tokens[kept:])]
