"""Pictures: where points are, that lines are told apart without colours, and that the same data give the same bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from parkd.replay.curve import curve
from parkd.replay.picture import DASHES, MARKS, SHADES, Line, Panel, Picture, svg
from parkd.replay.result import ReplayResult
from tests.unit.replay.test_replay import HEADER

SVG = "{http://www.w3.org/2000/svg}"


def picture(*lines: Line, **changes: object) -> Picture:
    return Picture("A title", "tokens", "seconds", (Panel("one", lines),), **changes)  # type: ignore[arg-type]


def six() -> Picture:
    return picture(*(Line(f"line {n}", ((0.0, n + 1.0), (10.0, n + 2.0))) for n in range(6)))


def test_the_same_data_give_the_same_bytes() -> None:
    assert svg(six()) == svg(six())
    assert not re.search(r"\d\.\d{2}", svg(six())), "no digits that depend on a machine's arithmetic"


def test_lines_are_told_apart_in_grey() -> None:
    """Each has its own dashes and its own marker, and shades of different lightness."""
    root = ElementTree.fromstring(svg(six()))
    lines = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "1.6"]
    dashes = [path.get("stroke-dasharray", "") for path in lines]
    assert len(lines) == 12, "in the panel and in the legend"
    assert dashes[:6] == dashes[6:]
    assert len(set(dashes)) == 6
    assert len(set(MARKS)) == len(set(DASHES)) == len(set(SHADES)) == 6
    first_three = [0.3 * int(s[1:3], 16) + 0.59 * int(s[3:5], 16) + 0.11 * int(s[5:7], 16) for s in SHADES[:2]]
    assert first_three[1] - first_three[0] > 50


def circles(text: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(text)
    return [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]


def test_points_are_where_the_axes_say() -> None:
    *points, _legend = circles(svg(picture(Line("a", ((0.0, 0.0), (5.0, 50.0), (10.0, 100.0))), y_top=100.0)))
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    root = ElementTree.fromstring(svg(picture(Line("a", ((0.0, 0.0), (10.0, 100.0))), y_top=100.0)))
    ticks = {text.text: float(text.get("y", "")) for text in root.iter(f"{SVG}text") if text.get("y")}
    assert ticks["0"] > ticks["100"]
    assert ticks["100"] - 4 == pytest.approx(y2, abs=0.11)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    *points, _legend = circles(svg(picture(Line("a", ((1.0, 1.0), (10.0, 1.0), (100.0, 1.0))), is_log_x=True)))
    xs = [x for x, _ in points]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)


def test_names_on_the_vertical_axis_are_in_order() -> None:
    made = Picture("t", "s", "", (Panel("p", (Line("a", ((1.0, 0.0), (2.0, 1.0)), False),), ("above", "below")),))
    (_, first), (_, second), _legend = circles(svg(made))
    assert first < second
    assert svg(made).index("above") < svg(made).index("below")


def test_words_are_words() -> None:
    text = svg(picture(Line('<script>"&', ((1.0, 1.0),))))
    assert "<script>" not in text
    assert '<script>"&' in [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        svg(picture())


def result(policy: str, budget: int, saved_s: float, disk: int = 0) -> ReplayResult:
    made = ReplayResult(policy, budget, disk)
    made.cold_s, made.saved_s = 200.0, saved_s
    return made


def test_a_replay_is_drawn_as_shares_of_all_reading() -> None:
    assert HEADER
    made = curve("trace", [result("lru", 1 << 30, 50.0), result("lru", 1 << 31, 100.0)], {(1 << 30, 0): 150.0})
    [panel] = made.panels
    assert [(line.label, line.points) for line in panel.lines] == [
        ("lru", ((1024.0, 25.0), (2048.0, 50.0))),
        ("bound", ((1024.0, 75.0),)),
    ]
    over_disk = curve("t", [result("lru", 1 << 30, 50.0, disk) for disk in (0, 1 << 30)], {})
    assert over_disk.x_label == "disk budget, MiB"
    assert not over_disk.is_log_x
