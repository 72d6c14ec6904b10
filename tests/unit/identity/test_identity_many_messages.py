"""Far more messages than fit: refused before they are rendered."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.errors import ContextOverflow
from parkd.identity.builder import IdentityBuilder
from parkd.types import TurnRequest
from tests.fakes.text import FakeTemplate, FakeTokenizer

CONTEXT_TOKENS = 100


class Counting(FakeTemplate):
    """Counts how often it renders."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered = 0

    def render(self, *args: Any, **kwargs: Any) -> Any:
        self.rendered += 1
        return super().render(*args, **kwargs)


def test_far_more_messages_than_fit_are_not_rendered() -> None:
    """Found by use 4: rendering as many messages as a body can have took ten seconds of a thread that all share."""
    template = Counting()
    builder = IdentityBuilder(FakeTokenizer(), template, b"f" * 16, 8, 1 << 20, context_tokens=CONTEXT_TOKENS)
    before = template.rendered
    message = {"role": "user", "content": ""}
    with pytest.raises(ContextOverflow, match="201"):
        builder.build(TurnRequest([message] * 201))
    assert template.rendered == before
    builder.build(TurnRequest([message] * 200))
    assert template.rendered > before
