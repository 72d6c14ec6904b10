"""Keeps the library's progress bars off the terminal, where the engine's own progress is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as library_logging


@contextmanager
def no_library_bars() -> Iterator[None]:
    """For the whole process, since the library knows no other way; put back at the end."""
    shown = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library_logging.enable_progress_bar()
