"""Several answers to one prompt (`n`), which are generated beside each other where the lane is wide enough: one encoder
each, and one for all.

events    0 Started  0 text  1 Started  0 text  1 text ... 0 Finished ... 1 Finished
frames    index 0 ........   index 1    index 0 index 1 ... index 0       index 1     usage of all, [DONE]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from parkd.errors import ParkdError
from parkd.proxy.dialects.base import Encoder
from parkd.state import DraftCounts
from parkd.types import Event, Finished


class ChoiceEncoder(Encoder, Protocol):
    """An encoder of one choice."""

    def choice_end(self, finished: Finished) -> bytes:
        """The choice's last frame."""

    def stream_end(self, finished: Finished) -> Iterable[bytes]:
        """The frames that end the stream."""

    def totals(self, finished: Finished) -> Mapping[str, Any]:
        """The fields of the document about all choices together."""


class Choices:
    """Implements `Encoder` over the encoders of the choices, whose events come in any order."""

    def __init__(self, encoders: Sequence[ChoiceEncoder]) -> None:
        self._encoders = encoders
        self._ended: dict[int, Finished] = {}

    def feed(self, event: Event, number: int = 0) -> Iterable[bytes]:
        """The same for the answer `number`."""
        encoder = self._encoders[number]
        frames = encoder.feed(event)
        if not isinstance(event, Finished):
            return frames
        self._ended[number] = event
        last = encoder.choice_end(event)
        if len(self._ended) < len(self._encoders):
            return [last]
        return [last, *encoder.stream_end(self._in_all())]

    def keep_alive(self) -> bytes:
        return self._encoders[0].keep_alive()

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        return self._encoders[0].failure(error)

    def document(self) -> Mapping[str, Any]:
        documents = [encoder.document() for encoder in self._encoders]
        choices = [choice for document in documents for choice in document["choices"]]
        return {**documents[0], "choices": choices, **self._encoders[0].totals(self._in_all())}

    def _in_all(self) -> Finished:
        return in_all([self._ended[number] for number in sorted(self._ended)])


def in_all(ended: Sequence[Finished]) -> Finished:
    """The counts of all answers. The prompt is that of the first."""
    first, timings = ended[0], [finished.timings for finished in ended]
    return replace(
        first,
        reasoning_tokens=sum(finished.reasoning_tokens for finished in ended),
        timings=replace(
            first.timings,
            output_tokens=sum(each.output_tokens for each in timings),
            decode_s=sum(each.decode_s for each in timings),
            paused_s=sum(each.paused_s for each in timings),
            pauses=sum(each.pauses for each in timings),
            drafts=sum((each.drafts for each in timings), DraftCounts()),
        ),
    )
