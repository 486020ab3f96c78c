"""Schedules: what is sent when, the same for every arm."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipeline.bench import load
from pipeline.bench.load import Prompts, make_loads
from pipeline.errors import DataError
from pipeline.params import Bench, Rates, Spike, Sweep
from pipeline.records import Item

ITEMS = [Item(f"i{place}", "s", "r", tuple(range(place, place + 10))) for place in range(7)]
PROMPTS = Prompts(ITEMS, new_tokens=8, max_tokens=64)


def test_a_constant_rate_is_even() -> None:
    made = load.constant(PROMPTS, rate=4, seconds=2.5, seed=1)
    assert made.due == tuple(turn / 4 for turn in range(10))
    assert made.peak_rate == 4
    assert len(made.requests) == 10


def test_poisson_gaps_are_exponential() -> None:
    made = load.poisson(PROMPTS, rate=50, seconds=200, seed=3)
    assert made.due is not None
    gaps = np.diff([0.0, *made.due])
    assert all(0 <= due < 200 for due in made.due)
    assert len(made.due) == pytest.approx(10_000, rel=0.03)  # sd 1 %
    assert stats.kstest(gaps, stats.expon(scale=1 / 50).cdf).pvalue > 0.01


def test_the_spike_of_the_field_and_its_scale() -> None:
    """150 to 3500 requests/s and back; a hundredth of it keeps the shape."""
    whole = load.spike(PROMPTS, Spike(before_s=2, peak_s=1, after_s=3), seed=1)
    assert whole.due is not None
    seconds = np.bincount(np.asarray(whole.due, dtype=int), minlength=6).tolist()
    assert seconds == [150, 150, 3500, 150, 150, 150]
    assert whole.peak == (2, 3)
    assert whole.peak_rate == 3500
    small = load.spike(PROMPTS, Spike(before_s=2, peak_s=1, after_s=3, scale=0.02), seed=1)
    assert small.due is not None
    assert np.bincount(np.asarray(small.due, dtype=int), minlength=6).tolist() == [3, 3, 70, 3, 3, 3]
    assert small.point == "spike 3 to 70/s"


@given(st.floats(0.1, 500), st.floats(0.1, 20), st.integers(0, 100))
def test_open_loops_stay_within_their_time_and_order(rate: float, seconds: float, seed: int) -> None:
    for made in (load.constant(PROMPTS, rate, seconds, seed), load.poisson(PROMPTS, rate, seconds, seed)):
        assert made.due is not None
        assert list(made.due) == sorted(made.due)
        assert all(0 <= due <= seconds for due in made.due)
        assert len(made.requests) == len(made.due)


def test_every_arm_gets_the_same_load_and_every_repeat_another() -> None:
    bench = Bench(kinds=("sweep", "constant", "poisson", "spike"), sweep=Sweep((1, 4), 3), poisson=Rates((5.0,), 10))
    first, again, other = (make_loads(bench, PROMPTS, 17, repeat) for repeat in (0, 0, 1))
    assert first == again
    assert [one.point for one in first] == [
        *("sweep 1", "sweep 4", "constant 10/s", "poisson 5/s", "spike 150 to 3500/s"),
    ]
    assert [one.due for one in first if one.kind == "poisson"] != [one.due for one in other if one.kind == "poisson"]
    assert first[0].requests != other[0].requests


def test_requests_generate_exactly_so_many_tokens() -> None:
    (request, *_) = load.sweep(PROMPTS, 2, 1, 1).requests
    body = request.body("m")
    assert (body["max_tokens"], body["ignore_eos"], body["stop_token_ids"]) == (8, True, [])
    assert tuple(body["prompt"]) in {item.prompt_token_ids for item in ITEMS}
    assert {one.id for one in load.sweep(PROMPTS, 2, 1, 1).requests} == {item.id for item in ITEMS}


def test_prompts_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(DataError, match="item i0: 10 prompt tokens and 60 new ones exceed the limit 64"):
        Prompts(ITEMS, 60, 64)
    with pytest.raises(DataError, match="there is no prompt"):
        Prompts([], 8, 64)


def trace(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_keeps_its_gaps_lengths_and_items(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"timestamp": 102.0, "item": "i3"},
        {"timestamp": 100.0, "prompt_tokens": 25, "output_tokens": 3},
        {"timestamp": 100.5, "input_length": 5, "output_length": 4},
        {"timestamp": 101},
    )
    made = load.replay(PROMPTS, path, "s", 2.0, seed=1)
    assert made.due == (0.0, 0.25, 0.5, 1.0)  # sorted, from the first, at double speed
    assert [(len(one.prompt_token_ids), one.max_tokens) for one in made.requests] == [(25, 3), (5, 4), (10, 8), (10, 8)]
    assert made.requests[3].prompt_token_ids == ITEMS[3].prompt_token_ids
    in_ms = load.replay(PROMPTS, trace(tmp_path, {"timestamp": 0}, {"timestamp": 1500}), "ms", 1.0, seed=1)
    assert in_ms.due == (0.0, 1.5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"time": 1}, r"trace\.jsonl:2: timestamp must be a number, not None"),
        ({"timestamp": "1"}, r":2: timestamp must be a number, not '1'"),
        ({"timestamp": True}, r":2: timestamp must be a number, not True"),
        ([1], r":2: "),
        ({"timestamp": 1, "item": "other"}, r":2: no item 'other' in the evaluation set"),
        ({"timestamp": 1, "prompt_tokens": 60}, r":2: 60 prompt tokens and 8 new ones exceed the limit 64"),
    ],
)
def test_a_bad_row_of_a_trace_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load.replay(PROMPTS, trace(tmp_path, {"timestamp": 0}, row), "s", 1.0, seed=1)


def test_an_empty_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the trace is empty"):
        load.replay(PROMPTS, trace(tmp_path), "s", 1.0, seed=1)


def test_prompts_go_round_when_a_load_asks_for_more() -> None:
    made = load.constant(PROMPTS, rate=10, seconds=2, seed=1)
    names = [one.id for one in made.requests]
    assert sorted(names[:7]) == sorted(item.id for item in ITEMS)
    assert names[:7] == names[7:14]
    order = random.Random(5)
    assert [one.id for one in replace(PROMPTS).shuffled(order)] != [item.id for item in ITEMS]


def test_a_load_can_be_said_in_the_words_of_trtllm_serve() -> None:
    """Its documented fields: greedy by top_k 1, and no end token of its own."""
    made = load.constant(PROMPTS, rate=10, seconds=1, seed=1)
    body = made.speaking("trtllm-serve").requests[0].body("m")
    assert (body["top_k"], body["ignore_eos"], "temperature" in body) == (1, True, False)
    assert made.speaking("vllm") == made
