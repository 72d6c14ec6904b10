"""Refuses a `multipleOf` that would keep the grammar library busy for minutes.

The library turns divisibility into an automaton over digits when a schema is compiled. The automaton may have as many
states as the divisor is large, and nothing can stop the work once it has begun: a divisor of four million took more
than a minute. Where parts of a schema are combined, what counts is the least common multiple of their divisors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from parkd.errors import InvalidRequest

DIVISOR_LIMIT = 100_000
ROUND_DIVISOR_LIMIT = 100
"""For a divisor without its zeros at the end, which cost next to nothing."""
COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def check_multiples(schema: Any, param: str) -> None:
    """Raises InvalidRequest if the schema's divisors are too large."""
    divisors = set(_found(schema, "multipleOf"))
    numbers = [value for value in divisors if isinstance(value, int | float) and value > 0 and math.isfinite(value)]
    combines = any(True for keyword in COMBINING for _ in _found(schema, keyword))
    together = [numbers] if combines else [[number] for number in numbers]
    if any(_is_too_large(math.lcm(*_without_fractions(several))) for several in together):
        given = ", ".join(map(str, sorted(numbers)))
        raise InvalidRequest(
            f"`multipleOf` ({given}) is too large to be enforced: the divisors, or the least common multiple of those "
            f"that may apply together, must not exceed {DIVISOR_LIMIT}. Leave it out and check the answer yourself.",
            param=param,
        )


def can_divide(divisor: Any) -> bool:
    """Whether a `multipleOf` can be enforced alone; True for what is no divisor."""
    is_number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
    if not is_number or not math.isfinite(divisor) or divisor <= 0:
        return True
    return not _is_too_large(math.lcm(*_without_fractions([divisor])))


def _found(schema: Any, keyword: str) -> Iterator[Any]:
    """The values of a keyword anywhere in a schema; an unhashable one, which the library refuses, is skipped."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            value = part.get(keyword)
            if value is not None and (keyword in COMBINING or isinstance(value, int | float)):
                yield value
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)


def _without_fractions(numbers: list[int | float]) -> list[int]:
    """The numbers times one power of ten that makes all of them whole."""
    exact = [Decimal(str(number)) for number in numbers]
    places = max((-int(number.as_tuple().exponent) for number in exact), default=0)
    return [int(number.scaleb(max(0, places))) for number in exact]


def _is_too_large(divisor: int) -> bool:
    return divisor > DIVISOR_LIMIT and int(str(divisor).rstrip("0")) > ROUND_DIVISOR_LIMIT
