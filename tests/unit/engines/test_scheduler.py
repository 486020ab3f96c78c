"""The scheduler: whatever is batched together, each request gets what it would get alone."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engines.scheduler import Failure, Job, Scheduler, ScoreJob, Scores, Token
from pipeline.errors import ServerError
from tests.unit.serving.fake_engine import EOS, FakeExecutor, ScoringExecutor, continuation

STOPS = frozenset({EOS})


class Client:
    """One request and what came back."""

    def __init__(self, prompt: list[int], max_tokens: int, stops: frozenset[int] = STOPS) -> None:
        self.events: queue.Queue[Token | Failure] = queue.Queue()
        self.job = Job(prompt, max_tokens, stops, self.events.put)

    def answer(self) -> tuple[list[int], str]:
        tokens = []
        while True:
            event = self.events.get(timeout=10)
            if isinstance(event, Failure):
                raise ServerError(event.message)
            tokens.append(event.id)
            if event.finish_reason is not None:
                assert self.events.empty()
                return tokens, event.finish_reason


requests = st.tuples(
    st.lists(st.integers(1, 255), min_size=1, max_size=12),
    st.integers(1, 20),
    st.sets(st.integers(0, 255), max_size=20),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=12), st.integers(1, 5))
def test_any_mix_gives_the_same_tokens_as_one_at_a_time(
    asked: list[tuple[list[int], int, set[int]]], max_batch: int
) -> None:
    scheduler = Scheduler(FakeExecutor(max_batch=max_batch))
    clients = [Client(prompt, limit, frozenset(stops)) for prompt, limit, stops in asked]
    for client in clients:
        scheduler.submit(client.job)
    for client, (prompt, limit, stops) in zip(clients, asked, strict=True):
        assert client.answer() == continuation(prompt, limit, frozenset(stops))
    scheduler.close()


def _run(executor: FakeExecutor, clients: list[Client]) -> None:
    """Runs ``clients`` behind a full batch that holds the engine while they queue up."""
    scheduler = Scheduler(executor)
    executor.step_s = 0.02
    for _ in range(executor.max_batch):
        scheduler.submit(Client([1], 5, frozenset()).job)
    while not executor.batches:
        time.sleep(0.001)
    executor.step_s = 0
    for client in clients:
        scheduler.submit(client.job)
    for client in clients:
        client.answer()
    scheduler.close()


def test_the_oldest_goes_with_its_nearest_in_length() -> None:
    executor = FakeExecutor(max_batch=3)
    lengths = [10, 50, 11, 51, 9, 52]
    _run(executor, [Client([1] * length, 2, frozenset()) for length in lengths])
    assert executor.batches[1:] == [[9, 10, 11], [50, 51, 52]]


def test_scoring_and_answering_share_the_thread_but_no_batch() -> None:
    executor = ScoringExecutor(max_batch=3)
    scheduler = Scheduler(executor)
    answers, scored = [Client([number, 9], 4) for number in range(1, 5)], queue.Queue[Scores | Failure]()
    for client in answers:
        scheduler.submit(client.job)
        scheduler.submit(ScoreJob([*client.job.prompt, 50], scored.put))
    for client in answers:
        assert client.answer() == continuation(list(client.job.prompt), 4, STOPS)
    for _ in answers:
        scores = scored.get(timeout=10)
        assert isinstance(scores, Scores)
        assert scores.given[1:].tolist() == pytest.approx([-0.09, -0.5])
    assert sorted(map(sorted, executor.batches)) == [[-3], [-3, -3, -3], [2], [2, 2, 2]]
    scheduler.close()


@pytest.mark.parametrize("executor", [FakeExecutor(), ScoringExecutor()])
def test_a_failure_while_scoring_reaches_the_job(executor: FakeExecutor) -> None:
    executor.fail_at = 0
    scheduler = Scheduler(executor)
    scored = queue.Queue[Scores | Failure]()
    scheduler.submit(ScoreJob([1, 2], scored.put))
    failure = scored.get(timeout=10)
    assert isinstance(failure, Failure)
    assert failure.message == scheduler.failure
    scheduler.close()


def test_finished_rows_are_dropped() -> None:
    executor = FakeExecutor(max_batch=4)
    _run(executor, [Client([1, 2], limit, frozenset()) for limit in (2, 4, 6, 8)])
    widths = executor.widths[4:]  # after those of the first request
    assert widths == [4, 3, 3, 2, 2, 1, 1]


def test_a_lone_request_waits_a_moment_for_company() -> None:
    executor = FakeExecutor(max_batch=4)
    scheduler = Scheduler(executor)
    clients = [Client([number], 3, frozenset()) for number in (1, 2, 3, 4)]
    for client in clients:
        scheduler.submit(client.job)
    for client in clients:
        client.answer()
    scheduler.close()
    assert executor.batches == [[1, 1, 1, 1]]


def test_a_cancelled_job_leaves_its_batch_and_the_queue() -> None:
    executor = FakeExecutor(max_batch=1, step_s=0.01)
    scheduler = Scheduler(executor)
    endless, waiting, last = Client([1], 10**6, frozenset()), Client([2], 5), Client([3], 5)
    for client in (endless, waiting, last):
        scheduler.submit(client.job)
    endless.events.get(timeout=5)
    waiting.job.cancelled = True
    endless.job.cancelled = True
    assert last.answer() == continuation([3], 5, STOPS)
    assert waiting.events.empty()
    scheduler.close()


@pytest.mark.parametrize("trouble", ["fail_at", "nan_at"])
def test_a_failure_reaches_running_and_waiting_jobs_and_later_ones(trouble: str) -> None:
    executor = FakeExecutor(max_batch=1, step_s=0.01)
    setattr(executor, trouble, 3)
    scheduler = Scheduler(executor)
    clients = [Client([1], 50, frozenset()), Client([2], 50, frozenset())]
    for client in clients:
        scheduler.submit(client.job)
    for client in clients:
        with pytest.raises(ServerError, match="the engine failed"):
            client.answer()
    assert scheduler.failure is not None
    with pytest.raises(ServerError, match="the engine failed"):
        scheduler.submit(Client([1], 1).job)
    scheduler.close()


def test_draining_finishes_what_runs() -> None:
    executor = FakeExecutor(max_batch=1, step_s=0.005)
    scheduler = Scheduler(executor)
    running, waiting = Client([1], 20, frozenset()), Client([2], 5)
    scheduler.submit(running.job)
    first = running.events.get(timeout=5)
    scheduler.submit(waiting.job)
    scheduler.drain()
    with pytest.raises(ServerError, match="stopping"):
        waiting.answer()
    with pytest.raises(ServerError, match="stopping"):
        scheduler.submit(Client([3], 5).job)
    assert isinstance(first, Token)
    assert len(running.answer()[0]) == 19
    scheduler.close()


def test_closing_ends_a_running_job() -> None:
    scheduler = Scheduler(FakeExecutor(max_batch=1, step_s=0.005))
    endless = Client([1], 10**6, frozenset())
    scheduler.submit(endless.job)
    endless.events.get(timeout=5)
    scheduler.close()
    assert not any(thread.name == "scheduler" for thread in threading.enumerate())


def test_a_waiting_request_joins_a_running_batch() -> None:
    """The long one is still being answered when the short ones, which arrive later, are done."""
    executor = FakeExecutor(max_batch=4, step_s=0.005)
    scheduler = Scheduler(executor)
    long = Client([1], 100, frozenset())
    scheduler.submit(long.job)
    while executor.steps < 3:
        time.sleep(0.001)
    late = [Client([number, 7], 5, frozenset()) for number in range(2, 9)]
    for client in late:
        scheduler.submit(client.job)
    for number, client in enumerate(late, start=2):
        assert client.answer() == continuation([number, 7], 5, frozenset())
    assert long.job.active
    assert max(executor.widths) == 4
    assert long.answer() == continuation([1], 100, frozenset())
    scheduler.close()
