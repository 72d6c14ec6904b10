"""Fixed state for the fake engine: what the next row is computed from, true at one position only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from parkd.state import KeptStates, StageTransfer

Words = npt.NDArray[np.uint64]


class FakeFixedState:
    """`words` a stage, and copies of them at earlier positions."""

    def __init__(self, stages: int, words: int, limit: int) -> None:
        self.words = words
        self.live = [np.zeros(words, dtype=np.uint64) for _ in range(stages)]
        self.kept: KeptStates[list[Words]] = KeptStates(limit)

    @property
    def exists(self) -> bool:
        return self.words > 0

    @property
    def positions(self) -> tuple[int, ...]:
        return self.kept.positions

    def keep(self, position: int) -> None:
        if self.exists:
            self.kept.keep(position, lambda _: [words.copy() for words in self.live])

    def held(self, position: int) -> list[Words]:
        """The copy of that position. Raises KeyError."""
        return self.kept.use(position)

    def go_back(self, position: int) -> None:
        """To a checkpoint, or to nothing at 0. Raises KeyError for a position that is not held."""
        if self.exists and position:
            for live, kept in zip(self.live, self.kept.use(position), strict=True):
                live[:] = kept
        self.kept.forget_beyond(position)

    def forget_beyond(self, position: int) -> None:
        self.kept.forget_beyond(position)

    def copy_out(self, stages: tuple[StageTransfer, ...], position: int) -> Words:
        """Fills the parts; returns their checksums `[parts, stages]`. Raises KeyError for a part that is not held."""
        places = [part.position for part in stages[0].fixed]
        sums = np.zeros((len(places), len(stages)), dtype=np.uint64)
        for index, place in enumerate(places):
            held = self.kept.get(place)
            if held is None:
                held = self.live if place == position else self.held(place)
            for number, (stage, words) in enumerate(zip(stages, held, strict=True)):
                assert stage.fixed[index].position == place
                stage.fixed[index].buffer[:] = words.view(np.uint8)
                sums[index, number] = xxhash.xxh3_64_intdigest(words.tobytes())
        return sums

    def copy_in(self, stages: tuple[StageTransfer, ...]) -> Words:
        """Takes over the only part; returns its checksums `[1, stages]`, or `[0, stages]` without fixed state."""
        if not self.exists:
            return np.zeros((0, len(stages)), dtype=np.uint64)
        for words, stage in zip(self.live, stages, strict=True):
            [part] = stage.fixed
            words[:] = part.buffer.view(np.uint64)
        return np.array([[xxhash.xxh3_64_intdigest(words.tobytes()) for words in self.live]], dtype=np.uint64)
