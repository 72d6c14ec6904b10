"""What counts as the same request or message (found by use 13: `true`, `1` and `1.0` were one another)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from parkd.types import SamplingParams, TurnRequest
from parkd.types.identical import identical


@dataclass(frozen=True)
class Setting:
    value: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1),
        (1, 1.0),
        (0, False),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2.0}]}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": None}),
        (Setting(1), Setting(True)),
        ("1", 1),
    ],
)
def test_values_of_other_types_or_order_are_not_the_same(one: Any, other: Any) -> None:
    assert not identical(one, other)
    assert not identical(other, one)


@pytest.mark.parametrize("value", [{"a": [1, True, None, "x", 2.5]}, Setting([1.0]), (1, 2), "text", b"bytes"])
def test_equal_values_are_the_same(value: Any) -> None:
    import copy

    assert identical(value, copy.deepcopy(value))


def test_requests_differ_by_types_of_their_settings() -> None:
    request = TurnRequest(messages=[{"role": "user", "content": "x"}], template_kwargs={"n": 1})
    assert identical(request, replace(request))
    assert request == replace(request, template_kwargs={"n": True}), "Python's own equality"
    assert not identical(request, replace(request, template_kwargs={"n": True}))
    assert not identical(request, replace(request, sampling=SamplingParams(temperature=1)))
