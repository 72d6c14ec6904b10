"""What compiles or tunes itself does so before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.session import Session

TAIL_TOKENS = 16
"""About what a turn adds to a prompt that is already there: other kernels are chosen for so few than for a chunk."""


def tune_prompts(session: Session, progress: Callable[[str, float], None] | None) -> None:
    """Reads chunks of nothing, of the lengths that prompts come in. Forgets the timeline."""
    if progress is not None:
        progress("Tuning the prompt kernels", 0.0)
    chunk = np.zeros(min(session.batch_tokens, session.context_tokens), dtype=np.int64)
    for tokens in (len(chunk), len(chunk) // 2, TAIL_TOKENS):
        session.extend(chunk[:tokens])
        # Behind rows that are there.
        session.extend(chunk[: min(TAIL_TOKENS, session.context_tokens - session.position)])
        session.reset()
    if progress is not None:
        progress("Tuning the prompt kernels", 1.0)
