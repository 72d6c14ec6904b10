"""Names what fails at once, since a run on a machine that is lent by the minute may be ended before its summary; and
gives a test the time to compile the kernels that it is the first to need, beside others that do."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}", flush=True)
