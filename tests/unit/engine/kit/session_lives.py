"""Random lives of a session: whatever happens to it, its state is that of the forwards in its log, and so is what it
says next."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from parkd_engine import Session, capture, restore_and_read
from parkd_engine.moves.transfer import CopySteps

from parkd.errors import ContextFull, SnapshotDamaged, StageFailed
from parkd.words.steering import Steering
from tests.lives.life import Step
from tests.unit.engine.kit.breakages import Fuse
from tests.unit.engine.kit.core_models import step_with_guesses
from tests.unit.engine.kit.live_forwards import Parked
from tests.unit.engine.kit.logged_session import BATCH, CONTEXT, ROOM, LoggedSession

MOST_PARKED = 4
STEERED_LAYER = 2


class Life(LoggedSession):
    """One session's. Every public method is something that may happen to it."""

    def go_on(self, events: int) -> None:
        """So many things happen to it, each of them followed by a look at the state, and some by an answer."""
        for _ in range(events):
            if self.session.position > CONTEXT - ROOM:
                self.forget()
            [step] = self.steps(STEPS, 1)
            with self.history.told():
                getattr(self, self.history.note(step))()
                self.check()
                if self.chance(0.3):
                    self.compare_answers(self.text(1)[0])
                    self.check()

    # -- reading --

    def read(self) -> None:
        tokens, start = self._prompt(), self.session.position
        self._extend(tokens, checkpoint_at=[start + self.up_to(len(tokens)) for _ in range(self.up_to(3) - 1)])

    def leave(self) -> None:
        left = [self.up_to(3)]

        class Leaving:
            def is_set(self) -> bool:
                left[0] -= 1
                return left[0] < 0

        self._extend(self._prompt(), cancel=Leaving())
        self._settle()

    def fail_read(self) -> None:
        tokens = self._prompt()
        with suppress(StageFailed), self._breaking():
            self._extend(tokens)
        self._settle()

    def overfill(self) -> None:
        """More than there is room for changes nothing."""
        room = CONTEXT - self.session.position
        with pytest.raises(ContextFull):
            self.session.extend([1] * (room + 1))
        if self._may_verify:
            with pytest.raises(ContextFull):
                self.session.verify([1] * (room + 1))

    # -- answering --

    def answer(self) -> None:
        for token in self.text(self.up_to(4)):
            self.compare_answers(token)

    def fail_answer(self) -> None:
        token = self.text(1)[0]
        try:
            with self._breaking():
                step_with_guesses(self.session, token)
            self._note("step", [token])
        except StageFailed:
            self._go_to(self.session.position)

    def verify(self) -> None:
        """Several tokens at once, of which only the first few turn out to be said."""
        if self._may_verify:
            tokens = self.text(self.up_to(3))
            self.session.verify(tokens)
            self._note("verify", tokens)
            self._go_to(self.session.position - len(tokens) + self.up_to(len(tokens)), truncate=True)

    def fail_verify(self) -> None:
        if not self._may_verify:
            return
        tokens = self.text(3)
        try:
            with self._breaking():
                self.session.verify(tokens)
            self._note("verify", tokens)
        except StageFailed:
            self._go_to(self.session.position)

    # -- going back --

    def checkpoint(self) -> None:
        self.session.checkpoint()

    def go_back(self) -> None:
        session = self.session
        places = [0, *session.checkpoints, *range(session.rewind_floor, session.position + 1)]
        place = self.pick([session.rewind_floor, self.pick(places[-3:]), self.pick(places)])
        if self.processor is not None and self.processor.family.sees_itself:
            place = next((image.start for image in self._images if image.start < place < image.stop), place)
            if place not in places:
                return
        self._go_to(place, truncate=True)
        self._settle()

    def forget(self) -> None:
        self.session.reset()
        self._go_to(0)

    def steer(self) -> None:
        """Another conversation's steering: what is live is of no use to it."""
        scale = self.pick([0.0, 0.5, 2.0])
        ours = [parked for parked in self.parked if parked.steering.digest == _steering(self.session, scale).digest]
        if ours and self.chance(0.7):
            self._restore(self.pick(ours))
        else:
            self.forget()
        self.steering = _steering(self.session, scale)
        self.session.steer(self.steering)
        self._settle()

    # -- parking --

    def park(self) -> None:
        if self.session.position:
            plan = self._whole_plan()
            sums = capture(self.session, plan)
            fixed = sums.fixed if len(sums.fixed) else None
            plan = replace(plan, checksums=sums.rows, fixed_checksums=fixed)
            self.parked = [*self.parked[1 - MOST_PARKED :], Parked(list(self.log), plan, self.steering)]

    def fail_park(self) -> None:
        if self.session.position:
            steps = CopySteps(host=Fuse(self.up_to(4)).behind(np.copyto))
            with suppress(StageFailed):
                capture(self.session, self._whole_plan(), steps=steps)

    def restore(self) -> None:
        if ours := self._ours():
            self._restore(self.pick(ours))
            self._settle()

    def fail_restore(self) -> None:
        """A byte of what is restored has changed, or its copy breaks off; the prompt's tail may be read meanwhile."""
        for parked in self._ours()[:1]:
            plan, steps = self._start(parked), CopySteps()
            buffers = [part.buffer for stage in plan.stages for part in (*stage.rows, *stage.fixed) if len(part.buffer)]
            if not buffers:
                return
            if self.chance(0.5):
                steps = CopySteps(host=Fuse(1).behind(np.copyto))
            else:
                buffer = self.pick(buffers)
                buffer[self.up_to(len(buffer)) - 1] ^= 1 << (self.up_to(8) - 1)
            tail = np.array(self.text(20)[: CONTEXT - plan.position]) if self.chance(0.5) else np.array([], np.int64)
            with pytest.raises(SnapshotDamaged):
                restore_and_read(self.session, plan, tail, steps=steps)
            self._go_to(0)

    def restore_and_read_on(self) -> None:
        for parked in self._ours()[:1]:
            plan = self._start(parked)
            images = [image for forward in parked.log for image in forward.images]
            if any(image.start < plan.position < image.stop for image in images):
                return
            tokens = self.text(self.up_to(50))[: CONTEXT - ROOM // 2 - plan.position]
            if not tokens:
                return
            start, stop = plan.position, plan.position + len(tokens)
            marks = [start + self.up_to(len(tokens))]
            try:
                with self._breaking() if self.chance(0.3) else ExitStack():
                    restore_and_read(self.session, plan, np.array(tokens), checkpoint_at=marks)
            except (StageFailed, SnapshotDamaged):
                self._go_to(0)
                return
            self._adopt(parked, start)
            edges = range((start // BATCH + 1) * BATCH, stop, BATCH)
            ends = sorted({start, *edges, *(marks if self.has_fixed else ()), stop})
            for first, last in pairwise(ends):
                self._note("chunk", tokens[first - start : last - start])


def _steering(session: Session, scale: float) -> Steering:
    if not scale:
        return Steering()
    direction = torch.linspace(-scale, scale, session.config.hidden_size).numpy()
    return Steering(repr(scale).encode(), {STEERED_LAYER: direction})


STEPS = (
    Step("read", 5),
    Step("leave", 2),
    Step("fail_read", 4),
    Step("overfill", 1),
    Step("answer", 3),
    Step("fail_answer", 2),
    Step("verify", 3),
    Step("fail_verify", 2),
    Step("checkpoint", 2),
    Step("go_back", 4),
    Step("forget", 1),
    Step("steer", 1),
    Step("park", 5),
    Step("fail_park", 1),
    Step("restore", 4),
    Step("restore_and_read_on", 3),
    Step("fail_restore", 1),
)
