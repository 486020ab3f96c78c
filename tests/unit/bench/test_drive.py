"""The client against a scripted server: every trap of a load measurement, with known answers.

Lower bounds are the script's own times. There are no upper ones: a busy machine may take what it likes, and what the
numbers must be exactly is tested from samples worked out by hand (``test_measure.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from pipeline.bench.drive import Driven, Part, run_part
from pipeline.bench.load import Load
from pipeline.bench.measure import client_state, measure
from pipeline.gate.service import Good
from pipeline.serving.completion import CompletionRequest
from tests.unit.serving.mock_server import DONE, Refuse, Script, chunk, scripted, usage

REQUEST = CompletionRequest("item", (7, 8, 9), 4, ignore_eos=True)
GOOD: Script = [chunk([1, 2], "ab"), chunk([3, 4], "cd", "length"), usage(3, 4), DONE]


def opened(url: str, due: tuple[float, ...], timeout_s: float = 60.0) -> Part:
    return Part(url, "mock", (REQUEST,) * len(due), due, 0, max(due) + 1, timeout_s)


def closed(url: str, slots: int, seconds: float, count: int | None = None) -> Part:
    return Part(url, "mock", (REQUEST,), None, slots, seconds, 60.0, count)


def drive(part: Part) -> Driven:
    return run_part(part, time.perf_counter() + 0.05)


def one(script: Script, **more: Any) -> Any:
    with scripted(lambda _body: script) as (url, _):
        (sample,) = drive(opened(url, (0.0,), **more)).samples
    return sample


def test_a_sound_answer() -> None:
    sample = one(GOOD)
    assert (sample.failure, sample.item, sample.prompt_tokens, len(sample.tokens_s)) == ("", "item", 3, 4)
    assert sample.due_s <= sample.sent_s < sample.end_s


def test_known_times_of_tokens() -> None:
    """An empty delta at 5 ms is no token; the first token comes at 50 ms, two more together at 80, the last at 110."""
    script: Script = [0.005, chunk([], ""), 0.045, chunk([1]), 0.03, chunk([2, 3]), 0.03, chunk([4], "", "length")]
    sample = one([*script, usage(3, 4), DONE])
    first, *others = sample.tokens_s
    assert first >= 0.05
    assert others[0] == others[1] > first
    assert others[2] >= 0.11


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([chunk([1]), {"error": {"message": "out of memory"}}, DONE], "error event"),
        ([{"object": "error", "message": "bad"}, DONE], "error event"),
        ([b"data: {\n\n", DONE], "bad event"),
        ([chunk([1, 2, 3, 4], "", "length"), DONE], "no usage"),
        ([chunk([1, 2, 3, 4], "", "length"), usage(3, 5), DONE], "token count"),
        ([chunk([1, 2], "", "length"), usage(3, 2), DONE], "token count"),  # fewer than max_tokens
        ([chunk([1, 2], "", "stop"), usage(3, 2), DONE], "wrong end"),  # ended though ignore_eos
        ([chunk([1, 2, 3, 4], "", "length"), usage(2, 4), DONE], "prompt changed"),
        ([chunk(None, "text", "length"), usage(3, 4), DONE], "no token ids"),
        ([chunk([1, 2, 3, 4], "", "length"), usage(3, 4)], "unfinished"),
        ([chunk([1]), None], "connection"),
        ([Refuse(503)], "HTTP 503"),
    ],
)
def test_every_kind_of_failure_is_a_failure_by_its_name(script: Script, kind: str) -> None:
    sample = one(script)
    assert sample.failure == kind
    assert "item item: " in sample.detail
    assert sample.tokens_s == ()
    assert sample.end_s >= sample.sent_s


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    sample = one([chunk([1]), asyncio.Event()], timeout_s=0.2)
    assert sample.failure == "timeout"
    assert sample.end_s >= 0.2


def test_nobody_listens() -> None:
    samples = drive(opened("http://127.0.0.1:9", (0.0, 0.0))).samples
    assert [sample.failure for sample in samples] == ["connection", "connection"]


def test_an_open_loop_does_not_wait() -> None:
    """The server answers the first of twenty requests only when the last has come."""
    all_here = asyncio.Event()
    came: list[int] = []

    def script(_body: dict[str, Any]) -> Script:
        came.append(1)
        if len(came) == 20:
            all_here.set()
        return [all_here, *GOOD]

    with scripted(script) as (url, _):
        samples = drive(opened(url, (0.1,) * 20)).samples
    assert [sample.failure for sample in samples] == [""] * 20
    assert all(sample.due_s == 0.1 <= sample.sent_s for sample in samples)


def test_a_start_in_the_past_shows_as_lateness() -> None:
    with scripted(lambda _body: GOOD) as (url, _):
        driven = run_part(opened(url, (0.0,)), time.perf_counter() - 0.5)
    (sample,) = driven.samples
    assert sample.sent_s - sample.due_s >= 0.5
    load = Load("constant", "constant", 1, 1.0, (REQUEST,), (0.0,))
    found = measure(load, driven.samples, Good(), Decimal(95))
    assert found["latency"]["ttft_ms"]["mean"] >= 500
    assert not client_state(load, [driven], 5, 1)["valid"]


def test_a_loop_that_is_blocked_makes_the_run_invalid() -> None:
    """A client short of CPU, brought about: whoever parses the answer holds the loop for 50 ms each time."""
    from pipeline.serving import completion

    whole = completion._Stream.read

    def slow(stream: Any, blocks: Any) -> Any:
        time.sleep(0.05)
        return whole(stream, blocks)

    with scripted(lambda _body: GOOD) as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion._Stream, "read", slow)
        due = tuple(turn * 0.01 for turn in range(40))
        driven = drive(opened(url, due))
    state = client_state(Load("constant", "c", 1, 1.0, (REQUEST,) * 40, due), [driven], 5, 40)
    assert not state["valid"]
    assert "short of CPU" in state["why"]


def test_a_closed_loop_keeps_its_slots_busy_and_marks_its_burst() -> None:
    with scripted(lambda _body: [0.02, *GOOD]) as (url, seen):
        samples = drive(closed(url, slots=3, seconds=600, count=12)).samples
    assert len(samples) == len(seen) == 12
    assert [sample.burst for sample in sorted(samples, key=lambda one: one.sent_s)] == [True] * 3 + [False] * 9
    in_flight = [sum(one.sent_s < other.end_s and other.sent_s <= one.sent_s for other in samples) for one in samples]
    assert max(in_flight) == 3  # all slots busy, none with two requests


def test_a_closed_loop_ends_with_its_time() -> None:
    with scripted(lambda _body: [0.02, *GOOD]) as (url, _):
        samples = drive(closed(url, slots=2, seconds=0.3)).samples
    assert not any(sample.failure for sample in samples)
    assert all(sample.due_s <= sample.sent_s for sample in samples)


def test_a_count_ends_a_warm_up() -> None:
    with scripted(lambda _body: GOOD) as (url, seen):
        assert len(drive(closed(url, slots=4, seconds=30, count=10)).samples) == 10
    assert len(seen) == 10


def scripts() -> Iterator[Script]:
    """The row "wrong latency numbers" of the field's faults: the first three are slow, the fifth is an error."""
    tokens: Script = [0.005, chunk([], ""), 0.045, chunk([1]), 0.03, chunk([2, 3, 4], "", "length"), usage(3, 4), DONE]
    yield from ([0.4, *tokens] for _ in range(3))
    yield tokens
    yield [Refuse(500)]
    yield from itertools.repeat(tokens)


def test_the_fault_wrong_latency_numbers() -> None:
    """After a warm-up of three: TTFT 50 ms, TPOT (80 - 50) / 3 = 10 ms, one failure of thirty in the count."""
    script = scripts()
    with scripted(lambda _body: next(script)) as (url, _):
        warm = drive(closed(url, slots=1, seconds=30, count=3)).samples
        due = tuple(0.1 * turn for turn in range(30))
        driven = drive(opened(url, due))
    assert all(sample.tokens_s[0] >= 0.45 for sample in warm)
    load = Load("constant", "constant 10/s", 10, 3.0, (REQUEST,) * 30, due)
    found = measure(load, driven.samples, Good(), Decimal(95))
    assert (found["requests"], found["failed"], found["failures"]) == (30, 1, {"HTTP 500": 1})
    assert found["latency"]["ttft_ms"]["n"] == 29
    assert found["latency"]["ttft_ms"]["p50"] >= 50
    assert found["latency"]["tpot_ms"]["n"] == 29
    assert found["latency"]["itl_ms"]["n"] == 29  # tokens that come together arrive once
    assert found["latency"]["ttft_ms"]["p90"] is None  # thirty are not a hundred
