"""Several client processes share a load, start together, and are gone afterwards."""

from __future__ import annotations

import os

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.load import Load, Prompts, constant, sweep
from pipeline.bench.workers import ClientError, client, parts, workers_for
from tests.unit.bench.simulate import ITEMS
from tests.unit.serving.mock_server import DONE, chunk, scripted, usage

PROMPTS = Prompts(ITEMS, 4, 512)


@given(st.integers(1, 200), st.integers(1, 9))
def test_open_loops_are_shared_without_loss(count: int, workers: int) -> None:
    load = constant(PROMPTS, count, 1.0, 1)
    assert load.due is not None
    shares = parts(load, "u", "m", 1.0, workers)
    assert all(share.due is not None and len(share.due) == len(share.requests) > 0 for share in shares)
    together = sorted(
        (due, ask.id) for share in shares for due, ask in zip(share.due or (), share.requests, strict=True)
    )
    assert together == sorted((due, ask.id) for due, ask in zip(load.due, load.requests, strict=True))


@given(st.integers(1, 300), st.integers(1, 9))
def test_slots_are_shared_without_loss(slots: int, workers: int) -> None:
    shares = parts(sweep(PROMPTS, slots, 1.0, 1), "u", "m", 1.0, workers)
    assert sum(share.slots for share in shares) == slots
    assert all(share.slots > 0 and len(share.requests) == len(ITEMS) for share in shares)


def test_processes_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert workers_for(sweep(PROMPTS, 64, 1.0, 1)) == 1
    assert workers_for(sweep(PROMPTS, 1000, 1.0, 1)) == 4
    assert workers_for(constant(PROMPTS, 3500, 2.0, 1)) == 4
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert workers_for(constant(PROMPTS, 3500, 2.0, 1)) == 2
    assert workers_for(Load("replay", "r", 1, 1.0, (), ())) == 1


def test_two_processes_send_one_load() -> None:
    load = constant(PROMPTS, 40, 1.0, 1)

    def script(body: dict[str, object]) -> list[object]:
        return [chunk([1, 2, 3, 4], "", "length"), usage(len(body["prompt"]), 4), DONE]  # type: ignore[arg-type]

    with scripted(script) as (url, seen), client() as workers:
        start, driven = workers.run(parts(load, url, "mock", 60.0, 2))
        first = {process.pid for process, _ in workers._running}
        workers.run(parts(load, url, "mock", 60.0, 2))
        assert {process.pid for process, _ in workers._running} == first  # they live from load to load
        assert all(map(psutil.pid_exists, first))
    assert start > 0
    assert len(driven) == 2
    samples = [sample for one in driven for sample in one.samples]
    assert [sample.failure for sample in samples] == [""] * 40
    assert sorted(sample.due_s for sample in samples) == list(load.due or ())
    assert len(seen) == 80
    assert not any(map(psutil.pid_exists, first))


def test_a_client_process_that_dies_is_an_error_not_a_result() -> None:
    load = constant(PROMPTS, 10, 1.0, 1)
    with client() as workers, scripted(lambda _body: []) as (url, _):
        workers.run(parts(load, url, "mock", 1.0, 1))
        workers._running[0][0].kill()
        with pytest.raises(ClientError, match="a client process ended"):
            workers.run(parts(load, url, "mock", 1.0, 1))
