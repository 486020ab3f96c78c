"""Fleets by hand: replicas, a sharded server, what they cost."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.fleet import (
    Fleet,
    Network,
    One,
    PriceFile,
    Shape,
    fleet_rows,
    load_prices,
    nodes_needed,
    one_server,
    step_s,
    wanted_rate,
)
from pipeline.errors import ConfigError
from pipeline.gate.cost import Prices
from tests.unit.bench.simulate import Machine, benched

ROOT = Path(__file__).parents[3]
ONE = One("int8", requests_per_s=10.0, tokens_per_request=100.0, step_s=0.010, rows=8, hourly=Decimal(2))
PLAN = Fleet(headroom=0.5, balance=0.9, network=Network(latency_us=10, gigabytes_per_s=50, serial=0.1))
SHAPE = Shape(layers=30, hidden=4000)


def test_replicas() -> None:
    """40/s with half as much headroom is 60/s; a replica gives 10 * 0.9 behind a balancer: 7 nodes (6.67)."""
    assert nodes_needed(ONE, 40, PLAN) == 7
    assert nodes_needed(ONE, 6.6, PLAN) == 1  # 9.9 fit one server, which needs no balancer
    assert nodes_needed(ONE, 7, PLAN) == 2
    rows = [row for row in fleet_rows(ONE, 40, PLAN, None) if row.strategy == "replicated"]
    assert [row.nodes for row in rows] == list(range(1, 17))
    assert rows[0].capacity == 10
    assert rows[4].capacity == pytest.approx(45)
    assert [row.carries for row in rows].index(True) == 4
    assert [row.absorbs for row in rows].index(True) == 6
    assert rows[6].cost_per_hour == 14
    # 14 an hour for 40 requests/s of 100 tokens: 14.4 million tokens an hour.
    assert rows[6].cost_per_million == pytest.approx(14 / 14.4)
    assert rows[3].cost_per_million is None


def test_a_sharded_step_by_hand() -> None:
    """Two nodes: 10 ms * (0.1 + 0.9 / 2) = 5.5 ms; 60 all-reduces of 10 us = 0.6 ms; each moves
    8 * 4000 * 2 bytes * 2 * 1/2 = 64 000 bytes at 50 GB/s = 1.28 us, together 0.0768 ms."""
    assert step_s(ONE, 1, PLAN.network, SHAPE) == 0.010
    assert step_s(ONE, 2, PLAN.network, SHAPE) == pytest.approx(0.0055 + 0.0006 + 60 * 1.28e-6)
    rows = [row for row in fleet_rows(ONE, 1, PLAN, SHAPE) if row.strategy == "sharded"]
    assert rows[1].capacity == pytest.approx(10 * 0.010 / (0.0061 + 60 * 1.28e-6))
    assert rows[1].cost_per_hour == 4


def test_traffic_has_a_price() -> None:
    """Both nodes send 60 * 64 000 bytes a step, 1 / t steps a second, for an hour, at 0.01 a gigabyte."""
    paid = replace(PLAN, network=replace(PLAN.network, per_gigabyte=Decimal("0.01")))
    row = [row for row in fleet_rows(ONE, 1, paid, SHAPE) if row.strategy == "sharded"][1]
    gigabytes = 2 * 60 * 64_000 / (0.0061 + 60 * 1.28e-6) * 3600 / 1e9
    assert row.cost_per_hour == pytest.approx(4 + 0.01 * gigabytes)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e5), st.floats(0, 3), st.floats(0.1, 1))
def test_the_nodes_that_are_needed_are_the_fewest_that_do(
    rate: float, wanted: float, headroom: float, balance: float
) -> None:
    plan = Fleet(headroom=headroom, balance=balance)
    server = replace(ONE, requests_per_s=rate)
    nodes = nodes_needed(server, wanted, plan)

    def carried(count: int) -> float:
        return rate * count * (balance if count > 1 else 1)

    assert carried(nodes) >= wanted * (1 + headroom) * (1 - 1e-9)
    assert nodes == 1 or carried(nodes - 1) < wanted * (1 + headroom) * (1 + 1e-9)


@given(st.integers(2, 16), st.floats(0, 1000), st.floats(0.1, 1000))
def test_a_worse_network_never_makes_a_sharded_step_faster(nodes: int, latency: float, bandwidth: float) -> None:
    network = Network(latency, bandwidth)
    for worse in (replace(network, latency_us=latency + 1), replace(network, gigabytes_per_s=bandwidth / 2)):
        assert step_s(ONE, nodes, worse, SHAPE) > step_s(ONE, nodes, network, SHAPE)


def test_one_server_from_a_bench() -> None:
    """Four rows, 40 ms a request of 16 tokens: 100 requests/s in all at concurrency 16; one row alone gives 25."""
    arm = benched("int8", [Machine(4, 0.01, 0.002)] * 3, "sha256:x").plain()
    prices = Prices(hourly={"cpu": Decimal(1)})
    found = one_server(arm, Decimal(95), prices)
    assert found is not None
    assert (found.arm, found.rows, found.hourly) == ("int8", 4, 1)
    assert found.requests_per_s == pytest.approx(100, rel=0.01)
    assert found.tokens_per_request == pytest.approx(16)
    assert found.step_s == pytest.approx(0.002)
    slow = benched("slow", [Machine(4, 3.0, 0.2)] * 3).plain()
    assert one_server(slow, Decimal(95), prices) is None  # no point keeps the service level
    lagged = arm | {"runs": [run | {"client": {"valid": False}} for run in arm["runs"]]}
    assert one_server(lagged, Decimal(95), prices) is None


def test_the_rate_that_is_planned_for() -> None:
    assert wanted_rate(Fleet(requests_per_s=77), ONE, []) == 77
    assert wanted_rate(Fleet(), ONE, []) == 100
    assert wanted_rate(Fleet(), None, [ONE]) == 100
    assert wanted_rate(Fleet(), None, []) is None


def test_without_a_price_there_is_no_cost() -> None:
    rows = list(fleet_rows(replace(ONE, hourly=None), 10, PLAN, None))
    assert {(row.cost_per_hour, row.cost_per_million) for row in rows} == {(None, None)}


def test_the_price_file(tmp_path: Path) -> None:
    assert load_prices(tmp_path / "prices.yaml") == PriceFile()
    shown = load_prices(ROOT / "prices.yaml")
    assert shown.prices.hourly["cpu"] == Decimal("0.10")
    assert shown.fleet == Fleet()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: {hourly: {cpu: 0}}\n", r":1: prices\.hourly\.cpu: must be more than 0"),
        ("prices: {basis: answers}\n", r":1: prices\.basis"),
        ("prices: {utilisation: 0}\n", r":1: prices\.utilisation: must be more than 0"),
        ("fleet: {headroom: -1}\n", r":1: fleet\.headroom: must be 0 or more"),
        ("fleet: {balance: 0}\n", r":1: fleet\.balance"),
        ("fleet: {network: {serial: 2}}\n", r":1: fleet\.network\.serial: must be between"),
        ("fleet: {network: {gigabytes_per_s: 0}}\n", r"gigabytes_per_s: must be more than 0"),
        ("fleet: {requests_per_s: 0}\n", r"requests_per_s: must be more than 0"),
        ("price: {}\n", r":1: price: unknown key"),
    ],
)
def test_mistakes_in_prices_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.yaml.*" + message):
        load_prices(path)
