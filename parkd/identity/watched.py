"""A chat template whose rendering can be given up: when the client has left, or when it takes too long.

A template is a program over what a client sends, and nothing interrupts it from outside. But whatever it does for many
messages, it reads their fields. So the messages look at the time now and then when they are read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from parkd.engine_adapter.base import ChatTemplate, Rendered
from parkd.errors import RenderingTooLong
from parkd.types import StillWanted

RENDER_CPU_S = 10.0
"""Seconds of CPU for all renderings of one prompt. 16,000 messages take known templates half a second at most; a prompt
with words of the template's own in its messages is rendered up to 128 times."""
READS_A_LOOK = 64
"""Fields that are read between two looks at the time, which takes as long as some of them."""


class WatchedTemplate:
    """A `ChatTemplate` for one prompt; used by one thread."""

    def __init__(self, template: ChatTemplate, still_wanted: StillWanted) -> None:
        self._template = template
        self._still_wanted = still_wanted
        self._until_s = time.thread_time() + RENDER_CPU_S
        self._reads = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Raises Cancelled and RenderingTooLong besides."""
        self.look()
        watched = [_Message(message, self) for message in messages]
        return self._template.render(watched, tools, kwargs, add_generation_prompt=add_generation_prompt)

    def read(self) -> None:
        self._reads += 1
        if self._reads % READS_A_LOOK == 0:
            self.look()

    def look(self) -> None:
        self._still_wanted()
        if time.thread_time() > self._until_s:
            raise RenderingTooLong(f"it takes more than {RENDER_CPU_S:.0f} s of CPU")


class _Message(dict[str, Any]):
    """A message that tells when a field is read."""

    __slots__ = ("_watch",)

    def __init__(self, message: Mapping[str, Any], watch: WatchedTemplate) -> None:
        super().__init__(message)
        self._watch = watch

    def __copy__(self) -> _Message:
        return _Message(self, self._watch)

    def __getitem__(self, name: str) -> Any:
        self._watch.read()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._watch.read()
        return super().get(name, default)
