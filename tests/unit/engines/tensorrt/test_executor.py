"""The TensorRT runtime's logic on a fake GPU (``fake.py``), against torch: slots, buckets, masks, joins, growth."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engines.scheduler import GreedyExecutor, Job, Scheduler, ScoreJob, Scorer
from pipeline.engines.tensorrt import decoder, plan
from pipeline.engines.tensorrt.executor import State, TensorRTExecutor
from pipeline.engines.tensorrt.graph import DecoderShape, export_decoder
from pipeline.errors import ServerError
from tests.unit.engines.tensorrt.fake import FakeDevice, FakeEngine, describe, profile

MAX_TOKENS = 64
MAX_BATCH = 6
READ = 16  # longest prompt in one pass: longer ones are read in pieces


class Torch:
    """The reference: one sequence at a time, all of it anew for each token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocabulary], float64."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0].double().numpy()

    def after(self, tokens: list[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self.logits(tokens)[-1]
        return self._known[key]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.after(tokens).argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.tiny import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def reference(torch_model: Any) -> Torch:
    return Torch(torch_model)


@pytest.fixture(scope="module")
def folder(torch_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("graph")
    export_decoder(torch_model, target, capacity=MAX_TOKENS)
    return target


def open_executor(folder: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool = True) -> TensorRTExecutor:
    shape = DecoderShape(layers=2, kv_heads=2, head_size=32, vocabulary=85)
    profiles = [
        profile(
            shape,
            "prefill",
            {"batch": (1, 2, 4), "new": (1, 8, READ), "kept": (1, 1, READ), "capacity": (1, 1, MAX_TOKENS)},
        )
    ]
    profiles += [
        profile(
            shape,
            f"decode_{size}",
            {"batch": (size,) * 3, "new": (1, 1, 1), "kept": (size,) * 3, "capacity": (1, 16, MAX_TOKENS)},
        )
        for size in (1, 2, 4, MAX_BATCH)
    ]
    description = describe(shape, "float32", profiles, {})
    device = FakeDevice()
    monkeypatch.setattr(plan, "open_plan", lambda *_words: (description, FakeEngine(folder, description, device), None))
    monkeypatch.setattr(decoder, "FIRST_CAPACITY", 16)
    return TensorRTExecutor(folder, max_batch=MAX_BATCH, max_tokens=MAX_TOKENS, device=device, graphs=graphs)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield open_executor(folder, monkeypatch)


def test_it_is_what_the_scheduler_asks_for(executor: TensorRTExecutor) -> None:
    assert isinstance(executor, GreedyExecutor)
    assert isinstance(executor, Scorer)
    assert (executor.max_batch, executor.max_tokens, executor.vocab_size) == (MAX_BATCH, MAX_TOKENS, 85)


def test_logits_over_prompts_of_several_lengths_and_steps(executor: TensorRTExecutor, reference: Torch) -> None:
    """Also a prompt that is read in three pieces, and growth from 16 over 32 to 64 places."""
    rows = [[5, 6, 7], list(range(4, 44)), [9], list(range(30, 46))]
    state, logits = executor.prefill(rows)
    for step in range(20):
        for row, found in zip(rows, logits, strict=True):
            np.testing.assert_allclose(found, reference.after(row), rtol=0, atol=2e-4)
        forced = np.array([(7 * step + 11 * place) % 85 for place in range(len(rows))])
        rows = [[*row, int(token)] for row, token in zip(rows, forced, strict=True)]
        logits = executor.decode(state, forced)


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_steps_run_ahead_and_give_torchs_tokens(
    folder: Path, reference: Torch, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(folder, monkeypatch, graphs=graphs)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
    state, logits = executor.prefill(prompts)
    tokens = logits.argmax(axis=-1)
    answers = [[int(token)] for token in tokens]
    for _ in range(30):
        tokens = executor.decode_greedy(state, tokens)
        for answer, token in zip(answers, tokens.tolist(), strict=True):
            answer.append(token)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference.greedy(prompt, 31)
    device: Any = executor._device
    assert (device.replays > 0) == graphs
    # Two growths of a batch of two slots, two layers, there and back: nothing else is copied on the device.
    assert device.launches.count("copy") == 2 * 4 * 2


def test_up_to_the_last_place_and_no_further(executor: TensorRTExecutor, reference: Torch) -> None:
    prompt = [5, 6, 7, 8]
    state, logits = executor.prefill([prompt])
    tokens, answer = logits.argmax(axis=-1), []
    while len(prompt) + len(answer) < MAX_TOKENS:
        answer.append(int(tokens[0]))
        tokens = executor.decode_greedy(state, tokens)
    assert [*answer, int(tokens[0])] == reference.greedy(prompt, MAX_TOKENS - 4 + 1)
    with pytest.raises(ServerError, match="65 tokens are more than this engine's 64"):
        executor.decode_greedy(state, tokens)
    del state
    with pytest.raises(ServerError, match="65 tokens"):
        executor.prefill([[1] * 65])


def test_slots_are_free_again_once_nothing_holds_a_state(executor: TensorRTExecutor) -> None:
    first, _ = executor.prefill([[5]] * 4)
    second, _ = executor.prefill([[6]] * 2)
    with pytest.raises(ServerError, match="1 more rows do not fit: 0 of 6 slots are free"):
        executor.prefill([[7]])
    executor.keep(first, np.array([3, 1]))
    executor.join(first, second)
    assert sorted(first.slots) == [1, 3, 4, 5]
    third, _ = executor.prefill([[7]])
    assert third.slots == [0]
    del first, second, third
    assert isinstance(executor.prefill([[5]] * 6)[0], State)


def test_fewer_rows_move_into_a_smaller_bucket(executor: TensorRTExecutor, reference: Torch) -> None:
    prompts = [[5, 6], [7, 8], [9, 10, 11], [12], [13, 14], [15, 16, 17, 18]]
    state, logits = executor.prefill(prompts)
    tokens = executor.decode_greedy(state, logits.argmax(axis=-1))
    executor.keep(state, np.array([5, 2]))
    assert max(state.slots) == 5
    tokens = tokens[[5, 2]]
    for place in range(2, 6):
        tokens = executor.decode_greedy(state, tokens)
        for prompt, token in zip((prompts[5], prompts[2]), tokens.tolist(), strict=True):
            assert token == reference.greedy(prompt, place + 1)[-1]
    assert sorted(state.slots) == [0, 1]


@pytest.mark.parametrize("length", [1, 2, READ, READ + 1, 50, MAX_TOKENS])
def test_scores_are_torchs_log_softmax(executor: TensorRTExecutor, reference: Torch, length: int) -> None:
    prompts = [[(7 * place + 3) % 85 for place in range(length)], [4, 5, 6]]
    for prompt, scores in zip(prompts, executor.score(prompts), strict=True):
        logits = reference.logits(prompt)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert len(scores.given) == len(scores.best) == len(scores.best_log_prob) == len(prompt)
        assert np.isnan(scores.given[0])
        given = [expected[place, token] for place, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(scores.given[1:], given, rtol=0, atol=1e-4)
        assert scores.best.tolist() == expected.argmax(axis=-1).tolist()
        np.testing.assert_allclose(scores.best_log_prob, expected.max(axis=-1), rtol=0, atol=1e-4)


def test_logits_that_are_not_finite_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = open_executor(folder, monkeypatch)
    state, logits = executor.prefill([[5, 6, 7], [8]])
    device: Any = executor._device
    original = FakeDevice._read_logits

    def overflow(device: FakeDevice, grid: Any, addresses: Any, sizes: Any) -> None:
        device.view(addresses[0], np.float32, (grid[0], *sizes))[-1, 3] = np.nan
        original(device, grid, addresses, sizes)

    monkeypatch.setattr(FakeDevice, "_read_logits", overflow)
    with pytest.raises(ServerError, match="not finite"):
        executor.decode_greedy(state, logits.argmax(axis=-1))
    with pytest.raises(ServerError, match="not finite"):
        executor.score([[5, 6, 7]])
    assert device.launches


def test_a_step_that_was_queued_ahead_is_thrown_away_for_other_tokens(
    executor: TensorRTExecutor, reference: Torch
) -> None:
    prompt = [5, 6, 7]
    state, logits = executor.prefill([prompt])
    executor.decode_greedy(state, logits.argmax(axis=-1))  # the next step is queued, with the token that it found
    forced = [int(logits.argmax()), 44]
    assert executor.decode_greedy(state, np.array([44])).tolist() == [reference.greedy([*prompt, *forced], 1)[0]]
    logits = executor.decode(state, np.array([45]))
    np.testing.assert_allclose(logits[0], reference.after([*prompt, *forced, 45]), rtol=0, atol=2e-4)


def test_capacity_follows_the_rows_that_live(executor: TensorRTExecutor) -> None:
    long, _ = executor.prefill([[1] * 40])
    assert executor._decoder.capacity == MAX_TOKENS
    short, _ = executor.prefill([[2] * 3])
    assert executor._decoder.capacity == MAX_TOKENS
    del long
    executor.decode(short, np.array([3]))
    assert executor._decoder.capacity == 16


def test_the_scheduler_serves_it(folder: Path, reference: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than slots, of several lengths: some join a running batch, each gets what it gets alone."""
    executor = open_executor(folder, monkeypatch)
    scheduler = Scheduler(executor)
    events: list[queue.Queue[Any]] = []
    asked = [([(11 * place + step) % 85 for step in range(1 + place % 5)], 3 + place % 7) for place in range(15)]
    scored: queue.Queue[Any] = queue.Queue()
    for prompt, count in asked:
        events.append(queue.Queue())
        scheduler.submit(Job(prompt, count, frozenset(), events[-1].put))
    scheduler.submit(ScoreJob([5, 6, 7], scored.put))
    for (prompt, count), answer in zip(asked, events, strict=True):
        tokens = [answer.get(timeout=30) for _ in range(count)]
        assert [token.id for token in tokens] == reference.greedy(prompt, count)
        assert tokens[-1].finish_reason == "length"
    assert len(scored.get(timeout=30).given) == 3
    scheduler.close()
    assert scheduler.failure is None
    assert executor._used() == set()


requests = st.tuples(st.lists(st.integers(0, 84), min_size=1, max_size=20), st.integers(1, 24), st.integers(0, 25))


@settings(max_examples=25, deadline=None)
@given(st.lists(requests, min_size=1, max_size=10), st.booleans(), st.data())
def test_any_order_of_arrivals_and_ends_gives_each_what_it_gets_alone(
    reference: Torch, executor: TensorRTExecutor, asked: list[Any], greedy: bool, data: st.DataObject
) -> None:
    """``asked``: prompt, tokens wanted, step of arrival. Rows are kept in any order and only sometimes dropped."""
    held: list[State] = []
    try:
        waiting, answers = _serve(executor, asked, greedy, data, held)
    finally:  # hypothesis holds the frames of examples that it gave up
        for state in held:
            executor.keep(state, np.zeros(0, np.int64))
    for (prompt, wanted, _), answer in zip(waiting, answers, strict=True):
        assert answer[:wanted] == reference.greedy(prompt, wanted)


def _serve(
    executor: TensorRTExecutor, asked: list[Any], greedy: bool, data: st.DataObject, held: list[State]
) -> tuple[list[Any], list[list[int]]]:
    waiting = sorted(asked, key=lambda request: request[2])
    state: State | None = None
    rows: list[list[int]] = []  # request's place, and its tokens so far
    answers: list[list[int]] = [[] for _ in waiting]
    tokens = np.zeros(0, np.int64)
    arrived = step = 0
    while arrived < len(waiting) or any(len(answers[place]) < waiting[place][1] for (place,) in rows):
        active = [row for row, (place,) in enumerate(rows) if len(answers[place]) < waiting[place][1]]
        come = [place for place in range(arrived, len(waiting)) if waiting[place][2] <= step or not active]
        come = come[: MAX_BATCH - len(active)]
        if state is not None and not active:
            executor.keep(state, np.zeros(0, np.int64))
            state, rows, tokens = None, [], tokens[:0]
        elif state is not None and (come or data.draw(st.booleans())):
            kept = data.draw(st.permutations(active))
            executor.keep(state, np.array(kept, np.int64))
            rows, tokens = [rows[row] for row in kept], tokens[kept]
        if come:
            arrived += len(come)
            other, logits = executor.prefill([waiting[place][0] for place in come])
            held.append(other)
            if state is None:
                state = other
            else:
                executor.join(state, other)
            rows += [[place] for place in come]
            fresh = logits.argmax(axis=-1)
            tokens = np.concatenate([tokens, fresh])
            for place, token in zip(come, fresh.tolist(), strict=True):
                answers[place].append(token)
        else:
            assert state is not None
            tokens = executor.decode_greedy(state, tokens) if greedy else executor.decode(state, tokens).argmax(axis=-1)
            for (place,), token in zip(rows, tokens.tolist(), strict=True):
                answers[place].append(token)
        step += 1
    return waiting, answers
