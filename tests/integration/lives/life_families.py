"""Random lives of the whole server over tiny models of every family: answers are those of the same model that reads the
prompt for the first time, and all state is, but for rounding, that of its tokens.

The state of a fake engine depends on nothing but tokens. A model's numbers also depend, in their last bits, on how a
prompt was cut, so they are compared within a tolerance, and greedy answers token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from parkd_engine.arenas.layout import Field

from parkd.config import ModelConfig
from parkd.engine_adapter.base import Cancel
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import Checksums, EngineConfig, Transfer
from parkd.types import TokenIds, Units
from tests.integration.api.api_harness import MIB
from tests.integration.lives.api_lives import Life
from tests.integration.lives.life_engines import Reference

CONTEXT, ROOM = 2048, 900
TOLERANCE = 2e-3
"""Of numbers of the state in float32, about 1 in size, between two ways to cut a prompt."""


@dataclass(frozen=True)
class Hooked:
    """A cancellation flag that is looked at before each chunk."""

    cancel: Cancel
    look: Callable[[], None]

    def is_set(self) -> bool:
        if self.cancel.is_set():
            return True
        self.look()
        return False


class HookedEngine(TorchEngine):
    """Calls `hook` where a fake engine does. It is used again after a server has closed it, with nothing in it."""

    hook: Callable[[str, int], None] = staticmethod(lambda _name, _number: None)

    def extend(
        self,
        token_ids: TokenIds,
        *,
        cancel: Cancel,
        on_chunk: Callable[[int], None] | None = None,
        checkpoint_at: Sequence[int] = (),
    ) -> int:
        hooked = Hooked(cancel, lambda: self.hook("chunk", self.position))
        return super().extend(token_ids, cancel=hooked, on_chunk=on_chunk, checkpoint_at=checkpoint_at)

    def generate(self) -> Iterator[Sequence[int]]:
        steps = super().generate()

        def hooked() -> Iterator[Sequence[int]]:
            with closing(steps):  # type: ignore[type-var]
                while True:
                    self.hook("token", self.position)
                    step = next(steps, None)
                    if step is None:
                        return
                    yield step

        return hooked()

    def capture(self, transfer: Transfer) -> Checksums:
        self.hook("capture", transfer.stop)
        return super().capture(transfer)

    def restore(self, transfer: Transfer) -> None:
        with self._hooked(transfer):
            super().restore(transfer)

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        with self._hooked(transfer):
            super().restore_and_read(transfer, token_ids, checkpoint_at)

    @contextmanager
    def _hooked(self, transfer: Transfer) -> Iterator[None]:
        with self.emptied_by_failures():
            self.hook("restore", transfer.stop)
            yield
            self.hook("restored", transfer.stop)

    def close(self) -> None:
        self.reset()


class FamilyReference(Reference):
    """The same model, which reads everything anew."""

    def compare(
        self, other: HookedEngine, units: Units, steering: Mapping[str, float] | None, places: Sequence[int] = ()
    ) -> None:
        count = len(units)
        self.read(units.tolist(), steering, sorted(places))
        ours, theirs = self.engine.session, other.session
        assert (ours.position, theirs.position) == (count, count)
        for mine, its in zip(ours.arenas, theirs.arenas, strict=True):
            for field in mine.layout.row_fields:
                _compare(mine.field_view(field)[:count], its.field_view(field)[:count], field, count)
        for place in {count, *places} - {0} if ours.fixed_state.exists else ():
            pairs = zip(ours.fixed_state.bytes_at(place), theirs.fixed_state.bytes_at(place), strict=True)
            for arena, (mine, its) in zip(ours.arenas, pairs, strict=True):
                for field in arena.layout.fixed_fields:
                    _compare(_view(mine, field), _view(its, field), field, place)


def _view(fixed: torch.Tensor, field: Field) -> torch.Tensor:
    return fixed[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)


def _compare(mine: torch.Tensor, its: torch.Tensor, field: Field, place: int) -> None:
    def told(why: str) -> str:
        return f"{field.name} of layer {field.layer} at {place} is not that of its tokens: {why}"

    tolerance = TOLERANCE if mine.is_floating_point() else 0
    torch.testing.assert_close(its, mine, atol=tolerance, rtol=tolerance, msg=told)


class FamilyLife(Life):
    """Of a server with a tiny model of a family. Its clients send text only."""

    room = ROOM
    budgets_bytes = (2 * MIB, 8 * MIB, *[64 * MIB] * 3)
    steerings = ((None,),)

    def __init__(self, family: str, seed: int, weights: Path, folder: Path | None = None) -> None:
        """`weights` is where models are kept that were made once."""
        self._weights = weights
        super().__init__(family, seed, folder)

    def engines_of(self, kind: str) -> FamilyReference:
        def loaded(checkpoints: int, batch: int) -> HookedEngine:
            layout = EngineConfig(
                devices=("cpu",) * self.stages, context_tokens=CONTEXT, batch_tokens=batch, ctx_checkpoints=checkpoints
            )
            return HookedEngine.load(ModelConfig(f"random:{kind}", self._weights, layout=layout))

        self._engine, self._scratch = (loaded(self.ctx_checkpoints, self.batch) for _ in range(2))
        return FamilyReference(loaded(64, 384))

    def fresh_engine(self) -> HookedEngine:
        self._engine.close()
        return self._engine

    def scratch_engine(self) -> HookedEngine:
        self._scratch.close()
        return self._scratch
