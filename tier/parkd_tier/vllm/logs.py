"""Lines of the log: vLLM prints those of its own loggers alone."""

from __future__ import annotations

import logging


def show_logs() -> None:
    """Lets what parkd logs appear where vLLM's lines do."""
    handlers = logging.getLogger("vllm").handlers
    for name in ("parkd", "parkd_tier"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(handlers)
            logger.propagate = not handlers
            logger.setLevel(logging.INFO)
