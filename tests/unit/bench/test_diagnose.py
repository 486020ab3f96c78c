"""Every likely cause from numbers that speak for it, and none from those that do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.bench.diagnose import diagnose
from pipeline.report.diagnosis import diagnosis_page, lines
from tests.unit.bench.simulate import Machine, benched

Numbers = dict[str, Any]
CALM = benched("int8", [Machine(16, 0.03, 0.01)] * 2, "sha256:x").plain()


def changed(change: Callable[[Numbers], None], **more: Any) -> Numbers:
    found = copy.deepcopy(CALM) | more
    for run in found["runs"]:
        change(run)
    return found


def causes(bench: Numbers) -> set[str]:
    return {cause.name for cause in diagnose(bench).causes}


def test_a_calm_server_has_no_cause() -> None:
    calm = [run for run in CALM["runs"] if run["load"] != "spike"]
    found = diagnose(CALM | {"runs": calm})
    assert found.causes == ()
    assert lines(found)[-1] == "  no likely cause stands out"


def test_shares_add_up_to_the_request() -> None:
    """30 ms to the first token, 15 tokens of 10 ms; the server's parts are the client's whole."""
    first = diagnose(CALM).shares[0]
    assert first.point == "sweep 1"
    assert first.e2e_ms == pytest.approx(180)
    assert first.ttft_ms == pytest.approx(30)
    assert (first.queue_ms, first.prefill_ms, first.decode_ms) == pytest.approx((0, 30, 150), abs=1e-6)
    assert first.rest_ms == pytest.approx(0, abs=1e-6)


def test_the_overload_of_a_spike_is_named() -> None:
    slow = benched("int8", [Machine(2, 0.1, 0.02)], "sha256:x").plain()
    named = {(cause.name, cause.point) for cause in diagnose(slow).causes}
    assert ("overload", "spike 4 to 40/s") in named
    assert ("overload", "sweep 1") not in named


def metrics(**values: float) -> Callable[[Numbers], None]:
    return lambda run: run["metrics"].update(values)


def gpu(run: Numbers) -> None:
    run["gpu"] = {"utilisation": 30.0}


def busy(run: Numbers) -> None:
    run["server"]["cpu_cores"] = 1.95


def died(run: Numbers) -> None:
    run["server"]["died"] = True


def lagged(run: Numbers) -> None:
    run["client"] |= {"valid": False, "why": "requests were sent late"}


def refused(run: Numbers) -> None:
    run["failures"] = {"HTTP 400": 3}
    run["failure_details"] = {"HTTP 400": ["600 prompt tokens exceed this engine's limit of 512 tokens"]}


def stalls(run: Numbers) -> None:
    run["latency"]["itl_ms"] |= {"p50": 10.0, "p99": 45.0}


def warming(run: Numbers) -> None:
    for row in run["slices"][: len(run["slices"]) // 2]:
        row["ttft_ms"] = 90.0


@pytest.mark.parametrize(
    ("change", "more", "cause"),
    [
        (metrics(preemptions=12.0), {}, "preemption"),
        (metrics(kv_cache=0.97), {}, "KV cache full"),
        (metrics(running=16.0, waiting=5.0, queue_s=900.0), {}, "batch limit"),
        (metrics(running=40.0, waiting=5.0, queue_s=900.0), {"limits": {}}, "batch limit"),
        (metrics(queue_s=9000.0), {}, "overload"),
        (gpu, {}, "CPU-bound server"),
        (busy, {}, "all cores busy"),
        (died, {}, "the server died"),
        (lagged, {}, "the client lagged"),
        (refused, {}, "profile limit"),
        (stalls, {}, "stalls between tokens"),
        (warming, {}, "still warming up"),
    ],
)
def test_causes(change: Callable[[Numbers], None], more: Numbers, cause: str) -> None:
    found = diagnose(changed(change, **more))
    assert cause in {one.name for one in found.causes}
    assert cause not in causes(CALM | {"runs": [run for run in CALM["runs"] if run["load"] != "spike"]})
    chosen = next(one for one in found.causes if one.name == cause)
    assert any(char.isdigit() for char in chosen.evidence) or cause == "the client lagged"
    assert chosen.advice


@pytest.mark.parametrize(
    ("change", "more", "cause"),
    [
        (metrics(running=15.0, waiting=5.0, queue_s=900.0), {}, "batch limit"),  # room in the batch
        (metrics(running=16.0, waiting=1.0, queue_s=0.0), {}, "batch limit"),  # nobody waits for long
        (lambda run: run["failure_details"].update({"HTTP 400": ["unknown model"]}), {}, "profile limit"),
        (busy, {"device": {"gpu": "NVIDIA L4"}}, "all cores busy"),
    ],
)
def test_no_cause_without_its_evidence(change: Callable[[Numbers], None], more: Numbers, cause: str) -> None:
    assert cause not in causes(changed(change, **more))


def test_a_server_that_tells_nothing() -> None:
    found = diagnose(changed(lambda run: run.update(metrics=None)))
    assert found.shares[0].queue_ms is None
    assert "the server tells no parts" in lines(found)[1]
    page = diagnosis_page(found)
    assert "sweep 1" in page


def test_the_page_has_layers_timelines_and_escapes() -> None:
    evil = "<script>alert(1)</script>"
    bench = changed(lambda run: run["slowest"][0].update(item=evil))
    found = diagnose(
        bench, [{"name": "a", "precision": "Half", "ms": 0.1}, {"name": evil, "precision": evil, "ms": 2.5}]
    )
    assert [row["ms"] for row in found.layers] == [2.5, 0.1]
    assert len(found.slowest) == 10
    page = diagnosis_page(found, [f"traces go to {evil}"])
    assert "<script" not in page
    assert page.count("alert(1)") >= 3
    assert "2.5000" in page
    assert 'class="arrival"' in page
