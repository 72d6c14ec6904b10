"""Divisors that would keep the grammar library busy for minutes are refused; usual ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.answers.schema_multiples import check_multiples
from parkd.errors import InvalidRequest


def both(*divisors: float) -> dict[str, Any]:
    return {"allOf": [{"type": "number", "multipleOf": divisor} for divisor in divisors]}


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 86_400},
        {"multipleOf": 100_000_000},
        {"multipleOf": 3_600_000},
        {"multipleOf": 0.0001},
        {"properties": {"a": {"multipleOf": 99_991}, "b": {"multipleOf": 99_989}}},
        {"properties": {"a": {"multipleOf": 86_400}, "b": {"multipleOf": 0.01}}},
        {"properties": {"multipleOf": {"type": "string"}}},
        both(0.01, 5, 60),
        both(1_000_000, 0.01),
        {"multipleOf": "4000037"},
        None,
    ],
)
def test_usual_divisors_pass(schema: Any) -> None:
    check_multiples(schema, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 4_000_037},
        {"multipleOf": 4_096_000},
        {"multipleOf": 1234.56789},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"properties": {"a": {"multipleOf": 4_000_037}}}]}},
        both(409, 401),
        both(4_001, 0.1, 40.3),
        {"$ref": "#/$defs/a", "multipleOf": 401, "$defs": {"a": {"multipleOf": 409}}},
    ],
)
def test_divisors_too_large_alone_or_together_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf") as caught:
        check_multiples(schema, "tools[1]")
    assert caught.value.param == "tools[1]"
