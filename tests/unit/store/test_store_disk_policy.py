"""What is worth a write, and who goes from the disk."""

from __future__ import annotations

from parkd.store.disk_policy import DAY_S, THRIFTY_BELOW, Removable, WriteAllowance, next_removal, worth_writing


def test_the_allowance_is_a_days_worth_and_comes_back_evenly() -> None:
    allowance = WriteAllowance.full(1000, 0.0)
    allowance.spend(1000)
    assert allowance.share == 0
    allowance.refill(DAY_S / 4)
    assert allowance.left_bytes == 250
    allowance.refill(DAY_S * 5)
    assert allowance.left_bytes == 1000


def test_what_was_written_before_a_restart_counts() -> None:
    assert WriteAllowance.full(1000, 0.0, written_bytes=400).left_bytes == 600
    assert WriteAllowance.full(1000, 0.0, written_bytes=4000).left_bytes == 0
    assert WriteAllowance.full(0, 0.0).share == 0.0, "nothing is ever left of nothing"


def test_when_little_is_left_only_what_returned_is_written() -> None:
    """Reports 31 and 32: what nobody reads again is not written for ever."""
    assert worth_writing(10, 600, 0.6, has_returned=False)
    assert not worth_writing(10, 400, 0.4, has_returned=False)
    assert worth_writing(10, 400, 0.4, has_returned=True)
    assert not worth_writing(401, 400, 0.4, has_returned=True)
    assert worth_writing(400, 400, 0.4, has_returned=True), "to the last byte"
    assert worth_writing(10, 500, THRIFTY_BELOW, has_returned=False)


def entry(name: str, used_s: float, *, foreign: bool = False, superseded: bool = False) -> Removable:
    return Removable(name, used_s, foreign, superseded)


def test_superseded_go_first_then_foreign_then_the_least_recently_used() -> None:
    going = [entry("old", 1), entry("new", 9), entry("foreign", 8, foreign=True), entry("past", 7, superseded=True)]
    order = []
    while (name := next_removal(going, 10)) is not None:
        order.append(name)
        going = [other for other in going if other.id != name]
    assert order == ["past", "foreign", "old", "new"]


def test_nobody_goes_for_what_was_used_before_them() -> None:
    assert next_removal([entry("a", 5), entry("b", 6)], 4.9) is None
    assert next_removal([entry("a", 5), entry("b", 6)], 5) == "a"
    assert next_removal([], 5) is None
    assert next_removal([entry("a", 5, superseded=True)], 4.9) == "a", "what is superfluous is nobody's loss"
    assert next_removal([entry("a", 5, foreign=True)], 4.9) == "a"
