"""Hand-made cases for the recommendation, one a row."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from pipeline.bench.recommend import Recommendation, recommend
from pipeline.gate.cost import Prices

FREE = Prices()
PRICED = Prices(hourly={"cpu": Decimal(1), "gpu": Decimal(4)})


def arm(
    rates: tuple[float, ...] = (10.0, 10.0, 10.0), errors: float = 1.0, back: float | None = 2.0, **more: Any
) -> dict[str, Any]:
    """A bench of a sweep and a spike: good requests/s a repeat (0: the level is not kept), errors, recovery."""
    runs = []
    for repeat, rate in enumerate(rates):
        good = {"share": 99.0 if rate else 0.0, "requests_per_s": rate}
        good |= {"output_tokens_per_s": 50 * rate, "input_tokens_per_s": 100 * rate}
        common = {"repeat": repeat, "weight": 8, "client": {"valid": True, "why": ""}, "server": {"start_s": 20.0}}
        spike = {"error_rates": [errors, errors / 2], "recovery_s": back}
        runs.append({**common, "load": "sweep", "point": "sweep 8", "good": good, "spike": None})
        runs.append({**common, "load": "spike", "point": "spike", "good": good, "spike": spike})
    return {"device": {"gpu": None}, "devices": 1, "runs": runs, **more}


def ask(
    baseline: dict[str, Any] | None, engine: dict[str, Any] | None, verdict: str = "PROMOTE", **more: Any
) -> Recommendation:
    return recommend("int8", verdict, baseline, engine, share=Decimal(95), prices=more.get("prices", FREE))


STEADY = (20.0, 20.2, 19.8)  # twice the baseline's


@pytest.mark.parametrize(
    ("baseline", "engine", "choice", "winners"),
    [
        # better under both loads; or better under one and alike under the other
        (arm(errors=9), arm(STEADY, errors=1), "engine", ["engine", "engine"]),
        (arm(), arm(STEADY), "engine", ["engine", None]),
        (arm(errors=9), arm(errors=1), "engine", [None, "engine"]),
        # twice the throughput, but it fails in the spike, or stays down longer
        (arm(errors=1), arm(STEADY, errors=9), "hybrid", ["engine", "baseline"]),
        (arm(back=2), arm(STEADY, back=20), "hybrid", ["engine", "baseline"]),
        (arm(back=2), arm(STEADY, back=None), "hybrid", ["engine", "baseline"]),
        (arm(STEADY, errors=9), arm(errors=1), "hybrid", ["baseline", "engine"]),
        # worse, or no better
        (arm(STEADY), arm(), "baseline", ["baseline", None]),
        (arm(), arm(), "baseline", [None, None]),
        (arm(), arm((10.4, 10.4, 10.4), errors=1.5, back=3), "baseline", [None, None]),  # within the tolerances
        (arm(back=None), arm(back=None), "baseline", [None, None]),
        # the means differ by a fifth, but so do the repeats
        (arm((10, 14, 6)), arm((12, 16, 8)), "baseline", [None, None]),
        # only one keeps the service level
        (arm((0.0, 0.0, 0.0)), arm(), "engine", ["engine", None]),
        (arm(), arm((0.0, 0.0, 0.0)), "baseline", ["baseline", None]),
        (arm((0.0, 0.0, 0.0)), arm((0.0, 0.0, 0.0)), "baseline", [None, None]),
    ],
)
def test_cases(baseline: dict[str, Any], engine: dict[str, Any], choice: str, winners: list[str | None]) -> None:
    found = ask(baseline, engine)
    assert found.choice == choice
    assert [reason.winner for reason in found.reasons if reason.question != "start"] == winners
    assert found.would_change
    assert all(reason.numbers for reason in found.reasons)


def test_hybrid_says_who_serves_what() -> None:
    found = ask(arm(errors=1), arm(STEADY, errors=9))
    assert found.headline == (
        "Both: int8 for endpoints of steady, high throughput, the baseline for bursty or rare ones."
    )
    steady, burst, start = found.reasons
    assert steady.text == "steady load: int8 carries 20 good requests/s, the baseline 10"
    assert burst.text == (
        "bursts: 9.0 % of requests fail in the spike on int8, 1.0 % on the baseline; "
        "back at the service level: int8 after 2 s, the baseline after 2 s"
    )
    assert start.text == "rare endpoints: a server of int8 starts in 20 s, one of the baseline in 20 s"
    assert "-50 % goodput of int8 would make them equal" in found.would_change[0]


def test_prices_turn_throughput_into_cost() -> None:
    """Twice the throughput on a device of four times the price: the baseline is the cheaper one.

    Baseline: 1 / (500 tokens/s * 3600 * 0.6) * 1e6 = 0.926 a million; engine: 4 / (1000 * 2160) * 1e6 = 1.852."""
    found = ask(arm(), arm(STEADY, device={"gpu": "gpu"}), prices=PRICED)
    assert found.choice == "baseline"
    assert found.reasons[0].numbers["baseline_cost"] == pytest.approx(0.9259, abs=1e-4)
    assert found.reasons[0].numbers["engine_cost"] == pytest.approx(1.852, abs=2e-3)
    assert "an hour of int8's device at -50 %" in found.would_change[0]
    assert ask(arm(), arm(STEADY, device={"gpu": "other"}), prices=PRICED).choice == "engine"  # no price: throughput


@pytest.mark.parametrize("verdict", ["REJECT", "INCONCLUSIVE", "INVALID"])
def test_an_engine_that_is_not_promoted_is_never_recommended(verdict: str) -> None:
    found = ask(arm(errors=9), arm(STEADY, errors=0), verdict)
    assert found.choice == "baseline"
    assert found.would_change == ("a verdict PROMOTE for int8",)
    assert found.reasons  # its numbers are still shown


def test_no_evidence_no_recommendation() -> None:
    assert ask(None, arm()).headline == "Nothing was measured under load for the baseline."
    assert ask(None, None).headline == "Nothing was measured under load for the baseline and int8."
    assert {ask(None, arm()).choice, ask(arm(), None).choice} == {"undecided"}
    lagged = arm(STEADY)
    lagged["runs"][0]["client"] = {"valid": False, "why": "requests were sent late"}
    found = ask(arm(), lagged)
    assert (found.choice, "requests were sent late" in found.headline) == ("undecided", True)
    replayed = [run | {"load": "replay", "spike": None} for run in arm()["runs"]]
    assert ask(arm() | {"runs": replayed}, arm() | {"runs": replayed}).choice == "undecided"


def test_it_is_plain_json() -> None:
    import json

    plain = json.loads(json.dumps(ask(arm(back=None), arm(STEADY)).plain(), allow_nan=False))
    assert plain["choice"] == "engine"
    assert plain["reasons"][1]["numbers"]["baseline_recovery_s"] is None
