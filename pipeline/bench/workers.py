"""Client processes: one sends about a thousand requests a second, a spike may ask for several.

They are processes also when there is one: whatever the parent does beside the load (telemetry) must not hold the
client's interpreter. They live from load to load, wait for their parts, and start together at a time on the clock
that all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pipeline.bench.drive import Driven, Part, run_part
from pipeline.bench.load import Load
from pipeline.errors import EnginegateError

RATE = 1000  # requests a second that one process sends without lagging
SLOTS = 256  # closed-loop slots of one process
FILES = 65_536  # open files of one process, where the system allows them
LEAD_S = 0.2  # from the last process's word that it is ready to the start
NICE = -10  # the client's priority, as `nice` counts
GRACE_S = 60.0  # beyond a load's own time, after which a silent process counts as lost


Worker = tuple[Any, Connection]  # the process (spawn's own class) and our end of its pipe


class ClientError(EnginegateError):
    """A process of the load client died; nothing was measured."""


def workers_for(load: Load) -> int:
    """Processes that a load asks for, at most one a core."""
    wanted = load.concurrency / SLOTS if load.due is None else load.peak_rate / RATE
    return min(max(1, math.ceil(wanted)), os.cpu_count() or 1)


def parts(load: Load, url: str | Sequence[str], model: str, timeout_s: float, workers: int) -> list[Part]:
    """A load's shares: every ``workers``-th request each, or the slots spread evenly; over several servers evenly."""
    urls = [url] if isinstance(url, str) else list(url)
    workers = len(urls) * math.ceil(workers / len(urls))
    found = []
    for turn in range(min(workers, load.concurrency or len(load.requests) or 1)):
        slots = load.concurrency // workers + (turn < load.concurrency % workers)
        # Closed loops begin at different places, or the processes would all send the same prompts.
        begin = turn * len(load.requests) // workers
        requests = (
            load.requests[turn::workers] if load.due is not None else load.requests[begin:] + load.requests[:begin]
        )
        due = None if load.due is None else load.due[turn::workers]
        found.append(Part(urls[turn % len(urls)], model, requests, due, slots, load.seconds, timeout_s))
    return found


class Workers:
    """Running client processes, by need."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: list[Worker] = []

    def run(self, parts: list[Part]) -> tuple[float, list[Driven]]:
        """Sends the parts, one a process; the start (``time.perf_counter``) and what each process saw."""
        while len(self._running) < len(parts):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._running.append((process, ours))
        chosen = self._running[: len(parts)]
        for one, part in zip(chosen, parts, strict=True):
            _send(one, part)
        for one in chosen:
            _receive(one, GRACE_S)
        start = time.perf_counter() + LEAD_S
        for one in chosen:
            _send(one, start)
        patience = max(part.seconds + part.timeout_s for part in parts) + GRACE_S
        return start, [_receive(one, patience) for one in chosen]

    def close(self) -> None:
        """Ends the processes."""
        for process, pipe in self._running:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()
        self._running.clear()


def _send(worker: Worker, value: Any) -> None:
    with _alive(worker):
        worker[1].send(value)


def _receive(worker: Worker, patience_s: float) -> Any:
    with _alive(worker):
        if worker[1].poll(patience_s):
            return worker[1].recv()
    raise ClientError(f"a client process was silent for {patience_s:.0f} s", "is the machine overloaded?")


@contextlib.contextmanager
def _alive(worker: Worker) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        worker[0].join(5)  # the pipe breaks a moment before the process is gone
        raise ClientError(
            f"a client process ended with exit code {worker[0].exitcode}", "run the stage again; see its messages"
        ) from error


@contextlib.contextmanager
def client() -> Iterator[Workers]:
    """Client processes for the length of the block."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.close()


def _serve(pipe: Connection) -> None:
    """The life of a client process: a part, the word that it is ready, the start, the load, what was seen."""
    import signal

    import aiohttp  # noqa: F401  loaded before the first start, not after it

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our pipe
    _raise_file_limit()
    _go_first()
    try:
        while True:
            part = pipe.recv()
            pipe.send("ready")
            pipe.send(run_part(part, pipe.recv()))
    except (EOFError, ConnectionError):
        return  # the parent is done, or gone


def _go_first() -> None:
    """Where the system allows it, the client goes before the server that it measures: what it stamps late is wrong.

    It is refused to most users. Each run records the priority that it had, and whether the client kept up.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)


def _raise_file_limit() -> None:
    """A request in flight is an open file, and the usual soft limit is 1024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
