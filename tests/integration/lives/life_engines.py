"""Engines of every kind of state for random lives, and one that reads everything anew to compare them with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parkd.state import Bytes, Checksums, Transfer
from parkd.types import SamplingParams, Units
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.fakes.rows import chain_of, row_words
from tests.integration.api.api_harness import Messages
from tests.integration.lives.life_dialects import Expected

VECTORS = {"calm": 0.0, "terse": 0.0}
COPY_S = 0.003


class WindowEngine(FakeEngine):
    """Its fixed state can be taken back by a few tokens, as a sliding window with slack can."""

    SLACK_TOKENS = 96
    _floor = 0
    """Before it there is nothing of the window to go back to."""

    @property
    def rewind_floor(self) -> int:
        return max(self._floor, self._position - self.SLACK_TOKENS)

    def reset(self) -> None:
        super().reset()
        self._floor = 0

    def truncate(self, position: int) -> None:
        if position < self.rewind_floor or position in self.checkpoints or position == self._position:
            floor = min(position, self.rewind_floor)
            super().truncate(position)
            self._floor = floor
            return
        chain = np.array([chain_of(self.rows.last(position))], dtype=np.uint64)
        floor = self.rewind_floor
        for stage, live in enumerate(self.fixed.live):
            live[:] = row_words(chain, stage, self.fixed.words)[0]
        self.fixed.forget_beyond(position)
        self._position, self._floor = position, floor

    def restore(self, transfer: Transfer) -> None:
        super().restore(transfer)
        self._floor = transfer.position


@dataclass
class LateCopy:
    """A copy whose bytes arrive only while it is waited for."""

    parts: list[tuple[Bytes, Bytes]]
    checksums: Checksums
    wait_hook: Callable[[], None]

    def wait(self) -> Checksums:
        time.sleep(COPY_S)
        self.wait_hook()
        for buffer, data in self.parts:
            buffer[:] = data
        return self.checksums


class LateEngine(FakeEngine):
    """Captures while it works. The hook has one more step, `copied`, on the thread that waits."""

    def start_capture(self, transfer: Transfer) -> LateCopy:
        checksums = self.capture(transfer)
        buffers = [part.buffer for stage in transfer.stages for part in (*stage.rows, *stage.fixed)]
        late = [(buffer, buffer.copy()) for buffer in buffers]
        for buffer in buffers:
            buffer[:] = 0xEE
        return LateCopy(late, checksums, lambda: self.hook("copied", transfer.stop))


KINDS: dict[str, Callable[..., FakeEngine]] = {
    "rows": FakeEngine,
    "linear": partial(FakeEngine, fixed_bytes=40),
    "window": partial(WindowEngine, fixed_bytes=24),
    "late": LateEngine,
    "late-linear": partial(LateEngine, fixed_bytes=40),
    "opaque": FakeOpaqueEngine,
    "opaque-linear": partial(FakeOpaqueEngine, fixed_bytes=40),
    "file": partial(FakeOpaqueEngine, in_files=True),
}


class Reference:
    """An engine that knows nothing but what it is given, read at once."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def answer(
        self, messages: Messages, max_tokens: int, stop: str | None, steering: Mapping[str, float] | None
    ) -> tuple[Expected, list[int]]:
        """What the model says to a prompt that it has never seen, and the ids of prompt and answer."""
        engine = self.engine
        ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
        self.read(ids[:-1], steering)
        stream, text, told = engine.text_stream(), "", list[int]()
        ended = "length"
        engine.begin(ids, SamplingParams(temperature=0))
        for token in _tokens(engine.generate()):
            told.append(token)
            if token in engine.info.end_token_ids:
                ended = "stop"
                break
            text += stream.push([token])
            if stop is not None and stop in text:
                return Expected(text[: text.index(stop)], "stop string"), [*ids.tolist(), *told]
            if len(told) == max_tokens:
                break
        return Expected(text + str(stream.flush()), ended), [*ids.tolist(), *told]

    def read(self, ids: Sequence[int], steering: Mapping[str, float] | None, places: Sequence[int] = ()) -> None:
        self.engine.reset()
        self.engine.steer(steering)
        self.engine.extend(np.asarray(ids, dtype=np.int64), cancel=threading.Event(), checkpoint_at=places)

    def compare(
        self, other: FakeEngine, units: Units, steering: Mapping[str, float] | None, places: Sequence[int] = ()
    ) -> None:
        """The state of `other` is that of these units, and at `places` its checkpoints are those of their heads."""
        self.read(units.tolist(), steering, sorted(places))
        for ours, theirs in zip(self.engine.rows.arenas, other.rows.arenas, strict=True):
            assert np.array_equal(ours[: len(units)], theirs[: len(units)]), "rows are not those of the units"
        if not other.fixed.exists or not len(units):
            return
        for ours, theirs in zip(self.engine.fixed.live, other.fixed.live, strict=True):
            assert np.array_equal(ours, theirs), "the fixed state is not that of the units"
        for place in places:
            held = other.fixed.kept.get(place)
            assert held is not None
            for ours, theirs in zip(self.engine.fixed.held(place), held, strict=True):
                assert np.array_equal(ours, theirs), f"the checkpoint at {place} is of another state"


def _tokens(steps: Iterator[Sequence[int]]) -> Iterator[int]:
    for step in steps:
        yield from step
