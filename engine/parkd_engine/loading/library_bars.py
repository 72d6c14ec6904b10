"""Hides transformers' progress bars, since parkd prints its own progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as library_logging


@contextmanager
def no_library_bars() -> Iterator[None]:
    """A context without progress bars, for the whole process: transformers has only a global switch. Restores its state
    at the end."""
    shown = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library_logging.enable_progress_bar()
