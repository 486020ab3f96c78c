"""What a policy says about service: what a good request is, and the levels that an arm must keep under load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal

STRICT = {"extra": "forbid", "strict": True}  # as in pipeline.config, which this package does not import
PERCENTILES = tuple(map(Decimal, ("50", "90", "95", "99", "99.9")))
BEYOND = 10  # a percentile needs this many requests beyond it
Measure = Literal["ttft_ms", "tpot_ms", "e2e_ms", "error_rate", "cost", "cpu_growth"]
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
Kind = Literal["sweep", "constant", "poisson", "spike", "replay"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def requests_needed(percentile: Decimal) -> int:
    """Requests below which a percentile is no number: ten must be expected beyond it (p50: 20, p99.9: 10 000)."""
    return int((BEYOND / (1 - percentile / 100)).to_integral_value(rounding="ROUND_CEILING"))


@dataclass(frozen=True)
class Good:
    """Limits of one good request, in milliseconds; None sets none. Goodput counts requests that keep all of them."""

    __pydantic_config__ = STRICT
    ttft_ms: Decimal | None = Decimal(1000)
    tpot_ms: Decimal | None = Decimal(100)
    e2e_ms: Decimal | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            _require(limit is None or (limit.is_finite() and limit > 0), f"{name}: must be more than 0, or null")


@dataclass(frozen=True)
class Level:
    """One promise about an arm under one kind of load; what is None comes from the preset.

    The limit is ``below`` (the value must be less) or ``most`` (it may be equal). ``at`` is the percentile of a
    latency; failed requests count as infinitely slow.
    """

    __pydantic_config__ = STRICT
    preset: str | None = None  # the level's own name when that is a preset's
    measure: Measure | None = None
    load: Kind | None = None
    at: Decimal | None = None
    below: Decimal | None = None
    most: Decimal | None = None
    importance: Literal["critical", "advisory"] = "advisory"

    def __post_init__(self) -> None:
        _require(self.preset is None or self.preset in PRESETS, f"preset: must be one of {', '.join(PRESETS)}")
        _require(self.below is None or self.most is None, "most: give `below` or `most`, not both")
        for name in ("below", "most"):
            limit = getattr(self, name)
            _require(limit is None or (limit.is_finite() and limit >= 0), f"{name}: must be 0 or more")
        _require(self.at is None or self.at in PERCENTILES, f"at: must be one of {', '.join(map(str, PERCENTILES))}")

    @property
    def limit(self) -> Decimal:
        """The number that the value is held against."""
        limit = self.most if self.below is None else self.below
        assert limit is not None
        return limit

    def keeps(self, value: Decimal) -> bool:
        """Whether a value is within the limit."""
        return value < self.limit if self.below is not None else value <= self.limit


PRESETS: dict[str, Level] = {}
PRESETS |= {
    "speed-first": Level(measure="tpot_ms", load="sweep", at=Decimal(90), below=Decimal(5)),
    "infer-scale": Level(measure="e2e_ms", load="poisson", at=Decimal("99.9"), below=Decimal(2000)),
    "reliability-first": Level(measure="error_rate", load="spike", below=Decimal(5)),
    "cost-efficiency": Level(measure="cost", load="sweep", below=Decimal("0.12")),
    "performance-first": Level(measure="cpu_growth", load="spike", most=Decimal(30)),
}


@dataclass(frozen=True)
class Service:
    """The policy's section ``service``."""

    __pydantic_config__ = STRICT
    good: Good = field(default_factory=Good)
    share: Decimal = Decimal(95)  # per cent of requests that must be good where a load counts as carried
    levels: dict[str, Level] = field(default_factory=lambda: {name: Level() for name in PRESETS})
    repeats: int = 3  # repeats on fresh servers that a critical level needs

    def __post_init__(self) -> None:
        _require(0 < self.share <= 100, "share: must be more than 0 and at most 100")
        _require(self.repeats >= 1, "repeats: must be at least 1")
        for name in self.levels:
            self.level(name)

    def level(self, name: str) -> Level:
        """The level with its preset filled in. ValueError, naming the key, for one that is not complete."""
        given = self.levels[name]
        preset = PRESETS.get(given.preset or name, Level())
        limits = given if (given.below, given.most) != (None, None) else preset
        level = replace(
            given,
            preset=given.preset or (name if name in PRESETS else None),
            measure=given.measure or preset.measure,
            load=given.load or preset.load,
            at=given.at or preset.at,
            below=limits.below,
            most=limits.most,
        )
        key = f"levels.{name}"
        _require(level.measure is not None, f"{key}.measure: name a measure, or a preset")
        _require(level.load is not None, f"{key}.load: name a load")
        _require((level.below, level.most) != (None, None), f"{key}.most: give a limit, `below` or `most`")
        _require(level.measure not in LATENCIES or level.at is not None, f"{key}.at: name the percentile")
        # 99.90 is 99.9: one spelling, which is also the key in a bench.json.
        at = next((one for one in PERCENTILES if one == level.at), None)
        level = replace(level, at=at if level.measure in LATENCIES else None)
        _require(level.measure != "cost" or level.load == "sweep", f"{key}.load: cost is measured by the sweep")
        _require(level.measure != "cpu_growth" or level.load == "spike", f"{key}.load: CPU growth needs the spike")
        return level

    def resolved(self) -> dict[str, Level]:
        """Every level, complete."""
        return {name: self.level(name) for name in self.levels}
