"""What the machine and the server did beside a load: GPU (NVML), the server's processes (psutil), its own metrics.

A thread takes a sample every half second and stores it with the load. Where something cannot be seen (no GPU, a
server of another machine, no ``/metrics``), the sample says None, never zero.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

from pipeline.serving.process import Server

# Metrics by the last part of their name: vLLM prefixes them with `vllm:`, our own server with `enginegate:`.
GAUGES = {
    "kv_cache_usage_perc": "kv_cache",  # 0 to 1
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
PREFIXES = ("vllm:", "enginegate:")


@dataclass(frozen=True)
class Gpu:
    """One GPU: utilisation in per cent, memory in bytes, power in watts, energy since the driver was loaded in
    joules (None on cards that do not count it)."""

    utilisation: float
    memory: int
    power_w: float
    energy_j: float | None


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


class Nvml:
    """The GPUs that this process may use. ``module`` is pynvml, or a stand-in in tests."""

    def __init__(self, module: Any, visible: str | None) -> None:
        self.module = module
        module.nvmlInit()
        handles = [module.nvmlDeviceGetHandleByIndex(place) for place in range(module.nvmlDeviceGetCount())]
        names = [part.strip() for part in visible.split(",")] if visible else None
        self.handles = [
            handle
            for place, handle in enumerate(handles)
            if names is None or str(place) in names or _is_named(module.nvmlDeviceGetUUID(handle), names)
        ]

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs now."""
        return tuple(map(self._gpu, self.handles))

    def _gpu(self, handle: Any) -> Gpu:
        module = self.module
        try:
            energy = module.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # millijoules
        except module.NVMLError_NotSupported:
            energy = None
        return Gpu(
            utilisation=float(module.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory=int(module.nvmlDeviceGetMemoryInfo(handle).used),
            power_w=module.nvmlDeviceGetPowerUsage(handle) / 1000,  # milliwatts
            energy_j=energy,
        )


def _is_named(uuid: str, names: Sequence[str]) -> bool:
    """CUDA_VISIBLE_DEVICES takes beginnings of UUIDs."""
    return any(name and uuid.startswith(name) for name in names)


def find_nvml() -> Nvml | None:
    """NVML where there is an NVIDIA driver."""
    import os

    import pynvml

    try:
        return Nvml(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError_LibraryNotFound:
        return None


class Processes:
    """CPU and memory of a process and all that it started."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.root = psutil.Process(pid)
        self._cpu: dict[tuple[int, float], float] = {}  # also of those that ended: their seconds were spent

    def read(self) -> tuple[float, int]:
        """CPU seconds so far and resident bytes now."""
        import psutil

        rss = 0
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []  # the server has ended
        for process in tree:
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    self._cpu[process.pid, process.create_time()] = times.user + times.system
                    rss += memory.rss
            except psutil.NoSuchProcess:
                continue  # it ended between the list and the look
        return sum(self._cpu.values()), rss


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


class Telemetry:
    """Takes snapshots of one server."""

    def __init__(self, server: Server, nvml: Nvml | None = None) -> None:
        self.url = server.url
        self.nvml = nvml
        self.processes = Processes(server.pid) if server.pid is not None else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def snapshot(self) -> Snapshot:
        """Everything now."""
        cpu_s, rss = self.processes.read() if self.processes else (None, None)
        at = time.perf_counter()
        return Snapshot(at, cpu_s, rss, self.nvml.read() if self.nvml else None, self._metrics())

    def _metrics(self) -> dict[str, float] | None:
        """None for a server without ``/metrics``, and for one that is too busy or dead to answer."""
        try:
            with self._opener.open(f"{self.url}/metrics", timeout=2) as response:
                return parse_metrics(response.read().decode(errors="replace"))
        except (OSError, HTTPException, ValueError):
            return None

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
        "gpu": _gpu(within, tokens),
        "metrics": _server_metrics(snapshots),
    }


def _gpu(within: Sequence[Snapshot], tokens: int) -> dict[str, Any] | None:
    """All GPUs together; utilisation and power are means over the time."""
    seen = [one for one in within if one.gpus]
    if not seen:
        return None
    import numpy as np

    power = [sum(gpu.power_w for gpu in one.gpus or ()) for one in seen]
    counted = all(gpu.energy_j is not None for one in seen for gpu in one.gpus or ())
    first, last = (sum(gpu.energy_j or 0 for gpu in one.gpus or ()) for one in (seen[0], seen[-1]))
    # Where a card does not count energy, power over time gives it.
    energy = last - first if counted else float(np.trapezoid(power, [one.at for one in seen]))
    return {
        "count": len(seen[0].gpus or ()),
        "utilisation": float(np.mean([gpu.utilisation for one in seen for gpu in one.gpus or ()])),
        "memory": max(sum(gpu.memory for gpu in one.gpus or ()) for one in seen),
        "power_w": float(np.mean(power)),
        "energy_j": energy,
        "energy_per_token_j": energy / tokens if tokens and len(seen) > 1 else None,
    }


def _server_metrics(snapshots: Sequence[Snapshot]) -> dict[str, float] | None:
    """Highest value of each gauge, increase of each counter from the first to the last sample."""
    seen: list[Mapping[str, float]] = [one.metrics for one in snapshots if one.metrics]
    if len(seen) < 2:
        return None
    highest: Callable[[str], float] = lambda name: max(row[name] for row in seen if name in row)  # noqa: E731
    found = {name: highest(name) for name in GAUGES.values() if any(name in row for row in seen)}
    both = seen[0].keys() & seen[-1].keys()
    return found | {name: seen[-1][name] - seen[0][name] for name in COUNTERS.values() if name in both}
