"""Batches waiting requests and decodes them greedily, or scores their prompts, on one worker thread.

The executor does the arithmetic and knows nothing of requests; the scheduler does the opposite. Requests wait in
arrival order; a batch is the oldest one and those that are nearest to it in prompt length, which limits padding
and starves nobody. Rows that finish early are dropped from the batch once they are worth a copy of the cache.

Waiting requests join a running batch when enough of its rows are free (in-flight batching): their prompts are read on
their own, and their rows are appended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ServerError

LINGER_S = 0.005  # a lone request waits this long for company
JOIN_SHARE = 0.25  # free rows wait until they are this share of the batch: reading a few prompts costs like many
DROP_SHARE = 0.125  # finished rows are dropped when they are this share of the batch: a copy costs about two rows

State: TypeAlias = Any  # what an executor keeps between two steps; only the executor looks into it


class Executor(Protocol):
    """Runs a decoder: token ids in, logits out. It is only ever called from one thread."""

    max_batch: int
    max_tokens: int  # prompt and answer together
    vocab_size: int

    def prefill(self, prompts: list[list[int]]) -> tuple[State, NDArray[Any]]:
        """Starts a batch; returns its state and the logits [batch, vocab] after each prompt's last token."""
        ...

    def decode(self, state: State, tokens: NDArray[np.int64]) -> NDArray[Any]:
        """Appends ``tokens`` [batch] to the batch; returns the logits [batch, vocab] after them."""
        ...

    def keep(self, state: State, rows: NDArray[np.int64]) -> None:
        """Drops all rows of the batch but ``rows``, in that order."""
        ...

    def join(self, state: State, other: State) -> None:
        """Appends the rows of ``other`` to ``state``; ``other`` is not used again."""
        ...


@runtime_checkable
class GreedyExecutor(Executor, Protocol):
    """An executor that finds the most likely tokens itself, where its logits are."""

    def decode_greedy(self, state: State, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Like ``decode``, but returns the most likely tokens [batch]. Raises ServerError for logits not finite."""
        ...


@dataclass(frozen=True)
class Scores:
    """Log-probabilities (nats) along one prompt of ``n`` tokens; all arrays have length ``n``.

    ``given[i]`` is that of token ``i`` after those before it (NaN for the first, which has none before it);
    ``best[i]`` is the most likely token after token ``i`` and ``best_log_prob[i]`` its log-probability.
    """

    given: NDArray[np.float32]
    best: NDArray[np.int64]
    best_log_prob: NDArray[np.float32]


@runtime_checkable
class Scorer(Protocol):
    """An executor that also gives the log-probabilities of prompts; not every backend can."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """The scores of each prompt. Raises ServerError for logits that are not finite."""
        ...


@dataclass(frozen=True)
class Token:
    """One generated token. ``finish_reason`` is None until the last, then ``stop`` or ``length``."""

    id: int
    finish_reason: str | None


@dataclass(frozen=True)
class Failure:
    """The request gets no (more) tokens; why."""

    message: str


@dataclass
class Job:
    """One request. ``emit`` is called on the worker thread with each Token, or once with a Failure.

    Setting ``cancelled`` ends it at the next step: a client that has gone must not hold a row. The times are of
    ``time.perf_counter``: when it was queued, taken into a batch, given its first token, and its last.
    """

    prompt: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    emit: Callable[[Token | Failure], None]
    cancelled: bool = False
    produced: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)
    queued_at: float = field(default_factory=time.perf_counter, init=False)
    taken_at: float = field(default=0.0, init=False)
    first_at: float = field(default=0.0, init=False)
    last_at: float = field(default=0.0, init=False)

    @property
    def active(self) -> bool:
        """Whether it still wants tokens."""
        return not (self.finished or self.cancelled)

    def accept(self, token: int) -> None:
        """Takes the next token and passes it on."""
        self.last_at = time.perf_counter()
        if self.produced == 0:
            self.first_at = self.last_at
        self.produced += 1
        reason = None
        if token in self.stop_token_ids:
            reason = "stop"
        elif self.produced >= self.max_tokens:
            reason = "length"
        self.finished = reason is not None
        self.emit(Token(token, reason))


@dataclass
class ScoreJob:
    """One prompt to score. ``emit`` is called once on the worker thread, as for a Job."""

    prompt: Sequence[int]
    emit: Callable[[Scores | Failure], None]
    cancelled: bool = False
    finished: bool = field(default=False, init=False)

    @property
    def active(self) -> bool:
        """Whether it still waits for its scores."""
        return not (self.finished or self.cancelled)


class Scheduler:
    """Owns the executor and its thread. ``failure`` is why it gave up, or None while it works."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.failure: str | None = None
        self._waiting: list[Job | ScoreJob] = []
        self._running: Sequence[Job | ScoreJob] = []
        self._draining = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> tuple[int, int]:
        """How many requests run and how many wait."""
        with self._changed:
            return sum(job.active for job in self._running), sum(job.active for job in self._waiting)

    def submit(self, job: Job | ScoreJob) -> None:
        """Queues ``job``. Raises ServerError after a failure and while stopping."""
        with self._changed:
            if self.failure is not None:
                raise ServerError(self.failure, "see the server's log and start it again")
            if self._draining:
                raise ServerError("the server is stopping", "start it again")
            self._waiting.append(job)
            self._changed.notify()

    def drain(self) -> None:
        """Refuses new and waiting jobs; running ones go on."""
        with self._changed:
            self._draining = True
            refused, self._waiting = self._waiting, []
            self._changed.notify()
        for job in refused:
            job.emit(Failure("the server is stopping"))

    def close(self) -> None:
        """Ends everything: running jobs get no more tokens. Waits for the thread."""
        self.drain()
        for job in list(self._running):
            job.cancelled = True
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._running = batch
            try:
                self._score([job for job in batch if isinstance(job, ScoreJob)])
                self._generate([job for job in batch if isinstance(job, Job)])
            except Exception as error:  # noqa: BLE001  whatever an executor raises must reach every client and /health
                self._give_up(f"the engine failed: {type(error).__name__}: {error}")
                return
            finally:
                self._running = []

    def _next_batch(self) -> list[Job | ScoreJob]:
        """The next jobs to run together, all of one kind; empty when the scheduler is told to end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._draining)
                deadline = time.monotonic() + LINGER_S
                while len(self._waiting) < self.executor.max_batch and not self._draining:
                    if not self._changed.wait(deadline - time.monotonic()):
                        break
                if self._draining:
                    return []
                batch = _nearest([job for job in self._waiting if job.active], self.executor.max_batch)
                self._waiting = [job for job in self._waiting if job.active and job not in batch]
                if batch:
                    return batch

    def _score(self, batch: list[ScoreJob]) -> None:
        if not batch:
            return
        if not isinstance(self.executor, Scorer):
            raise TypeError(f"{type(self.executor).__name__} cannot score")
        for job, scores in zip(batch, self.executor.score([list(job.prompt) for job in batch]), strict=True):
            job.finished = True
            job.emit(scores)

    def _generate(self, batch: list[Job]) -> None:
        if not batch:
            return
        _take(batch)
        state, logits = self.executor.prefill([list(job.prompt) for job in batch])
        rows = batch
        tokens = _accept(rows, _greedy(logits))
        while active := [row for row, job in enumerate(rows) if job.active]:
            newcomers = self._newcomers(len(active))
            if newcomers or len(rows) - len(active) >= DROP_SHARE * len(rows):
                kept = np.array(active, dtype=np.int64)
                self.executor.keep(state, kept)
                rows, tokens = [rows[row] for row in active], tokens[kept]
            if newcomers:
                self._running = [*rows, *newcomers]
                _take(newcomers)
                other, logits = self.executor.prefill([list(job.prompt) for job in newcomers])
                self.executor.join(state, other)
                rows, tokens = [*rows, *newcomers], np.concatenate([tokens, _accept(newcomers, _greedy(logits))])
                continue  # a newcomer's first token may have been its last
            tokens = _accept(rows, self._step(state, tokens))

    def _step(self, state: State, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        if isinstance(self.executor, GreedyExecutor):
            return self.executor.decode_greedy(state, tokens)
        return _greedy(self.executor.decode(state, tokens))

    def _newcomers(self, active: int) -> list[Job]:
        """The waiting jobs that join a batch of ``active`` rows now; none while a prompt to score is the oldest."""
        free = self.executor.max_batch - active
        if free < JOIN_SHARE * self.executor.max_batch:
            return []
        with self._changed:
            waiting = [job for job in self._waiting if job.active]
            if not waiting or not isinstance(waiting[0], Job):
                return []
            chosen = [job for job in _nearest(waiting, free) if isinstance(job, Job)]
            self._waiting = [job for job in waiting if job not in chosen]
            return chosen

    def _give_up(self, message: str) -> None:
        with self._changed:
            self.failure = message
            failed = [job for job in self._running if job.active] + self._waiting
            self._waiting = []
        for job in failed:
            job.emit(Failure(message))


def _take(jobs: Sequence[Job]) -> None:
    now = time.perf_counter()
    for job in jobs:
        job.taken_at = now


def _accept(rows: Sequence[Job], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives each row its next token; returns the tokens."""
    for job, token in zip(rows, tokens.tolist(), strict=True):
        if job.active:
            job.accept(token)
    return tokens


def _nearest(jobs: list[Job | ScoreJob], count: int) -> list[Job | ScoreJob]:
    """The oldest job and up to ``count - 1`` others of its kind, nearest in prompt length; shortest first."""
    if not jobs:
        return []
    anchor = len(jobs[0].prompt)
    alike = [job for job in jobs if type(job) is type(jobs[0])]
    chosen = sorted(alike, key=lambda job: abs(len(job.prompt) - anchor))[:count]
    return sorted(chosen, key=lambda job: len(job.prompt))


def _greedy(logits: NDArray[Any]) -> NDArray[np.int64]:
    """The most likely token of each row. NaN would silently become token 0 ("!!!!"), so it is an error."""
    if not np.isfinite(logits.max(axis=-1)).all():
        raise ServerError("the logits are not finite", "the engine overflows: try another precision or recipe")
    return np.asarray(logits.argmax(axis=-1), dtype=np.int64)
