"""Shortens the log lines of libraries that load a model or read what clients send."""

from __future__ import annotations

import logging
import warnings
from typing import TextIO

log = logging.getLogger("parkd")

KERNELS_LOGGER = "transformers.integrations.hub_kernels"
_PLAIN = "falling back to its reference PyTorch implementation"


class PlainKernels(logging.Filter):
    """Replaces the line that the library logs for each function without a kernel by one line for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        if _PLAIN not in record.getMessage():
            return True
        if not self._is_told:
            self._is_told = True
            log.info(
                "recurrent layers run in plain PyTorch: correct, but on NVIDIA GPUs slower than with the packages "
                "flash-linear-attention and causal-conv1d"
            )
        return False


def hide_bars_in_pipes(output: TextIO) -> None:
    """Without a terminal, each step of the hub library's bars would be a line of its own."""
    if not output.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def shorten_library_notes() -> None:
    """Installs the filters. Idempotent."""
    # A client's damaged EXIF data can hold 65,535 tags, and is of no consequence: the picture is read without them.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")
    logger = logging.getLogger(KERNELS_LOGGER)
    if not any(isinstance(known, PlainKernels) for known in logger.filters):
        logger.addFilter(PlainKernels())
