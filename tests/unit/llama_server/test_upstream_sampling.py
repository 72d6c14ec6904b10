"""What a llama-server is told of sampling."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.engine_adapter.llama_server.sampling import sampling_fields
from parkd.types import SamplingParams


def chain(**settings: Any) -> tuple[list[str], int]:
    fields = sampling_fields(SamplingParams(**settings), 4096, 7)
    return fields["samplers"], fields["top_k"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.0}, (["top_k"], 1)),
        ({"temperature": 0.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1}, (["top_k"], 1)),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, (["penalties", "top_k"], 1)),
        ({"temperature": 1.0}, (["temperature"], 0)),
        ({"temperature": 0.8, "top_k": 40}, (["top_k", "temperature"], 40)),
        ({"temperature": 0.8, "top_p": 0.9}, (["temperature", "top_p"], 0)),
        ({"temperature": 0.8, "top_p": 0.9, "min_p": 0.05}, (["temperature", "top_p", "min_p"], 0)),
        ({"presence_penalty": 0.5, "top_k": 3}, (["penalties", "top_k", "temperature"], 3)),
        ({"frequency_penalty": -0.5}, (["penalties", "temperature"], 0)),
    ],
    ids=str,
)
def test_only_samplers_that_change_something_are_run_and_the_cheap_ones_first(
    settings: dict[str, Any], expected: tuple[list[str], int]
) -> None:
    """Each costs time in proportion to the vocabulary, in every token."""
    assert chain(**settings) == expected
