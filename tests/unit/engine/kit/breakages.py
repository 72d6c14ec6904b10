"""What may break in the middle of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parkd_engine.arenas.cache_layers import WindowTimeline
from torch.utils._python_dispatch import TorchDispatchMode

TAKES_MEMORY = frozenset({"clone", "empty", "empty_like"})


class MemoryFor(TorchDispatchMode):
    """A card that has memory for `tensors` new ones and no more."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.left = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in TAKES_MEMORY:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@contextmanager
def windows_move_in(memory: MemoryFor) -> Iterator[None]:
    """Inside, the buffers of windows are moved with no more memory than that."""
    make_room = WindowTimeline._make_room

    def move(timeline: WindowTimeline, count: int) -> None:
        with memory:
            make_room(timeline, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowTimeline, "_make_room", move)
        yield


class Fuse:
    """Burns through at its `uses`-th use."""

    def __init__(self, uses: int) -> None:
        self.left = uses

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("injected")

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self()
            return function(*arguments, **named)

        return call

    def behind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self()
            return result

        return call
