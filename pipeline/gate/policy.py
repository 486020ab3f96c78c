"""The policy: what an engine may lose. Fixed before the evaluation; its digest goes into every verdict.

``docs/policy.md`` explains every key. Margins are decimals and stay decimals: ``0.1`` is a tenth, not the
binary number nearest to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pipeline.files import digest_json
from pipeline.gate.service import Service

POLICY_FILE = Path("policy.yaml")
STRICT = {"extra": "forbid", "strict": True}  # as in pipeline.config, which this package does not import
Importance = Literal["critical", "supporting", "advisory"]
MarginKind = Literal["absolute", "relative"]
Method = Literal["newcombe", "tango"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class MetricRule:
    """One metric's budget.

    ``critical`` must be shown to stay within the margin; ``supporting`` refuses only a proven loss;
    ``advisory`` is reported. ``margin`` is in points, or in per cent of the baseline when ``relative``.
    """

    __pydantic_config__ = STRICT
    margin: Decimal
    margin_kind: MarginKind = "absolute"
    importance: Importance = "critical"
    method: Method = "newcombe"  # for right-or-wrong metrics; the others use the paired bootstrap
    options: dict[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.margin.is_finite() and self.margin > 0, "margin: must be more than 0")
        _require(self.margin < 100, "margin: must be less than 100")

    def points(self, baseline: Decimal) -> Decimal:
        """The margin in points at this baseline score. A relative margin of nothing is a ValueError."""
        if self.margin_kind == "absolute":
            return self.margin
        if baseline <= 0:
            raise ValueError("a margin relative to a baseline of 0 is no margin")
        return self.margin * baseline / 100


@dataclass(frozen=True)
class Slice:
    """A part of the evaluation set that must hold by itself: items with a tag, or of a source length in words."""

    __pydantic_config__ = STRICT
    tag: str | None = None
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        bounds = (self.min_words, self.max_words)
        _require(self.tag is not None or bounds != (None, None), "tag: name a tag, min_words or max_words")
        _require(None in bounds or bounds[0] <= bounds[1], "min_words: is more than max_words")  # type: ignore[operator]

    def holds(self, source: str, tags: tuple[str, ...]) -> bool:
        """Whether an item with this source text and these tags belongs to the slice."""
        words = len(source.split())
        return (
            (self.tag is None or self.tag in tags)
            and (self.min_words is None or words >= self.min_words)
            and (self.max_words is None or words <= self.max_words)
        )


@dataclass(frozen=True)
class Limit:
    """The highest value that is allowed, in per cent of items, and what a breach means."""

    __pydantic_config__ = STRICT
    most: Decimal
    importance: Importance = "advisory"

    def __post_init__(self) -> None:
        _require(0 <= self.most <= 100, "most: must be between 0 and 100")


@dataclass(frozen=True)
class LengthRatio:
    """Bounds of the engine's output tokens over the baseline's."""

    __pydantic_config__ = STRICT
    least: Decimal = Decimal("0.9")
    most: Decimal = Decimal("1.1")
    importance: Importance = "critical"

    def __post_init__(self) -> None:
        _require(0 < self.least <= 1, "least: must be more than 0 and at most 1")
        _require(self.most >= 1, "most: must be at least 1")


@dataclass(frozen=True)
class Fidelity:
    """How far answers may differ from the baseline's, whatever they score."""

    __pydantic_config__ = STRICT
    length_ratio: LengthRatio = field(default_factory=LengthRatio)
    excess_flips: Limit = field(default_factory=lambda: Limit(Decimal(50)))


@dataclass(frozen=True)
class Health:
    """When an evaluation is no evidence: per cent of an arm's answers that may be like this."""

    __pydantic_config__ = STRICT
    truncated: Decimal = Decimal(10)
    empty: Decimal = Decimal(5)
    degenerate: Decimal = Decimal(5)
    replacement: Decimal = Decimal(1)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(0 <= value <= 100, f"{name}: must be between 0 and 100")


def _default_metrics() -> dict[str, MetricRule]:
    return {
        "bleu": MetricRule(Decimal(2), "relative"),
        "chrf": MetricRule(Decimal(1)),
        "exact_match": MetricRule(Decimal(2), importance="supporting"),
    }


@dataclass(frozen=True)
class Policy:
    """All of ``policy.yaml``."""

    __pydantic_config__ = STRICT
    metrics: dict[str, MetricRule] = field(default_factory=_default_metrics)
    slices: dict[str, Slice] = field(default_factory=dict)
    fidelity: Fidelity = field(default_factory=Fidelity)
    health: Health = field(default_factory=Health)
    service: Service = field(default_factory=Service)
    confidence: Decimal = Decimal("0.95")  # of each one-sided bound
    looks: int = 1  # 2 plans a second look with more items; each look then spends half of the error
    cluster: bool = True  # items that share a group are resampled together
    min_groups: int = 20
    resamples: int = 2000
    seed: int = 20_260_101
    require: Literal["any", "all"] | tuple[str, ...] = "any"
    require_signature: bool = False  # `promote` and `pull` refuse an engine without a good signature

    def __post_init__(self) -> None:
        from pipeline.evaluate.registry import make_metric

        for name, rule in self.metrics.items():
            try:
                make_metric(name, rule.options)
            except ValueError as error:
                raise ValueError(f"metrics.{error}") from error
        critical = [name for name, rule in self.metrics.items() if rule.importance == "critical"]
        _require(bool(critical), "metrics: at least one metric must be critical")
        _require("all" not in self.slices, "slices.all: this name means the whole evaluation set")
        _require(Decimal("0.8") <= self.confidence < 1, "confidence: must be at least 0.8 and less than 1")
        _require(self.looks in (1, 2), "looks: must be 1 or 2")
        _require(self.min_groups >= 2, "min_groups: must be at least 2")
        _require(2000 <= self.resamples <= 1_000_000, "resamples: must be between 2000 and 1000000")
        _require(self.seed >= 0, "seed: must be 0 or more")
        _require(self.require != (), "require: must be any, all, or a list of recipes")

    @property
    def confidence_of_a_look(self) -> float:
        """The confidence of one one-sided bound: the error is split evenly over the planned looks."""
        return float(1 - (1 - self.confidence) / self.looks)

    def plain(self) -> dict[str, Any]:
        """The policy as JSON data; decimals become their text."""
        plain: dict[str, Any] = asdict(self)
        # With the presets filled in: the digest must cover what they say.
        plain["service"]["levels"] = {name: asdict(level) for name, level in self.service.resolved().items()}
        filled: dict[str, Any] = _plain(plain)
        return filled

    def digest(self) -> str:
        """``sha256:<hex>`` of everything that decides; the rest only says what the pipeline does with verdicts."""
        after = ("require", "require_signature")
        return digest_json({key: value for key, value in self.plain().items() if key not in after})


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return value


def load_policy(path: Path = POLICY_FILE) -> Policy:
    """Reads and checks ``policy.yaml``. Raises ConfigError with file, line and key."""
    from pipeline.config import load_typed

    return load_typed(path, Policy)
