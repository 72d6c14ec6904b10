"""Draws what the result files say: docs/pictures/*.svg.

python -m benchmarks.pictures
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, RESULTS, progress
from parkd.replay.picture import Line, Panel, Picture, svg

FOLDER = REPOSITORY / "docs" / "pictures"
POLICIES = ("lru", "gdsf", "value")
TURNS = {
    "A cold": "cold",
    "branch of A": "a branch of it",
    "A2 after B": "after another conversation",
    "A2 after a restart": "after a restart",
}
"""Turns that a benchmark measures, and how the legend names them."""
STEPS = {
    "cold": ("A1", "B1", "A2 cold", "A3 cold"),
    "the same conversation goes on": ("A2",),
    "after another conversation": ("A2 after B", "B2 after A", "A3 after B"),
}
"""Steps of leaving a conversation and coming back, by what was reused."""
SWITCHED = (("switching", "Qwen3 8B"), ("switching-hybrid", "Qwen3.5 27B"), ("switching-sliding", "Gemma 3 4B"))
"""Result files of switches on cards, and the shapes of their models."""
CLASSES = {"title": "title", "long": "long request"}
"""Kinds of requests beside each other, and how the axis names them."""
Results = Mapping[str, Any]
Draw = Callable[[Results], Picture | None]


def hit_share_by_budget(results: Results) -> Picture | None:
    """Share of what no policy can exceed that each policy saves, by memory budget, for each trace."""
    if "policies" not in results:
        return None
    by_trace: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, measured in results["policies"]["raw"].items():
        trace, _, budget = name.partition(", ")
        for policy in POLICIES:
            known = measured[policy]
            point = known["budget_bytes"] / 2**30, 100 * known["saved_s"] / measured["bound_s"]
            by_trace.setdefault(trace, {}).setdefault(policy, []).append(point)
        assert budget, "a row names its trace and its budget"
    panels = tuple(
        Panel(trace, tuple(Line(policy, tuple(sorted(points))) for policy, points in policies.items()))
        for trace, policies in by_trace.items()
    )
    return Picture(
        "What eviction policies save of what is possible",
        "memory budget, GiB",
        "% of the bound",
        panels,
        columns=3,
        is_log_x=True,
        y_top=100.0,
    )


def turns_by_server(results: Results) -> Picture | None:
    """Seconds to the first token, by server and turn: parkd's llama.cpp beside others over the same weights."""
    if "llama_cpp" not in results:
        return None
    panels = []
    for table in results["llama_cpp"]["tables"]:
        servers = list(dict.fromkeys(row[0] for row in table["rows"]))
        points: dict[str, list[tuple[float, float]]] = {}
        for server, turn, seconds, *_ in table["rows"]:
            if turn in TURNS:
                points.setdefault(TURNS[turn], []).append((float(seconds), float(servers.index(server))))
        lines = tuple(Line(label, tuple(points[label]), is_joined=False) for label in TURNS.values() if label in points)
        panels.append(Panel(table["title"], lines, tuple(servers)))
    return Picture("Seconds to the first token", "seconds, logarithmic", "", tuple(panels), columns=1, is_log_x=True)


def return_by_prompt(results: Results) -> Picture | None:
    """Seconds to the first token of turns by what is reused, parkd against llama.cpp's server."""
    if "aba" not in results:
        return None
    panels = []
    for name, answers in results["aba"]["raw"]["answers"].items():
        points = {
            label: [point for step in steps for point in _points(answers[step])] for label, steps in STEPS.items()
        }
        lines = [Line(label, tuple(sorted(found)), is_joined=False) for label, found in points.items()]
        panels.append(Panel(str(name), tuple(lines)))
    title = "A turn on its return, and cold"
    return Picture(title, "tokens of the prompt", "seconds to the first token", tuple(panels))


def _points(answers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    for each in answers:
        yield float(each["prompt_tokens"]), float(each["first_token_s"])


def decode_by_context(results: Results) -> Picture | None:
    """Milliseconds a token at two depths, by model, format of rows and number of cards."""
    panels = []
    for name, title in SWITCHED:
        if f"gpu/{name}" not in results:
            continue
        lines: dict[str, tuple[tuple[float, float], ...]] = {}
        for run in results[f"gpu/{name}"]["runs"]:
            cards = len(run["devices"])
            label = f"{run['kv']}, {cards} card{'s' * (cards > 1)}"
            depths = [run[depth] for depth in ("decode_4k", "decode_86k") if depth in run]
            lines[label] = tuple((each["position"], each["ms"]) for each in depths)
        panels.append(Panel(title, tuple(Line(label, points) for label, points in lines.items())))
    if not panels:
        return None
    return Picture("Decoding by depth, H200", "tokens before", "ms a token", tuple(panels), columns=3)


def waits_by_schedule(results: Results) -> Picture | None:
    """Seconds to the first token of each request, by its class and by who runs next."""
    if "schedule" not in results:
        return None
    panels = []
    for model, measured in results["schedule"]["raw"].items():
        places = [(kind, schedule) for kind in CLASSES for schedule in measured["heard"]]
        lines = tuple(
            Line(schedule, tuple(_waits(measured["heard"][schedule], kind, place)), is_joined=False)
            for place, (kind, schedule) in enumerate(places)
        )
        names = tuple(f"{CLASSES[kind]}, {schedule}" for kind, schedule in places)
        panels.append(Panel(str(model), lines, names))
    title = "Waits of titles beside long requests"
    return Picture(title, "seconds to the first token, logarithmic", "", tuple(panels), columns=1, is_log_x=True)


def _waits(heard: Iterable[Mapping[str, Any]], kind: str, place: int) -> Iterator[tuple[float, float]]:
    return ((float(each["first_s"]), float(place)) for each in heard if each["kind"] == kind)


PICTURES: Mapping[str, Draw] = {
    "hit-share-by-budget": hit_share_by_budget,
    "turns-by-server": turns_by_server,
    "return-by-prompt": return_by_prompt,
    "decode-by-context": decode_by_context,
    "waits-by-schedule": waits_by_schedule,
}


def results_in(folder: Path) -> Results:
    """The documents of result files, by their path without the suffix."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): json.loads(path.read_text())
        for path in sorted(folder.rglob("*.json"))
    }


def drawn(results: Results) -> Iterator[tuple[str, str]]:
    """The name of each picture for which there are results, and its SVG."""
    for name, draw in PICTURES.items():
        picture = draw(results)
        if picture is not None:
            yield name, svg(picture)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn(results_in(RESULTS)):
        path = FOLDER / f"{name}.svg"
        path.write_text(text)
        progress(f"written: {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
