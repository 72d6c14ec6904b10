"""Several fake engines as the seats of one, which takes as many turns at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parkd.engine_adapter.base import Engine, ImageReader, Seat
from tests.fakes.engine import FakeEngine, Hook
from tests.fakes.text import FakeTextStream


class FakeSeats(Engine):
    """Its seats share nothing but what `together` notes and their bound of rows."""

    def __init__(
        self,
        seats: int,
        *,
        turns_at_once: int | None = None,
        has_own_threads: bool = False,
        row_tokens: int = 0,
        hook: Hook | None = None,
        hook_of: Callable[[int], Hook] | None = None,
        **settings: Any,
    ) -> None:
        """`hook_of` gives each seat a hook of its own. `settings` are those of `FakeEngine`."""
        hooks = [hook if hook_of is None else hook_of(number) for number in range(seats)]
        self.fakes = tuple(FakeEngine(hook=each, **settings) for each in hooks)
        first = self.fakes[0]
        self.info = replace(first.info, live_conversations=seats, row_tokens=row_tokens)
        for fake in self.fakes:
            fake.info = self.info
        self.tokenizer, self.template = first.tokenizer, first.template
        self.images: ImageReader | None = first.images
        self._turns_at_once = seats if turns_at_once is None else turns_at_once
        self._has_own_threads = has_own_threads
        self.together: list[tuple[int, ...]] = []
        """The numbers of the seats of each step that several made."""

    @property
    def seats(self) -> Sequence[Seat]:
        return self.fakes

    @property
    def turns_at_once(self) -> int:
        return self._turns_at_once

    @property
    def has_own_threads(self) -> bool:
        return self._has_own_threads

    def step_ahead(self, seats: Sequence[Seat]) -> None:
        self.together.append(tuple(number for number, fake in enumerate(self.fakes) if fake in seats))

    def piece(self, token_id: int) -> bytes:
        return self.fakes[0].piece(token_id)

    def steering_digest(self, scales: Mapping[str, float] | None, adapters: Mapping[int, float] | None = None) -> bytes:
        return self.fakes[0].steering_digest(scales, adapters)

    def text_stream(self) -> FakeTextStream:
        return self.fakes[0].text_stream()

    def close(self) -> None:
        for fake in self.fakes:
            fake.close()
