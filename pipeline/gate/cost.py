"""What one server carries, and what a million tokens cost on it. Pure arithmetic over measured runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from pipeline.gate.service import STRICT

Basis = Literal["input", "output", "total"]
Run = Mapping[str, Any]  # one run of a bench.json
CPU = "cpu"  # the price of a machine without a GPU


@dataclass(frozen=True)
class Prices:
    """What an hour of a device costs, and which tokens a million counts."""

    __pydantic_config__ = STRICT
    hourly: dict[str, Decimal] = field(default_factory=dict)  # device as in artifacts/platform.json, or cpu
    currency: str = "USD"
    basis: Basis = "output"
    utilisation: Decimal = Decimal(60)  # per cent of the paid time in which a server works at its capacity

    def __post_init__(self) -> None:
        for device, price in self.hourly.items():
            if not (price.is_finite() and price > 0):
                raise ValueError(f"hourly.{device}: must be more than 0")
        if not 0 < self.utilisation <= 100:
            raise ValueError("utilisation: must be more than 0 and at most 100")

    def of(self, bench: Mapping[str, Any]) -> Decimal | None:
        """The hourly price of the server that a bench.json speaks of, all its devices; None when not listed."""
        price = self.hourly.get(device_name(bench))
        return None if price is None else price * bench["devices"]


def device_name(bench: Mapping[str, Any]) -> str:
    """The device as the price file names it."""
    return str(bench["device"].get("gpu") or CPU)


@dataclass(frozen=True)
class Capacity:
    """What one server carries at the best point of the sweep; numbers are one a repeat, of good requests alone.

    ``holds`` is False when no point of the sweep keeps the wanted share of good requests; then ``point`` is the
    lightest one.
    """

    point: str
    concurrency: int
    holds: bool
    share: float  # per cent of requests that were good, mean over repeats
    requests_per_s: tuple[float, ...]
    output_tokens_per_s: tuple[float, ...]
    input_tokens_per_s: tuple[float, ...]

    def tokens_per_s(self, basis: Basis) -> tuple[float, ...]:
        """Tokens that are paid for."""
        pairs = zip(self.input_tokens_per_s, self.output_tokens_per_s, strict=True)
        chosen = {"input": (1, 0), "output": (0, 1), "total": (1, 1)}[basis]
        return tuple(chosen[0] * given + chosen[1] * made for given, made in pairs)


def points(runs: Iterable[Run], load: str) -> dict[str, list[Run]]:
    """The runs of one kind of load by point, repeats in order; lighter points first."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["weight"], run["point"], run["repeat"])):
        if run["load"] == load:
            found.setdefault(run["point"], []).append(run)
    return found


def capacity(runs: Sequence[Run], share: Decimal) -> Capacity | None:
    """The point of the sweep with the highest goodput among those where at least ``share`` per cent of the requests
    were good. None without a sweep."""
    found = [_capacity(rows, share) for rows in points(runs, "sweep").values()]
    if not found:
        return None
    # The lightest of equal points: max keeps the first.
    holding = [point for point in found if point.holds]
    return max(holding, key=lambda point: math.fsum(point.requests_per_s)) if holding else found[0]


def _capacity(rows: Sequence[Run], share: Decimal) -> Capacity:
    good = [run["good"] for run in rows]
    mean = math.fsum(part["share"] for part in good) / len(good)
    return Capacity(
        point=rows[0]["point"],
        concurrency=rows[0]["weight"],
        holds=mean >= share and all(part["requests_per_s"] > 0 for part in good),
        share=mean,
        requests_per_s=tuple(part["requests_per_s"] for part in good),
        output_tokens_per_s=tuple(part["output_tokens_per_s"] for part in good),
        input_tokens_per_s=tuple(part["input_tokens_per_s"] for part in good),
    )


def cost_per_million(hourly: Decimal, tokens_per_s: float, utilisation: Decimal) -> float:
    """Price of a million tokens: hourly / (tokens a second * 3600 * utilisation) * 1e6; infinite for no tokens."""
    if tokens_per_s <= 0:
        return math.inf
    return float(hourly) * 1e6 / (tokens_per_s * 3600 * float(utilisation) / 100)
