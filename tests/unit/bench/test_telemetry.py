"""What is seen beside a load: a GPU that is played, real processes, metrics as the two servers write them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.bench.gpus import Gpu, Nvml, find_nvml
from pipeline.bench.telemetry import (
    Processes,
    Snapshot,
    Telemetry,
    added,
    cpu_cores,
    parse_metrics,
    summary,
)
from pipeline.serving.process import Server
from tests.func.serving.test_answer import served
from tests.unit.serving.fake_engine import FakeExecutor
from tests.unit.serving.mock_server import scripted

# As vllm 0.32 prints them, cut to what is read and a little that is not.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="checkpoint"} 3.0
vllm:num_requests_running{engine="1",model_name="checkpoint"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="checkpoint"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="checkpoint"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="checkpoint"} 0.75
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="checkpoint"} 4.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="checkpoint"} 9.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="checkpoint"} 10.0
vllm:request_queue_time_seconds_count{engine="0",model_name="checkpoint"} 10.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="checkpoint"} 1.5
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{engine="0",le="+Inf",model_name="checkpoint"} 10.0
vllm:request_decode_time_seconds_count{engine="0",model_name="checkpoint"} 10.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="checkpoint"} 20.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 8.0
"""


def test_vllms_metrics() -> None:
    assert parse_metrics(VLLM) == {
        "running": 5.0,
        "waiting": 7.0,
        "kv_cache": 0.75,
        "preemptions": 4.0,
        "queue_s": 1.5,
        "decode_s": 20.0,
        "finished": 10.0,
    }


def test_tensorrt_llms_metrics() -> None:
    """Names as NVIDIA's AIPerf lists them for trtllm-serve; never read from a real one here."""
    text = VLLM.replace("vllm:kv_cache_usage_perc", "trtllm_kv_cache_utilization").replace("vllm:", "trtllm_")
    assert parse_metrics(text) == parse_metrics(VLLM)
    assert Telemetry(Server("s", "http://127.0.0.1:9", None, dialect="trtllm-serve")).path == "/prometheus/metrics"


def test_our_servers_metrics_read_the_same_way() -> None:
    from pipeline.engines.metrics import Metrics
    from pipeline.engines.scheduler import Job, Scheduler

    scheduler = Scheduler(FakeExecutor())
    metrics = Metrics(scheduler)
    done: list[Any] = []
    job = Job([5, 6, 7], 4, frozenset(), done.append)
    scheduler.submit(job)
    while not job.finished:
        time.sleep(0.001)
    scheduler.close()
    assert job.queued_at <= job.taken_at <= job.first_at <= job.last_at
    job.queued_at, job.taken_at, job.first_at, job.last_at = 1.0, 1.5, 2.5, 6.5
    metrics.finished(job)
    assert parse_metrics(metrics.text().decode()) == {
        **{"running": 0, "waiting": 0, "queue_s": 0.5, "prefill_s": 1.0, "decode_s": 4.0, "finished": 1.0}
    }


class FakeNvml:
    """Two cards; the second counts no energy and knows no utilisation (a part of a card)."""

    class NVMLError_NotSupported(Exception):  # noqa: N801, N818
        pass

    def __init__(self) -> None:
        self.started = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.started = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, place: int) -> int:  # noqa: N802
        return place

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}abc"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise self.NVMLError_NotSupported
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=1000 + handle)

    def nvmlDeviceGetPowerUsage(self, _handle: int) -> int:  # noqa: N802
        return 250_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if handle == 1:
            raise self.NVMLError_NotSupported
        return 5_000


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, [0, 1]), ("1", [1]), ("GPU-0", [0]), ("0,1", [0, 1]), ("GPU-0abc", [0]), ("-1", [])]
)
def test_the_gpus_of_this_process(visible: str | None, seen: list[int]) -> None:
    cards = [Gpu(50.0, 1000, 250.0, 5.0), Gpu(None, 1001, 250.0, None)]
    module = FakeNvml()
    assert list(Nvml(module, visible).read()) == [cards[place] for place in seen]
    assert module.started


def test_a_machine_without_a_driver_has_no_nvml() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    assert find_nvml() is None


def shot(at: float, cpu_s: float | None = None, **more: Any) -> Snapshot:
    return Snapshot(at, cpu_s, *(more.get(name) for name in ("rss", "gpus", "metrics")))


def test_cores_between_two_times() -> None:
    """0.5 cores in the first two seconds, 2 afterwards, sampled each second."""
    seen = [shot(at, 10 + min(at, 2) * 0.5 + max(0, at - 2) * 2) for at in range(6)]
    assert cpu_cores(seen, 0, 2) == pytest.approx(0.5)
    assert cpu_cores(seen, 2, 5) == pytest.approx(2)
    assert cpu_cores(seen, 1.5, 2.5) == pytest.approx(1.25)
    assert cpu_cores([shot(0), shot(1)], 0, 1) is None
    assert cpu_cores(seen, 1, 1) is None


def test_energy_a_token_and_peaks() -> None:
    """Two cards of 100 W for 4 s: 800 J; 400 tokens; the counters start anywhere."""
    metrics = [{"running": 2.0, "queue_s": 5.0}, {"running": 9.0, "queue_s": 5.5}, {"running": 4.0, "queue_s": 8.0}]
    seen = [
        shot(at, 0.0, rss=100 + at, gpus=(Gpu(80, 5, 100, 7 + 100 * at), Gpu(40, 6 + at, 100, 100 * at)), metrics=row)
        for at, row in zip((0, 2, 4), metrics, strict=True)
    ]
    found = summary(seen, 0, 4, 400)
    assert found["gpu"] == {
        **{"count": 2, "utilisation": 60, "memory": 15, "power_w": 200},
        **{"energy_j": 800, "energy_per_token_j": 2},
    }
    assert found["rss"] == 104
    assert found["metrics"] == {"running": 9.0, "queue_s": 3.0}
    # Cards that count no energy: power over time gives the same.
    bare = [shot(one.at, gpus=tuple(Gpu(80, 5, 100, None) for _ in range(2))) for one in seen]
    assert summary(bare, 0, 4, 400)["gpu"]["energy_j"] == pytest.approx(800)
    mute = [shot(one.at, gpus=(Gpu(None, 5, None, None), Gpu(40, None, 100, None))) for one in seen]
    assert set(summary(mute, 0, 4, 400)["gpu"].values()) == {2, None}  # two cards, and nothing known of both
    assert summary([shot(0), shot(1)], 0, 1, 5)["gpu"] is None


def test_the_cpu_of_a_process_and_its_children() -> None:
    """A parent that only waits for a child that works: the work is seen, also after the child's end."""
    child = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\ntime.sleep(0.5)"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}]); time.sleep(30)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        processes = Processes(parent.pid)
        most = 0
        deadline = time.monotonic() + 30
        while (cpu := processes.read())[0] < 0.3 and time.monotonic() < deadline:
            most = max(most, cpu[1])
            time.sleep(0.05)
        seconds = processes.read()[0]
        assert seconds >= 0.3
        assert most > 5_000_000
    finally:
        parent.kill()
        parent.wait()
    assert processes.read() == (seconds, 0)


def test_a_server_without_metrics_and_of_another_machine_says_none() -> None:
    with scripted(lambda _body: []) as (url, _):
        snapshot = Telemetry(Server("s", url, None)).snapshot()
    assert (snapshot.cpu_s, snapshot.rss, snapshot.gpus, snapshot.metrics) == (None, None, None, None)
    assert snapshot.plain(snapshot.at) == {"at": 0.0, "cpu_s": None, "rss": None, "gpus": None, "metrics": None}


def test_replicas_are_one_server() -> None:
    """Counts add up, the fullest KV cache speaks; the metrics of some of them would be no metrics."""
    assert added([{"running": 2.0, "kv_cache": 0.3}, {"running": 3.0, "kv_cache": 0.2}]) == {
        **{"running": 5.0, "kv_cache": 0.3}
    }
    with served(FakeExecutor()) as url:
        twin = Server("b", url, None)
        assert Telemetry(Server("a", url, None, others=(twin,))).snapshot().metrics is not None
        gone = Server("c", "http://127.0.0.1:9", None)
        assert Telemetry(Server("a", url, None, others=(gone,))).snapshot().metrics is None


def test_sampling_has_both_ends_and_passes_its_failures_on(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry(Server("s", "http://127.0.0.1:9", None))
    with telemetry.sampling(0.02) as snapshots:
        time.sleep(0.1)
        inside = len(snapshots)
    assert len(snapshots) > inside > 1
    assert [one.at for one in snapshots] == sorted(one.at for one in snapshots)
    left = [telemetry.snapshot()]
    monkeypatch.setattr(telemetry, "snapshot", left.pop)
    with pytest.raises(IndexError, match="pop from empty list"), telemetry.sampling(0.001):
        time.sleep(0.1)


def test_our_server_tells_of_a_request_over_http() -> None:
    with served(FakeExecutor()) as url:
        telemetry = Telemetry(Server("s", url, None))
        assert telemetry.snapshot().metrics == {
            **{"running": 0, "waiting": 0, "queue_s": 0, "prefill_s": 0, "decode_s": 0, "finished": 0}
        }
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)).read()
        metrics = telemetry.snapshot().metrics
    assert metrics is not None
    assert metrics["finished"] == 1
    assert metrics["decode_s"] > 0
