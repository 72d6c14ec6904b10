"""Hides transformers' progress bars, since parkd prints its own progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as library_logging

Item = TypeVar("Item")


def _no_bar(items: Iterable[Item], **_: object) -> Iterable[Item]:
    return items


@contextmanager
def no_library_bars() -> Iterator[None]:
    """A context without progress bars, for the whole process: transformers has only a global switch. Restores its state
    at the end. Its reader of GGUF files does not ask that switch."""
    shown, gguf_bar = library_logging.is_progress_bar_enabled(), modeling_gguf_pytorch_utils.tqdm
    library_logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = _no_bar
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        if shown:
            library_logging.enable_progress_bar()
