"""From what one server carries to a fleet: servers and cost for a rate, on 1 to 16 nodes.

Two ways to use several nodes:

- *replicated*: every node runs a whole engine behind a load balancer; capacity is ``nodes * one * balance``.
- *sharded*: one server spans all nodes (tensor parallel). On one node a step of one token takes the measured time per
  token t. On n nodes the serial part stays, the rest is divided, and each layer adds two ring all-reduces:
  t(n) = t * (serial + (1 - serial) / n) + 2 * layers * (latency + 2 * (n - 1) / n * bytes / bandwidth), with
  bytes = rows in flight * hidden size * 2 (half precision). Capacity grows as t / t(n).

The first is arithmetic over a measurement. The second is a model: its inputs in ``prices.yaml`` are assumptions, and
a fleet that is bought on it should be measured first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pipeline.gate.cost import Prices, capacity
from pipeline.gate.service import STRICT

PRICES_FILE = Path("prices.yaml")
NODES = range(1, 17)
HALF = 2  # bytes of an activation
Strategy = Literal["replicated", "sharded"]
HOUR_S = 3600


@dataclass(frozen=True)
class Network:
    """What connects the nodes of a sharded server."""

    __pydantic_config__ = STRICT
    latency_us: float = 10.0  # of one all-reduce
    gigabytes_per_s: float = 50.0  # between two nodes
    per_gigabyte: Decimal = Decimal(0)  # price of the traffic
    serial: float = 0.1  # share of a step that more nodes do not shorten

    def __post_init__(self) -> None:
        for name in ("latency_us", "per_gigabyte"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more")
        if self.gigabytes_per_s <= 0:
            raise ValueError("gigabytes_per_s: must be more than 0")
        if not 0 <= self.serial <= 1:
            raise ValueError("serial: must be between 0 and 1")


@dataclass(frozen=True)
class Fleet:
    """The fleet that is asked for."""

    __pydantic_config__ = STRICT
    requests_per_s: float | None = None  # null: ten times what one baseline server carries
    headroom: float = 0.3  # capacity kept free for a spike, as a share of the rate
    balance: float = 0.95  # share of its replicas' capacity that a load balancer reaches
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.requests_per_s is not None and self.requests_per_s <= 0:
            raise ValueError("requests_per_s: must be more than 0, or null")
        if self.headroom < 0:
            raise ValueError("headroom: must be 0 or more")
        if not 0 < self.balance <= 1:
            raise ValueError("balance: must be more than 0 and at most 1")


@dataclass(frozen=True)
class PriceFile:
    """All of ``prices.yaml``."""

    __pydantic_config__ = STRICT
    prices: Prices = field(default_factory=Prices)
    fleet: Fleet = field(default_factory=Fleet)


def load_prices(path: Path = PRICES_FILE) -> PriceFile:
    """Reads and checks ``prices.yaml``; without the file there are no prices. Raises ConfigError."""
    from pipeline.config import load_typed

    return load_typed(path, PriceFile) if path.exists() else PriceFile()


@dataclass(frozen=True)
class Shape:
    """What sharding depends on of a model."""

    layers: int
    hidden: int


@dataclass(frozen=True)
class Row:
    """One fleet: so many nodes of one arm. ``capacity`` is in good requests a second; ``carries`` says whether it
    holds the rate, ``absorbs`` whether the headroom is there too. Costs are None without a price."""

    arm: str
    strategy: Strategy
    nodes: int
    capacity: float
    carries: bool
    absorbs: bool
    cost_per_hour: float | None
    cost_per_million: float | None  # at the asked rate, None when it is not carried

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class One:
    """One measured server: its capacity at the service level, means over repeats."""

    arm: str
    requests_per_s: float
    tokens_per_request: float  # of the price's basis
    step_s: float | None  # one token of every row in flight: the median time per token there
    rows: int
    hourly: Decimal | None


def one_server(bench: Mapping[str, Any], share: Decimal, prices: Prices) -> One | None:
    """What one server of an arm carries; None when no point of the sweep keeps the level, or its client lagged."""
    best = capacity(bench["runs"], share)
    runs = [run for run in bench["runs"] if best and run["point"] == best.point]
    if best is None or not best.holds or not all(run["client"]["valid"] for run in runs):
        return None
    rate, tokens = _mean(best.requests_per_s), _mean(best.tokens_per_s(prices.basis))
    steps = [run["latency"]["tpot_ms"]["p50"] for run in runs]
    step_s = None if None in steps else _mean(steps) / 1000
    return One(str(bench["arm"]), rate, tokens / rate, step_s, best.concurrency, prices.of(bench))


def fleet_rows(
    server: One, wanted: float, plan: Fleet, shape: Shape | None, nodes: Sequence[int] = NODES
) -> Iterator[Row]:
    """Both ways on 1 to 16 nodes, for a rate of ``wanted`` requests a second. Sharding needs the model's shape and
    the measured time per token."""
    for count in nodes:
        yield _row(server, "replicated", count, carried=replicated(server, count, plan), wanted=wanted, plan=plan)
    if shape is None or server.step_s is None:
        return
    for count in nodes:
        step = step_s(server, count, plan.network, shape)
        carried = server.requests_per_s * server.step_s / step
        gigabytes_per_s = count * _sent(server, count, shape) / step / 1e9
        traffic = gigabytes_per_s * HOUR_S * float(plan.network.per_gigabyte)
        yield _row(server, "sharded", count, carried=carried, wanted=wanted, plan=plan, traffic=traffic)


def replicated(server: One, nodes: int, plan: Fleet) -> float:
    """Requests a second of ``nodes`` whole engines; a single one needs no balancer."""
    return server.requests_per_s * nodes * (plan.balance if nodes > 1 else 1.0)


def step_s(server: One, nodes: int, network: Network, shape: Shape) -> float:
    """Seconds of one step of a server that is sharded over ``nodes`` nodes: t(n) above."""
    assert server.step_s is not None
    if nodes == 1:
        return server.step_s
    compute = server.step_s * (network.serial + (1 - network.serial) / nodes)
    exchange = _sent(server, nodes, shape) / (network.gigabytes_per_s * 1e9)
    return compute + 2 * shape.layers * network.latency_us * 1e-6 + exchange


def _sent(server: One, nodes: int, shape: Shape) -> float:
    """Bytes that each node sends in one step."""
    return 2 * shape.layers * 2 * (nodes - 1) / nodes * server.rows * shape.hidden * HALF


def _row(
    server: One, strategy: Strategy, nodes: int, *, carried: float, wanted: float, plan: Fleet, traffic: float = 0.0
) -> Row:
    hourly = None if server.hourly is None else float(server.hourly) * nodes + traffic
    tokens_per_hour = wanted * server.tokens_per_request * HOUR_S
    return Row(
        arm=server.arm,
        strategy=strategy,
        nodes=nodes,
        capacity=carried,
        carries=carried >= wanted,
        absorbs=carried >= wanted * (1 + plan.headroom),
        cost_per_hour=hourly,
        cost_per_million=hourly / tokens_per_hour * 1e6 if hourly is not None and carried >= wanted else None,
    )


def nodes_needed(server: One, wanted: float, plan: Fleet) -> int:
    """Replicas for a rate with its headroom."""
    rate = wanted * (1 + plan.headroom)
    if rate <= server.requests_per_s:
        return 1
    return max(2, math.ceil(rate / (server.requests_per_s * plan.balance)))


def wanted_rate(plan: Fleet, baseline: One | None, others: Sequence[One]) -> float | None:
    """The rate that the fleet is planned for."""
    if plan.requests_per_s is not None:
        return plan.requests_per_s
    first = baseline or (others[0] if others else None)
    return None if first is None else 10 * first.requests_per_s


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
