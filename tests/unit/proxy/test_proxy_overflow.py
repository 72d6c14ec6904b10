"""What is advised for a prompt that is too long."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from parkd.errors import ContextOverflow
from parkd.proxy.dialects.anthropic_errors import error_document
from parkd.proxy.prompts import Prompts
from parkd.types import TurnRequest


def refused(prompt_tokens: int, context_tokens: int, model_tokens: int) -> ContextOverflow:
    info = SimpleNamespace(most_units=context_tokens, model_tokens=model_tokens)
    prompts: Any = SimpleNamespace(_services=SimpleNamespace(engine=SimpleNamespace(info=info)))
    with pytest.raises(ContextOverflow) as overflow:
        Prompts.check_fits(prompts, prompt_tokens, TurnRequest(messages=[]))
    return overflow.value


def test_no_larger_context_is_advised_than_the_model_supports() -> None:
    """A `--ctx-size` above the model's limit is refused at start."""
    assert "--ctx-size (at most 8192)" in refused(2000, 1024, 8192).message
    full = refused(2000, 1024, 1024).message
    assert "--ctx-size" not in full
    assert "the model supports no longer context" in full
    assert "--ctx-size, if the model supports one" in refused(2000, 1024, 0).message


def test_the_longest_prompt_is_said_to_be_one_length() -> None:
    """A token of the context is left for the answer, however long the prompt was."""
    said = [error_document(refused(tokens, 1024, 0), "r")["error"]["message"] for tokens in (1024, 1025, 9000)]
    assert {re.sub(r"\d+ tokens > ", "", text) for text in said} == {"prompt is too long: 1023 maximum"}
