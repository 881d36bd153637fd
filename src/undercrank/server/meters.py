"""Counts and times for Prometheus. Door of prometheus_client.

Labels are names of routes, states and methods: never a prompt, never the id of a clip.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from undercrank.jobs import State, Store, Watch

MEDIA_TYPE = CONTENT_TYPE_LATEST
HTTP_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Meters:
    """The registry of this process. Jobs and workers are counted in the database when somebody asks."""

    def __init__(self, store: Store, watch: Watch) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "undercrank_http_requests", "Answers", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "undercrank_http_request_seconds",
            "Time to the head of the answer",
            ["method", "route"],
            buckets=HTTP_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_InStore(store, watch))

    def answered(self, *, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _InStore(Collector):
    def __init__(self, store: Store, watch: Watch) -> None:
        self._store, self._watch = store, watch

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        counts, workers = self._store.counts(), self._store.workers()
        jobs = GaugeMetricFamily("undercrank_jobs", "Clips by state", labels=["state"])
        for state, count in counts.items():
            jobs.add_metric([state.value], count)
        yield jobs
        yield GaugeMetricFamily("undercrank_queue_depth", "Clips that wait", value=counts[State.QUEUED])
        alive = [worker for worker in workers if worker.id in self._watch.alive]
        by_state = GaugeMetricFamily("undercrank_workers", "Living workers by what they do", labels=["state"])
        for name in ("starting", "idle", "busy", "loading"):
            by_state.add_metric([name], sum(worker.state == name for worker in alive))
        yield by_state
