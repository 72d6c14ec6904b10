"""No bar of the library is shown beside parkd's own progress (found by use 24: in a pipe each step was a line)."""

from __future__ import annotations

import pytest
from parkd_engine.loading.library_bars import no_library_bars
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as library_logging


def test_no_bar_is_shown_inside_and_all_is_as_before_after(capsys: pytest.CaptureFixture[str]) -> None:
    before = modeling_gguf_pytorch_utils.tqdm, library_logging.is_progress_bar_enabled()
    with no_library_bars():
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting")) == [1, 2]
        assert list(library_logging.tqdm([1, 2], desc="Loading")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert (modeling_gguf_pytorch_utils.tqdm, library_logging.is_progress_bar_enabled()) == before
