"""The example in the package's docstring runs."""

from __future__ import annotations

import doctest
from dataclasses import replace

import parkd_engine

from tests.unit.engine.kit.core_models import tiny_model, token_ids


def test_the_example_runs() -> None:
    names = {
        "model": tiny_model(),
        "prompt": token_ids(100),
        "another_prompt": token_ids(200, seed=2),
        "replace": replace,
    }
    [example] = [
        test for test in doctest.DocTestFinder(recurse=False).find(parkd_engine, extraglobs=names) if test.examples
    ]
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.attempted >= 9
    assert outcome.failed == 0
