"""Sends a load, or one process's share of it, and keeps what the client saw.

Every measurement carries the proof that the client kept up: how late requests were sent, and how late the event loop
woke up. A client short of CPU sees slow servers everywhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.serving.completion import CompletionRequest, RequestError, complete

if TYPE_CHECKING:
    from aiohttp import ClientSession

TICK_S = 0.005  # of the watch over the event loop
YIELD_EVERY = 16  # a sender that is behind lets the others run after this many requests
DETAIL = 300  # characters kept of a failure's message
SKIPPED = ("User-Agent", "Accept", "Accept-Encoding")  # headers that say nothing here


@dataclass(frozen=True)
class Part:
    """One process's share of a load: requests with the times when they are due, or a number of closed-loop slots.

    ``count`` ends a closed loop after so many requests (a warm-up).
    """

    url: str
    model: str
    requests: tuple[CompletionRequest, ...]
    due: tuple[float, ...] | None
    slots: int
    seconds: float
    timeout_s: float
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the client saw it. Times are seconds from the start of the load, but ``tokens_s``, which are
    seconds from ``sent_s``, one for each token.

    ``due_s`` is when it should have been sent (in a closed loop: when it was). ``failure`` is the kind of failure,
    empty for a sound answer. ``burst`` marks the first request of a closed loop's slot: all slots start together.
    """

    item: str
    prompt_tokens: int
    due_s: float
    sent_s: float
    end_s: float
    tokens_s: tuple[float, ...] = ()
    failure: str = ""
    detail: str = ""
    burst: bool = False


@dataclass(frozen=True)
class Driven:
    """What one process did: its samples, its event loop's lags (seconds), the CPU it used, its kind of loop, its
    priority (as ``nice`` counts: lower goes first)."""

    samples: list[Sample]
    loop_lags: list[float]
    cpu_s: float
    loop: str
    nice: int = 0


def run_part(part: Part, start: float) -> Driven:
    """Sends ``part`` from ``start`` (``time.perf_counter``, which all processes of a machine share) to its end."""
    factory, name = _loop()
    with asyncio.Runner(loop_factory=factory) as runner, _without_collector():
        return runner.run(_drive(part, start, name))


def _loop() -> tuple[Callable[[], asyncio.AbstractEventLoop] | None, str]:
    """uvloop where it is installed: it halves the client's CPU time."""
    try:
        import uvloop
    except ImportError:
        return None, "asyncio"
    return uvloop.new_event_loop, "uvloop"


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage collection while time is taken: a full one stops the client for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _drive(part: Part, start: float, loop: str) -> Driven:
    import aiohttp

    lags: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, skip_auto_headers=SKIPPED) as session:
        shooter = _Shooter(session, part, start)
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        before = time.process_time()
        watch = asyncio.create_task(_watch(lags))
        if part.due is None:
            await asyncio.gather(*(shooter.slot() for _ in range(part.slots)))
        else:
            await shooter.schedule(part.due)
        watch.cancel()
        used = time.process_time() - before
        return Driven(shooter.samples, lags, used, loop, os.getpriority(os.PRIO_PROCESS, 0))


async def _watch(lags: list[float]) -> None:
    """How much later than asked the loop wakes up."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - before - TICK_S)


class _Shooter:
    """Sends requests and keeps their samples."""

    def __init__(self, session: ClientSession, part: Part, start: float) -> None:
        self.session = session
        self.part = part
        self.start = start
        self.samples: list[Sample] = []
        self.taken = 0

    async def schedule(self, due: tuple[float, ...]) -> None:
        """An open loop: each request at its time, whatever became of those before it."""
        tasks: list[asyncio.Task[Any]] = []
        for number, (request, at) in enumerate(zip(self.part.requests, due, strict=True)):
            ahead = self.start + at - time.perf_counter()
            if ahead > 0:
                await asyncio.sleep(ahead)
            elif number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(self.shoot(request, at)))
        await asyncio.gather(*tasks)

    async def slot(self) -> None:
        """One slot of a closed loop."""
        burst = True
        end = self.start + self.part.seconds
        while time.perf_counter() < end and (self.part.count is None or self.taken < self.part.count):
            turn, self.taken = self.taken, self.taken + 1
            await self.shoot(self.part.requests[turn % len(self.part.requests)], None, burst)
            burst = False

    async def shoot(self, request: CompletionRequest, due: float | None, burst: bool = False) -> None:
        """One request; whatever becomes of it is a sample."""
        part, start = self.part, self.start
        sent = time.perf_counter() - start
        at = sent if due is None else due
        tokens: tuple[float, ...] = ()
        failure = detail = ""
        try:
            async with asyncio.timeout(max(0.0, at + part.timeout_s - sent)):
                answer = await complete(self.session, part.url, part.model, request, stall_s=None)
            sent, tokens = answer.begin - start, answer.token_times
            end = sent + answer.total_s
        except RequestError as error:
            failure, detail, end = error.kind, error.message[:DETAIL], time.perf_counter() - start
        except TimeoutError:
            failure, end = "timeout", time.perf_counter() - start
            detail = f"no whole answer within {part.timeout_s:g} s"
        prompt = len(request.prompt_token_ids)
        self.samples.append(Sample(request.id, prompt, at, sent, end, tokens, failure, detail, burst))
