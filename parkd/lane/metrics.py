"""What `/metrics` shows, in a registry of its own, so that two servers in one process stay separate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parkd.types import CacheReport, Timings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered:
    """What is remembered outside the parking budget, by kind."""

    bytes: Mapping[str, int]
    """Bytes held now, as each memory counts them."""
    limit_bytes: Mapping[str, int]
    """The most that each may hold."""

    @classmethod
    def of(cls, kinds: Mapping[str, tuple[int, int]]) -> Remembered:
        """`kinds`: kind -> (bytes, limit in bytes)."""
        return cls({kind: held for kind, (held, _) in kinds.items()}, {kind: most for kind, (_, most) in kinds.items()})


class Metrics:
    """Counters of the lane and the cache. The store's own numbers are read when `/metrics` is requested."""

    def __init__(self, *, waiting: Callable[[], int], store_stats: Callable[[], object] | None) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("parkd_requests", "Requests by outcome.", ["outcome"], registry=self.registry)
        self.starts = Counter(
            "parkd_starts", "Turns by the source of their reused state.", ["cache"], registry=self.registry
        )
        self.read_tokens = Counter("parkd_prompt_tokens_read", "Prompt tokens computed.", registry=self.registry)
        self.reused_tokens = Counter(
            "parkd_prompt_tokens_reused", "Prompt tokens reused, so not computed.", registry=self.registry
        )
        self.output_tokens = Counter("parkd_output_tokens", "Tokens generated.", registry=self.registry)
        self.drafted_tokens = Counter("parkd_draft_tokens", "Tokens guessed by a draft head.", registry=self.registry)
        self.accepted_tokens = Counter(
            "parkd_draft_tokens_accepted", "Guessed tokens that the model accepted.", registry=self.registry
        )
        self.moved_bytes = Counter(
            "parkd_moved_bytes", "State bytes copied between arenas and host.", ["direction"], registry=self.registry
        )
        self.moved_seconds = Counter(
            "parkd_moved_seconds", "Seconds that these copies took.", ["direction"], registry=self.registry
        )
        self.refusals = Counter(
            "parkd_park_refusals", "Conversations not parked, or only in part.", ["reason"], registry=self.registry
        )
        self.restore_failures = Counter(
            "parkd_restore_failures", "Failed restores; each prompt was then read cold.", registry=self.registry
        )
        self.joined = Counter(
            "parkd_joined",
            "Beginnings that were parked while one turn read them, so that others go on from there.",
            registry=self.registry,
        )
        self.read_ahead = Counter(
            "parkd_read_ahead", "Conversations read from disk before a tool's result came.", registry=self.registry
        )
        self.read_ahead_hits = Counter(
            "parkd_read_ahead_hits", "Of these, those that came back to it.", registry=self.registry
        )
        self.read_ahead_waste = Counter(
            "parkd_read_ahead_waste",
            "Of these, those that did not come back in time, or left memory before.",
            registry=self.registry,
        )
        self.pauses = Counter("parkd_pauses", "Turns paused so that others could run.", registry=self.registry)
        self.paused_seconds = Counter(
            "parkd_paused_seconds", "Seconds for which turns were paused.", registry=self.registry
        )
        self.waits = Histogram(
            "parkd_wait_seconds",
            "From a turn's place in the queue to its begin, by class.",
            ["kind"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "parkd_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        queue = Gauge("parkd_queue_length", "Requests waiting for the lane.", registry=self.registry)
        queue.set_function(waiting)
        if store_stats is not None:
            self.watch("parkd_store", store_stats)

    def watch(self, prefix: str, stats: Callable[[], object]) -> None:
        """Shows the fields of a frozen dataclass, read at each request of `/metrics`."""
        self.registry.register(_StatsCollector(prefix, stats))

    def started(self, report: CacheReport) -> None:
        self.starts.labels(report.outcome.value).inc()
        self.reused_tokens.inc(report.reused_tokens)

    def finished(self, timings: Timings) -> None:
        self.read_tokens.inc(timings.prefill_tokens)
        self.output_tokens.inc(timings.output_tokens)
        self.drafted_tokens.inc(timings.drafts.drafted)
        self.accepted_tokens.inc(timings.drafts.accepted)
        if timings.output_tokens:
            self.first_token.observe(timings.first_token_s)

    def waited(self, kind: str, seconds: float) -> None:
        self.waits.labels(kind).observe(seconds)

    def paused(self, seconds: float) -> None:
        self.pauses.inc()
        self.paused_seconds.inc(seconds)

    def moved(self, direction: str, moved_bytes: int, seconds: float) -> None:
        self.moved_bytes.labels(direction).inc(moved_bytes)
        self.moved_seconds.labels(direction).inc(seconds)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _StatsCollector(Collector):
    """One gauge for each number in a dataclass of statistics; a mapping becomes one labelled gauge."""

    def __init__(self, prefix: str, stats: Callable[[], object]) -> None:
        self._prefix = prefix
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        assert dataclasses.is_dataclass(stats)
        assert not isinstance(stats, type)
        for field in dataclasses.fields(stats):
            yield from _family(self._prefix, field.name, getattr(stats, field.name))


def _family(prefix: str, field: str, value: Any) -> Iterable[Metric]:
    name = f"{prefix}_{field}"
    documentation = f"The {prefix.removeprefix('parkd_')}'s {field.replace('_', ' ')}."
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, int | float):
        yield GaugeMetricFamily(name, documentation, value=value)
    elif isinstance(value, Mapping):
        family = GaugeMetricFamily(name, documentation, labels=["kind"])
        for kind, number in value.items():
            family.add_metric([str(kind)], number)
        yield family
