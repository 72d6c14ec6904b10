"""docs/REPORTS.md and the tests that replay its rows name each other."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| ([^|]+?) \|(.*)$", re.MULTILINE)
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")
NAMED = re.compile(r"[Rr]eports?\s+(\d+(?:(?:,\s+|\s+and\s+)\d+)*)")


def rows() -> dict[int, tuple[str, str]]:
    """Number to the issues of each row, and the rest of it."""
    text = (REPOSITORY / "docs" / "REPORTS.md").read_text(encoding="utf-8")
    return {int(number): (issues, rest) for number, issues, rest in ROW.findall(text)}


def named_in(text: str) -> set[int]:
    return {int(number) for group in NAMED.findall(text) for number in re.findall(r"\d+", group)}


def text_of_tests() -> str:
    files = [path for path in sorted((REPOSITORY / "tests").rglob("*.py")) if path != Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_rows_are_numbered_without_gaps() -> None:
    assert list(rows()) == list(range(1, len(rows()) + 1))


def test_every_number_in_a_test_is_a_row() -> None:
    assert named_in(text_of_tests()) <= set(rows())


def test_every_row_has_a_test() -> None:
    """A test names its number or its issue, or the row names a file of tests."""
    text = text_of_tests()
    named = named_in(text)
    for number, (issues, rest) in rows().items():
        files = TEST_FILE.findall(rest)
        assert all((REPOSITORY / file).is_file() for file in files)
        assert number in named or issues in text or files, f"no test replays report {number}"
