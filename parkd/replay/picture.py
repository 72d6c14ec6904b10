"""Lines and points as SVG, in one style for all pictures of this project.

Readable in grey and by who sees no colours: lines differ in their dashes and markers, and each is named in the legend
with both. The same numbers give the same bytes, so that a picture in the documentation changes only with its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 340, 240
"""Of one panel with its labels, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44
HEAD, ROW, FOOT = 34, 18, 10
"""Height of the title, of a line of the legend, and below it."""
LEGEND_COLUMN = 226
CATEGORY_LEFT = 190
"""Left edge where the vertical axis has names."""
INK, PALE = "#222", "#ddd"
SHADES = ("#111111", "#4a6fa5", "#b3541e", "#7a7a7a", "#2e7d4f", "#8c4a8c")
"""From dark to light, so that they differ in grey too."""
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2")
MARKS = ("circle", "square", "triangle", "diamond", "cross", "ring")
MOST_TICKS = 6
_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Line:
    """Points that belong together. Lines of one label have one look, in all panels."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(x, y), in the order in which they are joined."""
    is_joined: bool = True
    """False: points alone."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    names: tuple[str, ...] = ()
    """Names of the places 0, 1, ... on the vertical axis, from above; empty: it has numbers."""


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    columns: int = 2
    is_log_x: bool = False
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Where the horizontal axis is marked, and how; empty: at round numbers."""
    x_format: Callable[[float], str] | None = None
    y_top: float | None = None
    """Upper end of the vertical axis; None: as the data need it. The lower end is 0."""


def svg(picture: Picture) -> str:
    """The picture as the text of an SVG file. Raises ValueError if it has no points."""
    labels = list(dict.fromkeys(line.label for panel in picture.panels for line in panel.lines))
    if not any(line.points for panel in picture.panels for line in panel.lines):
        raise ValueError("there is nothing to draw")
    columns = min(picture.columns, len(picture.panels))
    left = CATEGORY_LEFT if any(panel.names for panel in picture.panels) else LEFT
    step = WIDTH + left - LEFT
    rows = -(-len(picture.panels) // columns)
    width = max(columns * step, LEGEND_COLUMN * min(2, len(labels)))
    per_row = max(1, width // LEGEND_COLUMN)
    legend = -(-len(labels) // per_row) * ROW
    height = HEAD + rows * HEIGHT + legend + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(width / 2, 20, picture.title, anchor="middle", size=14),
    ]
    for number, panel in enumerate(picture.panels):
        at = number % columns * step, HEAD + number // columns * HEIGHT
        parts += _panel(picture, panel, labels, at, left)
    for number, label in enumerate(labels):
        x = number % per_row * LEGEND_COLUMN + 14
        y = HEAD + rows * HEIGHT + number // per_row * ROW + 10
        joined = any(line.is_joined for panel in picture.panels for line in panel.lines if line.label == label)
        parts += [*_drawn([(x, y), (x + 30, y)], number, is_joined=joined, marks=[(x + 15.0, float(y))])]
        parts.append(_text(x + 38, y + 4, label))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    picture: Picture, panel: Panel, labels: Sequence[str], at: tuple[float, float], left: float
) -> Iterator[str]:
    x0, x1 = at[0] + left, at[0] + left + WIDTH - LEFT - RIGHT
    y0, y1 = at[1] + HEIGHT - BOTTOM, at[1] + TOP
    every = [point for each in picture.panels for line in each.lines for point in line.points]
    xs = [x for x, _ in every]
    low, high = min(xs), max(xs)
    scale: Callable[[float], float] = math.log if picture.is_log_x else float
    if not picture.is_log_x:
        low = min(low, 0.0)
    span = (scale(high) - scale(low)) or 1.0
    inset = 8.0
    top = picture.y_top or _round_up(max((y for _, y in every), default=1.0))
    places = len(panel.names)

    def x_of(value: float) -> float:
        return x0 + inset + (scale(value) - scale(low)) / span * (x1 - x0 - 2 * inset)

    def y_of(value: float) -> float:
        if places:
            return y1 + (value + 0.5) / places * (y0 - y1)
        return y0 - value / top * (y0 - y1)

    yield _text((x0 + x1) / 2, at[1] + 18, panel.title, anchor="middle", size=12)
    for value, text in _y_ticks(panel, top):
        yield f'<path d="M{_n(x0)} {_n(y_of(value))}H{_n(x1)}" stroke="{PALE}"/>'
        yield _text(x0 - 6, y_of(value) + 4, text, anchor="end")
    for value, text in picture.x_ticks or _x_ticks(picture, low, high):
        yield f'<path d="M{_n(x_of(value))} {_n(y0)}v4" stroke="{INK}"/>'
        yield _text(x_of(value), y0 + 16, text, anchor="middle")
    yield f'<path d="M{_n(x0)} {_n(y1)}V{_n(y0)}H{_n(x1)}" fill="none" stroke="{INK}"/>'
    yield _text((x0 + x1) / 2, y0 + 32, picture.x_label, anchor="middle")
    if not places:
        middle = (y0 + y1) / 2
        yield (
            f'<text transform="translate({_n(at[0] + 12)} {_n(middle)}) rotate(-90)" text-anchor="middle">'
            f"{escape(picture.y_label)}</text>"
        )
    for line in panel.lines:
        points = [(x_of(x), y_of(y)) for x, y in line.points]
        yield from _drawn(points, labels.index(line.label), is_joined=line.is_joined, marks=points)


def _drawn(
    points: Sequence[tuple[float, float]], look: int, *, is_joined: bool, marks: Sequence[tuple[float, float]]
) -> Iterator[str]:
    shade, dash = SHADES[look % len(SHADES)], DASHES[look % len(DASHES)]
    if is_joined and len(points) > 1:
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<path d="M{path}" fill="none" stroke="{shade}" stroke-width="1.6"{dashes}/>'
    for x, y in marks:
        yield _mark(MARKS[look % len(MARKS)], x, y, shade)


def _mark(kind: str, x: float, y: float, shade: str) -> str:
    at, ring = f"{_n(x)} {_n(y)}", f'fill="#fff" stroke="{shade}" stroke-width="1.4"'
    shapes = {
        "square": f'<path d="M{at}m-3.2 -3.2h6.4v6.4h-6.4z" fill="{shade}"/>',
        "triangle": f'<path d="M{at}m0 -4l4 7h-8z" fill="{shade}"/>',
        "diamond": f'<path d="M{at}m0 -4.5l4.5 4.5l-4.5 4.5l-4.5 -4.5z" {ring}/>',
        "cross": f'<path d="M{at}m-3.5 -3.5l7 7m0 -7l-7 7" stroke="{shade}" stroke-width="1.8"/>',
        "ring": f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3.4" {ring}/>',
    }
    return shapes.get(kind, f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3.4" fill="{shade}"/>')


def _y_ticks(panel: Panel, top: float) -> list[tuple[float, str]]:
    if panel.names:
        return [(float(place), name) for place, name in enumerate(panel.names)]
    return [(value, _shown(value)) for value in _rounds(0.0, top)]


def _x_ticks(picture: Picture, low: float, high: float) -> list[tuple[float, str]]:
    shown = picture.x_format or _shown
    if not picture.is_log_x:
        return [(value, shown(value)) for value in _rounds(low, high)]
    values = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        values += [factor * 10.0**power for factor in (1, 2, 5)]
    inside = [value for value in values if low * 0.999 <= value <= high * 1.001]
    if len(inside) > MOST_TICKS:
        powers = [value for value in inside if f"{value:e}".startswith("1.0")]
        inside = powers if len(powers) > 1 else inside[:: len(inside) // MOST_TICKS + 1]
    return [(value, shown(value)) for value in inside or [low, high]]


def _rounds(low: float, high: float) -> list[float]:
    """At most MOST_TICKS + 1 round numbers from `low` to `high`."""
    step = _round_step((high - low) / MOST_TICKS)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in _STEPS if factor * power >= least * (1 - 1e-9))


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    step = _round_step(value / MOST_TICKS)
    return math.ceil(value / step - 1e-9) * step


def _shown(value: float) -> str:
    """`1,200`, `0.5`: without digits that say nothing."""
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    size_of = "" if size == 11 else f' font-size="{size}"'
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{size_of}>{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate to a tenth of a pixel, the same on every machine."""
    return f"{value:.1f}".removesuffix(".0")
