"""The pictures in docs/ are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.common import REPOSITORY, RESULTS
from benchmarks.pictures import (
    FOLDER,
    PICTURES,
    decode_by_context,
    drawn,
    hit_share_by_budget,
    results_in,
    waits_by_schedule,
)
from benchmarks.tables import PICTURES as OF_SECTIONS


def test_pictures_are_drawn_from_the_results_that_are_committed() -> None:
    made = dict(drawn(results_in(RESULTS)))
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(made)
    for name, text in made.items():
        assert (FOLDER / f"{name}.svg").read_text() == text, f"{name}: run python -m benchmarks.pictures"
        ElementTree.fromstring(text)


def test_without_results_nothing_is_drawn() -> None:
    assert list(drawn({})) == []


def test_every_picture_is_shown_somewhere_and_every_shown_one_exists() -> None:
    shown = {
        name
        for page in Path(REPOSITORY / "docs").glob("*.md")
        for name in re.findall(r"!\[[^\]]*\]\(pictures/([a-z-]+)\.svg\)", page.read_text())
    }
    assert shown == set(PICTURES)
    assert set(OF_SECTIONS.values()) <= shown


def test_shares_are_of_the_bound() -> None:
    measured = {
        name: {"budget_bytes": 2 << 30, "saved_s": saved} for name, saved in (("lru", 1), ("gdsf", 2), ("value", 4))
    }
    picture = hit_share_by_budget({"policies": {"raw": {"agents, 1/8": {"bound_s": 5.0, **measured}}}})
    assert picture is not None
    [panel] = picture.panels
    assert panel.title == "agents"
    assert [(line.label, line.points) for line in panel.lines] == [
        ("lru", ((2.0, 20.0),)),
        ("gdsf", ((2.0, 40.0),)),
        ("value", ((2.0, 80.0),)),
    ]


@pytest.mark.parametrize("cards", [1, 2])
def test_decoding_is_drawn_at_the_depths_that_were_measured(cards: int) -> None:
    run = {"kv": "bf16", "devices": ["cuda"] * cards, "decode_4k": {"position": 4097, "ms": 3.0}}
    picture = decode_by_context({"gpu/switching": {"runs": [run]}})
    assert picture is not None
    [line] = picture.panels[0].lines
    assert line.points == ((4097, 3.0),)
    assert line.label == ("bf16, 1 card" if cards == 1 else "bf16, 2 cards")


def test_waits_are_by_class_and_schedule() -> None:
    waits = {"fair": {"title": [0.1, 0.3], "long": [0.5]}, "fifo": {"title": [2.0], "long": [0.4, 0.6]}}
    heard = {
        schedule: [{"kind": kind, "first_s": first_s, "whole_s": 9.0} for kind in kinds for first_s in kinds[kind]]
        for schedule, kinds in waits.items()
    }
    picture = waits_by_schedule({"schedule": {"raw": {"a model": {"heard": heard}}}})
    assert picture is not None
    [panel] = picture.panels
    assert panel.title == "a model"
    shown = [(panel.names[int(place)], line.label, wait) for line in panel.lines for wait, place in line.points]
    assert sorted(shown) == [
        ("long request, fair", "fair", 0.5),
        ("long request, fifo", "fifo", 0.4),
        ("long request, fifo", "fifo", 0.6),
        ("title, fair", "fair", 0.1),
        ("title, fair", "fair", 0.3),
        ("title, fifo", "fifo", 2.0),
    ]
