"""What the machine and the server did beside a load: GPU (NVML), the server's processes (psutil), its own metrics.

A thread takes a sample every half second and stores it with the load. Where something cannot be seen (no GPU, a
server of another machine, no ``/metrics``), the sample says None, never zero.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

from pipeline.bench.gpus import Gpu, Nvml, gpu_summary
from pipeline.serving.dialects import Dialect
from pipeline.serving.process import Server

# Metrics by the last part of their name, which vLLM, our own server and TensorRT-LLM (1.1 and later) prefix each.
GAUGES = {
    "kv_cache_usage_perc": "kv_cache",  # 0 to 1
    "kv_cache_utilization": "kv_cache",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
}
COUNTERS = {
    "num_preemptions_total": "preemptions",
    "request_queue_time_seconds_sum": "queue_s",
    "request_prefill_time_seconds_sum": "prefill_s",
    "request_decode_time_seconds_sum": "decode_s",
    "request_decode_time_seconds_count": "finished",
}
PREFIXES = ("vllm:", "enginegate:", "trtllm_")
PATHS: dict[Dialect, str] = {"vllm": "/metrics", "trtllm-serve": "/prometheus/metrics"}


@dataclass(frozen=True)
class Snapshot:
    """One sample. ``at`` is ``time.perf_counter``; ``cpu_s`` the CPU seconds of the server's processes so far."""

    at: float
    cpu_s: float | None
    rss: int | None  # bytes
    gpus: tuple[Gpu, ...] | None
    metrics: dict[str, float] | None

    def plain(self, start: float) -> dict[str, Any]:
        """As JSON data, the time in seconds from ``start``."""
        return asdict(self) | {"at": round(self.at - start, 3)}


class Processes:
    """CPU and memory of processes and all that they started."""

    def __init__(self, *pids: int) -> None:
        import psutil

        self.roots = [psutil.Process(pid) for pid in pids]
        self._cpu: dict[tuple[int, float], float] = {}  # also of those that ended: their seconds were spent

    def read(self) -> tuple[float, int]:
        """CPU seconds so far and resident bytes now."""
        import psutil

        rss = 0
        for process in (process for root in self.roots for process in _tree(root)):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    self._cpu[process.pid, process.create_time()] = times.user + times.system
                    rss += memory.rss
            except psutil.NoSuchProcess:
                continue  # it ended between the list and the look
        return sum(self._cpu.values()), rss


def _tree(root: Any) -> list[Any]:
    """The process with all its children; nothing when it has ended."""
    import psutil

    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def parse_metrics(text: str) -> dict[str, float]:
    """The metrics that we know, summed over their labels (engines, ranks), from Prometheus text."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    known = GAUGES | COUNTERS
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix = next((prefix for prefix in PREFIXES if sample.name.startswith(prefix)), None)
            name = known.get(sample.name[len(prefix) :]) if prefix else None
            if name == "kv_cache":  # a share, so the fullest engine counts
                found[name] = max(found.get(name, 0.0), sample.value)
            elif name is not None:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def added(servers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several servers as those of one: sums, and the fullest KV cache."""
    found: dict[str, float] = {}
    for metrics in servers:
        for name, value in metrics.items():
            before = found.get(name, 0.0)
            found[name] = max(before, value) if name == "kv_cache" else before + value
    return found


class Telemetry:
    """Takes snapshots of one server, or of all replicas of an engine together."""

    def __init__(self, server: Server, nvml: Nvml | None = None) -> None:
        self.urls = server.urls
        self.path = PATHS[server.dialect]
        self.nvml = nvml
        pids = [one.pid for one in (server, *server.others) if one.pid is not None]
        self.processes = Processes(*pids) if pids else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def snapshot(self) -> Snapshot:
        """Everything now."""
        cpu_s, rss = self.processes.read() if self.processes else (None, None)
        at = time.perf_counter()
        return Snapshot(at, cpu_s, rss, self.nvml.read() if self.nvml else None, self._metrics())

    def _metrics(self) -> dict[str, float] | None:
        """None for a server without Prometheus metrics, and when one is too busy or dead to answer."""
        found = []
        for url in self.urls:
            try:
                with self._opener.open(url + self.path, timeout=2) as response:
                    found.append(parse_metrics(response.read().decode(errors="replace")))
            except (OSError, HTTPException, ValueError):
                return None
        return added(found)

    @contextmanager
    def sampling(self, every_s: float) -> Iterator[list[Snapshot]]:
        """Snapshots from the begin of the block to its end, both included."""
        snapshots = [self.snapshot()]
        done = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not done.wait(every_s):
                    snapshots.append(self.snapshot())
            except Exception as error:  # noqa: BLE001  raised below, in the thread that waits for the samples
                failures.append(error)

        thread = threading.Thread(target=work, name="telemetry", daemon=True)
        thread.start()
        try:
            yield snapshots
        finally:
            done.set()
            thread.join()
        if failures:
            raise failures[0]
        snapshots.append(self.snapshot())


def cpu_cores(snapshots: Sequence[Snapshot], begin: float, end: float) -> float | None:
    """Mean cores that the server used between two times; None when it was not seen or the times are equal.

    CPU seconds are taken at the samples and read between them along straight lines.
    """
    seen = [(one.at, one.cpu_s) for one in snapshots if one.cpu_s is not None]
    if len(seen) < 2 or end <= begin:
        return None
    import numpy as np

    at, cpu = zip(*seen, strict=True)
    first, last = np.interp([begin, end], at, cpu)
    return float(last - first) / (end - begin)


def summary(snapshots: Sequence[Snapshot], begin: float, end: float, tokens: int) -> dict[str, Any]:
    """A load's telemetry between ``begin`` and ``end`` (``time.perf_counter``); ``tokens`` were generated in it."""
    within = [one for one in snapshots if begin <= one.at <= end] or list(snapshots)
    rss = [one.rss for one in within if one.rss is not None]
    return {
        "cpu_cores": cpu_cores(snapshots, begin, end),
        "rss": max(rss, default=None),
        "gpu": gpu_summary([(one.at, one.gpus) for one in within if one.gpus], tokens),
        "metrics": _server_metrics(snapshots),
    }


def _server_metrics(snapshots: Sequence[Snapshot]) -> dict[str, float] | None:
    """Highest value of each gauge, increase of each counter from the first to the last sample."""
    seen: list[Mapping[str, float]] = [one.metrics for one in snapshots if one.metrics]
    if len(seen) < 2:
        return None
    highest: Callable[[str], float] = lambda name: max(row[name] for row in seen if name in row)  # noqa: E731
    found = {name: highest(name) for name in dict.fromkeys(GAUGES.values()) if any(name in row for row in seen)}
    both = seen[0].keys() & seen[-1].keys()
    return found | {name: seen[-1][name] - seen[0][name] for name in COUNTERS.values() if name in both}
