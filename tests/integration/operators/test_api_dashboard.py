"""The dashboard in docs/ shows metrics that a running server has."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.integration.api.disk_harness import running_on, written
from tests.integration.operators.test_api_portable import LONG

pytestmark = pytest.mark.anyio
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"
UNITS = {"short", "s", "bytes", "Bps", "reqps", "percentunit"}
"""Of Grafana's units those that the panels use."""
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
METRIC = re.compile(r"\bparkd_[a-z0-9_]+")
BY = re.compile(r"by \(([a-z_, ]+)\)")
SHOWN = re.compile(r"\{\{([a-z_]+)\}\}")


def panels() -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    found: list[dict[str, Any]] = document["panels"]
    return found


def metrics_in(page: str) -> set[str]:
    """The names that can be asked for, whether or not there is a sample yet."""
    known = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        known.update([name, *(name + suffix for suffix in OF_HISTOGRAMS)] if kind == "histogram" else [name])
    return known


def labels_in(page: str) -> set[str]:
    return set(re.findall(r'[{,]([a-z_]+)="', page))


async def test_every_metric_that_it_names_exists(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park") as server:
        await server.chat(LONG)
        await written(server)
        page = (await server.client.get("/metrics")).text
    known = metrics_in(page)
    assert {"parkd_queue_length", "parkd_first_token_seconds_bucket"} <= known
    named = {
        (panel["title"], name)
        for panel in panels()
        for target in panel["targets"]
        for name in METRIC.findall(target["expr"])
    }
    assert len({name for _, name in named}) > 20
    assert [pair for pair in sorted(named) if pair[1] not in known] == []
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    for variable in variables[1:]:
        assert set(METRIC.findall(variable["query"]["query"])) <= known


async def test_every_label_that_it_groups_by_exists(tmp_path: Path) -> None:
    async with running_on(tmp_path / "park") as server:
        await server.chat(LONG)
        await written(server)
        server.server.proxy.metrics.refusals.labels("budget").inc()
        page = (await server.client.get("/metrics")).text
    for panel in panels():
        for target in panel["targets"]:
            grouped = {name for group in BY.findall(target["expr"]) for name in group.split(", ")}
            shown = set(SHOWN.findall(target["legendFormat"]))
            assert grouped | shown <= labels_in(page), panel["title"]
            if grouped:
                assert shown <= grouped, panel["title"]


def test_it_is_a_dashboard() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert document["uid"]
    assert document["title"] == "parkd"
    assert document["schemaVersion"] >= 36
    source, server = document["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert server["name"] == "instance"
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found) > 10
    for panel in found:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            selectors = re.findall(r"parkd_[a-z0-9_]+(\{[^}]*\})?", target["expr"])
            assert all('instance=~"$instance"' in selector for selector in selectors), target["expr"]


def test_its_panels_do_not_cover_each_other() -> None:
    places = [panel["gridPos"] for panel in panels()]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
