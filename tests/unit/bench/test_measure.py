"""The numbers of a load, from samples whose latencies are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.drive import Driven, Sample
from pipeline.bench.load import Load
from pipeline.bench.measure import Times, client_state, distribution, measure, recovery
from pipeline.gate.service import PERCENTILES, Good, requests_needed
from tests.unit.bench.simulate import ITEMS, Machine

GOOD = Good(ttft_ms=Decimal(100), tpot_ms=Decimal(20))
SHARE = Decimal(95)
OPEN = Load("constant", "constant 1/s", 1, 10.0, (), due=())
CLOSED = Load("sweep", "sweep 2", 2, 10.0, (), None, concurrency=2)


def sample(due: float, sent: float, tokens: tuple[float, ...] = (), end: float | None = None, **more: Any) -> Sample:
    """A sound sample ends with its last token."""
    last = sent + tokens[-1] if tokens else sent
    return Sample("i", 10, due, sent, last if end is None else end, tokens, **more)


def numbers(load: Load, *samples: Sample) -> dict[str, Any]:
    return measure(load, samples, GOOD, SHARE)


def test_latencies_by_hand() -> None:
    """Due at 1.0 s, sent 10 ms late; first token 50 ms after that, two more together at 80 ms, the last at 110 ms:
    TTFT = 10 + 50, TPOT = (110 - 50) / 3, end to end = 10 + 115, two gaps of 30."""
    times = Times.of(sample(1.0, 1.01, (0.05, 0.08, 0.08, 0.11), end=1.125))
    assert times.ttft_ms == pytest.approx(60)
    assert times.tpot_ms == pytest.approx(20)
    assert times.e2e_ms == pytest.approx(125)
    assert times.gaps_ms.tolist() == pytest.approx([30, 30])


def test_a_single_token_has_no_time_per_token() -> None:
    times = Times.of(sample(0, 0, (0.02,)))
    assert times.tpot_ms is None
    assert times.is_good(GOOD)


def test_good_requests_keep_every_limit() -> None:
    for tokens, good in (((0.1, 0.12), True), ((0.101, 0.12), False), ((0.1, 0.121), False)):
        assert Times.of(sample(0, 0, tokens)).is_good(GOOD) is good
    assert not Times.of(sample(0, 0.05, (0.06, 0.07))).is_good(GOOD)  # sent late counts
    assert Times.of(sample(0, 0, (0.5, 5.0))).is_good(Good(None, None, None))


def test_failures_are_in_the_counts_and_in_no_latency() -> None:
    found = numbers(
        OPEN,
        sample(0, 0, (0.05, 0.06)),
        sample(1, 1, end=1.001, failure="HTTP 500", detail="no room"),
        sample(2, 2, end=9.0, failure="timeout"),
        sample(3, 3, (0.5, 0.51)),
    )
    assert (found["requests"], found["failed"]) == (4, 2)
    assert found["failures"] == {"HTTP 500": 1, "timeout": 1}
    assert found["failure_details"]["HTTP 500"] == ["no room"]
    assert found["error_rate"] == 50
    assert found["good"]["share"] == 25
    assert found["latency"]["e2e_ms"]["n"] == 2
    assert found["latency"]["e2e_ms"]["mean"] == pytest.approx((60 + 510) / 2)
    assert found["latency"]["e2e_ms"]["p50"] is None  # two are not twenty


def test_rates_count_what_ends_in_the_window() -> None:
    """Two answers of 4 tokens within 10 s; a third ends after it, with 3 of its 4 tokens inside."""
    found = numbers(
        OPEN,
        sample(0, 0, (0.01, 0.02, 0.03, 0.04)),
        sample(1, 1, (0.11, 0.12, 0.13, 0.14)),  # too slow to be good
        sample(9, 9, (0.7, 0.8, 0.9, 1.1)),
    )
    assert found["throughput"] == pytest.approx(
        {"requests_per_s": 0.2, "output_tokens_per_s": 1.1, "input_tokens_per_s": 2.0}
    )
    assert found["good"]["requests_per_s"] == pytest.approx(0.1)
    assert found["good"]["output_tokens_per_s"] == pytest.approx(0.4)
    assert found["latency"]["e2e_ms"]["n"] == 3


@pytest.mark.parametrize(("at", "count"), [("50", 20), ("90", 100), ("95", 200), ("99", 1000), ("99.9", 10_000)])
def test_a_percentile_needs_ten_requests_beyond_it(at: str, count: int) -> None:
    assert requests_needed(Decimal(at)) == count
    values = np.arange(count, dtype=np.float64)
    assert distribution(values, count)[f"p{at}"] == pytest.approx(np.percentile(values, float(at)))
    assert distribution(values[1:], count - 1)[f"p{at}"] is None


def test_percentiles_over_all_requests_take_failures_as_infinitely_slow() -> None:
    """Of 100 requests 12 failed: p50 lies among the sound ones, p90 among the failed."""
    sound = [sample(0.01 * turn, 0.01 * turn, (0.001 * turn, 0.002 * turn + 0.001)) for turn in range(88)]
    failed = [sample(1, 1, end=2, failure="timeout")] * 12
    found = numbers(OPEN, *sound, *failed)["all_requests"]["ttft_ms"]
    assert found["n"] == 100
    assert found["p50"] == pytest.approx(49.5)  # of 0, 1, ... 87 and twelve infinities
    assert found["p90"] is None
    assert found["p99"] is None


@given(st.lists(st.floats(0.001, 10), min_size=20, max_size=300))
def test_without_failures_all_requests_are_the_sound_ones(seconds: list[float]) -> None:
    found = numbers(OPEN, *(sample(0, 0, (value, value + 0.1)) for value in seconds))
    for at in PERCENTILES:
        assert found["all_requests"]["ttft_ms"][f"p{at}"] == pytest.approx(found["latency"]["ttft_ms"][f"p{at}"])


def test_the_burst_of_a_closed_loop_is_kept_out() -> None:
    """Both slots start at 0; their first answers end at 1 and 2 s, so counting begins at 2 s. What was sent before
    that, or after the end, is no latency; what ended in between is throughput."""
    found = numbers(
        CLOSED,
        sample(0, 0, (0.5, 1.0), burst=True),
        sample(0, 0, (1.5, 2.0), burst=True),
        sample(1, 1, (0.5, 1.5)),  # sent at 1, ends at 2.5
        sample(2, 2, (0.05, 1.0)),
        sample(3, 3, (0.05, 1.0)),
        sample(9.5, 9.5, (0.05, 1.0)),  # ends at 10.5, after the window
    )
    assert found["window_s"] == 8
    assert found["requests"] == 3
    assert found["latency"]["ttft_ms"]["mean"] == pytest.approx(50)
    assert found["throughput"]["requests_per_s"] == pytest.approx(3 / 8)  # ended at 2.5, 3 and 4


def test_a_closed_loop_that_never_left_its_burst_has_no_request() -> None:
    found = numbers(CLOSED, sample(0, 0, (1.0, 12.0), burst=True), sample(0, 0, (1.0, 11.0), burst=True))
    assert (found["requests"], found["window_s"], found["error_rate"]) == (0, 0, 0)
    assert found["throughput"]["requests_per_s"] == 0


def test_seconds_and_the_spike() -> None:
    """A spike in second 2: three requests, two of them fail; in second 3 the answer is slow, from second 4 on good."""
    load = Load("spike", "spike", 3, 7.0, (), due=(), peak=(2.0, 3.0))
    fast, slow = (0.01, 0.02), (0.5, 0.51)
    found = numbers(
        load,
        *(sample(at, at, fast) for at in (0.0, 1.0, 4.0, 6.5)),
        sample(2.0, 2.0, fast),
        sample(2.3, 2.3, end=3.3, failure="timeout"),
        sample(2.6, 2.6, end=3.6, failure="connection"),
        sample(3.2, 3.2, slow),
    )
    assert [row["asked"] for row in found["slices"]] == [1, 1, 3, 1, 1, 0, 1]
    assert [row["good"] for row in found["slices"]] == [1, 1, 1, 0, 1, 0, 1]
    assert [row["failed"] for row in found["slices"]] == [0, 0, 2, 0, 0, 0, 0]
    assert found["slices"][3]["ttft_ms"] == pytest.approx(500)
    assert found["slices"][5]["ttft_ms"] is None
    spike = found["spike"]
    assert spike["requests"] == 3
    assert spike["error_rates"] == pytest.approx([100 * 2 / 3, 25])
    assert spike["worst_second"] == pytest.approx(100 * 2 / 3)
    assert spike["recovery_s"] == 1


def rows(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"second": place, "asked": asked, "good": good} for place, (asked, good) in enumerate(pairs)]


def test_recovery() -> None:
    assert recovery(rows((9, 9), (9, 0), (9, 9), (9, 9)), end=2, share=95) == 0
    assert recovery(rows((9, 9), (9, 0), (9, 0), (9, 9)), end=2, share=95) == 1
    assert recovery(rows((9, 9), (9, 0), (9, 9), (9, 0)), end=2, share=95) is None
    assert recovery(rows((9, 9), (9, 9)), end=2, share=95) is None  # nothing came after the spike
    assert recovery(rows((9, 0), (20, 19)), end=1, share=95) == 0


def test_the_slowest_requests_keep_their_timeline() -> None:
    samples = [sample(turn, turn, (0.01 * (turn + 1), 0.02 * (turn + 1))) for turn in range(10)]
    samples += [sample(9, 9, end=60, failure="timeout"), sample(0, 0, (3.0, 4.0, 4.0))]
    slowest = numbers(OPEN, *samples)["slowest"]
    assert len(slowest) == 10
    assert slowest[0]["tokens_s"] == [3.0, 4.0, 4.0]
    assert slowest[1]["end_s"] == pytest.approx(9.2)


def driven(*late_s: float, lag_s: float = 0.0) -> list[Driven]:
    return [Driven([sample(1, 1 + late, (0.1, 0.2)) for late in late_s], [lag_s] * 200, 0.5, "asyncio")]


def test_a_client_that_lags_is_invalid_and_says_why() -> None:
    """99 of 100 on time are fine at the 99th percentile; three late ones are not."""
    load = replace(OPEN, due=(1.0,) * 100)
    assert client_state(load, driven(*[0.001] * 99, 0.04), 5, 100)["valid"]
    late = client_state(load, driven(*[0.001] * 97, *[0.04] * 3), 5, 100)
    assert not late["valid"]
    assert "requests were sent late (99th percentile 40.0 ms, at most 5 ms)" in late["why"]
    slow = client_state(load, driven(*[0.001] * 100, lag_s=0.02), 5, 100)
    assert "the client's loop lagged (99th percentile 20.0 ms" in slow["why"]
    assert client_state(load, driven(*[0.001] * 99), 5, 100)["why"] == "99 of 100 requests were sent"
    assert client_state(load, driven(*[0.001] * 100), 5, 100)["cpu_ms_per_request"] == pytest.approx(5)


def test_the_worst_process_speaks_for_the_client() -> None:
    both = [*driven(*[0.0] * 50), *driven(*[0.0] * 50, lag_s=0.03)]
    state = client_state(replace(OPEN, due=(1.0,) * 100), both, 5, 100)
    assert not state["valid"]
    assert state["processes"] == 2


def test_a_machine_of_known_speed_gives_its_own_numbers() -> None:
    """One row, 50 ms to the first token and 10 ms for each of 9 more: 140 ms a request, 7.14 a second."""
    from pipeline.bench.load import Prompts, sweep

    load = sweep(Prompts(ITEMS, 10, 512), 1, 30, 1)
    found = measure(load, Machine(1, 0.05, 0.01).play(load, 60), GOOD, SHARE)
    assert found["latency"]["ttft_ms"]["p50"] == pytest.approx(50)
    assert found["latency"]["tpot_ms"]["p90"] == pytest.approx(10)
    assert found["throughput"]["requests_per_s"] == pytest.approx(1 / 0.14, rel=0.01)
    assert found["good"]["share"] == 100
