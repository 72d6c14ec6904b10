"""Compiles and tunes kernels before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from parkd_engine.session import Session

TAIL_TOKENS = 16
"""About the tokens that a turn adds to a known prompt. Different kernels are chosen for so few than for a chunk."""


def tune_prompts(session: Session, progress: Callable[[str, float], None] | None) -> None:
    """Reads chunks of token 0, in lengths typical of prompts. Resets the session."""
    if progress is not None:
        progress("Tuning the prompt kernels", 0.0)
    chunk = np.zeros(min(session.batch_tokens, session.context_tokens), dtype=np.int64)
    for tokens in (len(chunk), len(chunk) // 2, TAIL_TOKENS):
        session.extend(chunk[:tokens])
        # After existing rows.
        session.extend(chunk[: min(TAIL_TOKENS, session.context_tokens - session.position)])
        session.reset()
    if progress is not None:
        progress("Tuning the prompt kernels", 1.0)
