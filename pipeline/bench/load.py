"""What is sent when. A load is made before it is sent, from a seed, so that every arm gets the very same one.

A closed loop keeps a number of requests in flight, each slot sending its next one when the last is answered. An open
loop sends at given times, whatever the server does: only it shows what a queue does to those who wait in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.files import read_jsonl
from pipeline.params import Bench, Spike
from pipeline.records import Item
from pipeline.serving.client import refuse_too_long
from pipeline.serving.completion import CompletionRequest
from pipeline.serving.dialects import Dialect

SLICE_S = 1.0


@dataclass(frozen=True)
class Load:
    """One load at one setting.

    ``weight`` orders the points of a kind (requests in flight, or requests a second at most). ``due`` are seconds from
    the start, one for each request; None for a closed loop of ``concurrency`` slots, which goes round the requests
    until ``seconds`` have passed. ``peak`` is when a spike begins and ends.
    """

    kind: str
    point: str
    weight: float
    seconds: float
    requests: tuple[CompletionRequest, ...]
    due: tuple[float, ...] | None = None
    concurrency: int = 0
    peak: tuple[float, float] | None = None

    @property
    def peak_rate(self) -> int:
        """The most requests that are due within one second; 0 for a closed loop."""
        counts: dict[int, int] = {}
        for due in self.due or ():
            counts[int(due / SLICE_S)] = counts.get(int(due / SLICE_S), 0) + 1
        return max(counts.values(), default=0)

    def speaking(self, dialect: Dialect) -> Load:
        """The same load in the words of another server."""
        return replace(self, requests=tuple(replace(request, dialect=dialect) for request in self.requests))


@dataclass(frozen=True)
class Prompts:
    """Requests made of the evaluation set's prompts. Each generates exactly ``new_tokens`` (end tokens are ignored), so
    every arm does the same work; ``max_tokens`` is the arms' limit for prompt and answer together."""

    items: Sequence[Item]
    new_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("there is no prompt to send", "calib_data/eval.jsonl is empty: run `dvc repro calib_data`")
        refuse_too_long(self.items, self.new_tokens, self.max_tokens)

    def shuffled(self, order: random.Random) -> list[CompletionRequest]:
        """Every item once."""
        return [self._request(item.id, item.prompt_token_ids) for item in order.sample(self.items, len(self.items))]

    def endless(self, order: random.Random) -> Iterator[CompletionRequest]:
        """Every item in a shuffled order, over and over."""
        return itertools.cycle(self.shuffled(order))

    def _request(self, name: str, ids: tuple[int, ...], new_tokens: int | None = None) -> CompletionRequest:
        return CompletionRequest(name, ids, new_tokens or self.new_tokens, ignore_eos=True)

    def traced(self, row: dict[str, Any], turn: int, endless: Iterator[CompletionRequest]) -> CompletionRequest:
        """The request of one row of a trace: the item it names, or tokens of the evaluation set, of its lengths."""
        new_tokens = row.get("output_tokens", row.get("output_length"))
        wanted = row.get("prompt_tokens", row.get("input_length"))
        if (name := row.get("item")) is not None:
            found = next((item for item in self.items if item.id == name), None)
            if found is None:
                raise ValueError(f"no item {name!r} in the evaluation set")
            request = self._request(found.id, found.prompt_token_ids, new_tokens)
        elif wanted is None:
            given = next(endless)
            request = self._request(given.id, given.prompt_token_ids, new_tokens)
        else:
            ids: list[int] = []
            while len(ids) < wanted:
                ids += next(endless).prompt_token_ids
            request = self._request(f"row {turn}", tuple(ids[:wanted]), new_tokens)
        if len(request.prompt_token_ids) + request.max_tokens > self.max_tokens:
            raise ValueError(
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_tokens} new ones exceed "
                f"the limit {self.max_tokens}"
            )
        return request


def make_loads(bench: Bench, prompts: Prompts, seed: int, repeat: int) -> list[Load]:
    """The loads of one repeat, in the order of ``bench.kinds``. Raises DataError for a trace that is no trace."""
    makers = {
        "sweep": lambda: [
            sweep(prompts, slots, bench.sweep.seconds, seed + repeat) for slots in bench.sweep.concurrency
        ],
        "constant": lambda: [
            constant(prompts, rate, bench.constant.seconds, seed + repeat) for rate in bench.constant.requests_per_s
        ],
        "poisson": lambda: [
            poisson(prompts, rate, bench.poisson.seconds, seed + repeat) for rate in bench.poisson.requests_per_s
        ],
        "spike": lambda: [spike(prompts, bench.spike, seed + repeat)],
        "replay": lambda: [
            replay(prompts, Path(str(bench.replay.file)), bench.replay.unit, bench.replay.speed, seed + repeat)
        ],
    }
    return [load for kind in bench.kinds for load in makers[kind]()]


def sweep(prompts: Prompts, concurrency: int, seconds: float, seed: int) -> Load:
    """A closed loop of ``concurrency`` requests in flight."""
    requests = tuple(prompts.shuffled(random.Random(f"{seed} sweep {concurrency}")))
    return Load("sweep", f"sweep {concurrency}", concurrency, seconds, requests, concurrency=concurrency)


def constant(prompts: Prompts, rate: float, seconds: float, seed: int) -> Load:
    """A request every ``1 / rate`` seconds."""
    due = tuple(_steady(0.0, seconds, rate))
    point = f"constant {rate:g}/s"
    return Load("constant", point, rate, seconds, _requests(prompts, len(due), f"{seed} {point}"), due)


def poisson(prompts: Prompts, rate: float, seconds: float, seed: int) -> Load:
    """Arrivals that know nothing of each other: exponential gaps of mean ``1 / rate``."""
    point = f"poisson {rate:g}/s"
    order = random.Random(f"{seed} {point}")
    due, at = [], order.expovariate(rate)
    while at < seconds:
        due.append(at)
        at += order.expovariate(rate)
    return Load("poisson", point, rate, seconds, _requests(prompts, len(due), f"{seed} {point}"), tuple(due))


def spike(prompts: Prompts, shape: Spike, seed: int) -> Load:
    """A constant rate that steps up and back: what a service meets when a product is shown on television."""
    base, peak = shape.base * shape.scale, shape.peak * shape.scale
    begin, end = shape.before_s, shape.before_s + shape.peak_s
    seconds = end + shape.after_s
    due = (*_steady(0.0, begin, base), *_steady(begin, end, peak), *_steady(end, seconds, base))
    point = f"spike {base:g} to {peak:g}/s"
    requests = _requests(prompts, len(due), f"{seed} {point}")
    return Load("spike", point, peak, seconds, requests, due, peak=(begin, end))


def replay(prompts: Prompts, file: Path, unit: str, speed: float, seed: int) -> Load:
    """The arrivals of a JSONL trace: ``timestamp``, and optionally ``item``, or ``prompt_tokens`` and
    ``output_tokens`` (or ``input_length`` and ``output_length``, as Mooncake traces have them)."""
    rows = read_jsonl(file)
    scale = (0.001 if unit == "ms" else 1.0) / speed
    endless = prompts.endless(random.Random(f"{seed} replay"))
    due, requests = [], []
    for turn, row in enumerate(rows, start=1):
        try:
            due.append(_number(row) * scale)
            requests.append(prompts.traced(row, turn, endless))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{file}:{turn}: {error}", "correct this row; docs/bench.md has the format") from error
    if not due:
        raise DataError(f"{file}: the trace is empty", "docs/bench.md has the format")
    order = sorted(range(len(due)), key=due.__getitem__)
    start = due[order[0]]
    shifted = tuple(due[place] - start for place in order)
    rate = len(due) / max(shifted[-1], SLICE_S)
    point = f"replay {file.name}" + (f" at {speed:g}x" if speed != 1 else "")
    return Load("replay", point, rate, shifted[-1] + SLICE_S, tuple(requests[place] for place in order), shifted)


def _number(row: Any) -> float:
    value = row.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"timestamp must be a number, not {value!r}")
    return float(value)


def _steady(start: float, end: float, rate: float) -> list[float]:
    """Times from ``start`` to before ``end``; counted, not added up, so they do not drift."""
    count = round((end - start) * rate)
    return [start + turn / rate for turn in range(count)]


def _requests(prompts: Prompts, count: int, seed: str) -> tuple[CompletionRequest, ...]:
    return tuple(itertools.islice(prompts.endless(random.Random(seed)), count))
