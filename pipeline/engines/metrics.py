"""What our server tells of itself at ``/metrics``: Prometheus text, under vLLM's names with a prefix of our own.

So one reader (``pipeline/bench/telemetry.py``) and one dashboard serve both arms.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest

from pipeline.engines.scheduler import Job, Scheduler

PREFIX = "enginegate:"
CONTENT_TYPE = CONTENT_TYPE_LATEST
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class Metrics:
    """Counts finished requests; asks the scheduler for the rest."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        running = self._gauge("num_requests_running", "Requests in the running batch.")
        waiting = self._gauge("num_requests_waiting", "Requests that wait for a batch.")
        running.set_function(lambda: scheduler.depth[0])
        waiting.set_function(lambda: scheduler.depth[1])
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the batch.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From the batch to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")

    def finished(self, job: Job) -> None:
        """Counts a request that got its last token."""
        self._queue.observe(job.taken_at - job.queued_at)
        self._prefill.observe(job.first_at - job.taken_at)
        self._decode.observe(job.last_at - job.first_at)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, help_: str) -> Any:
        return Gauge(PREFIX + name, help_, registry=self._registry)

    def _histogram(self, name: str, help_: str) -> Any:
        return Histogram(PREFIX + name, help_, registry=self._registry, buckets=BUCKETS)
