"""Runs an ONNX Runtime engine on the CPU, step by step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.scheduler import Scores
from pipeline.errors import ServerError

Logits = NDArray[np.float32]
SCORE_VALUES = 2**25  # logits held at a time while scoring: 128 MiB


@dataclass
class State:
    """A running batch: the cache (one ONNX Runtime value a tensor), and ``mask [batch, past]``."""

    cache: list[Any]
    mask: NDArray[np.int64]


class OrtExecutor:
    """Greedy decoding steps over an engine folder. Prompts of one batch are padded on the left and masked."""

    def __init__(self, folder: Path, *, max_batch: int, max_tokens: int, threads: int = 0) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.log_severity_level = 3
        self._ort = ort
        self._session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        inputs = {value.name: value for value in self._session.get_inputs()}
        self._cache_names = [name for name in inputs if name.startswith("past_key_values.")]
        self._outputs = [value.name for value in self._session.get_outputs()]
        _, self._heads, _, self._head_size = inputs[self._cache_names[0]].shape
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])

    def prefill(self, prompts: list[list[int]]) -> tuple[State, Logits]:
        """Reads prompts; returns the state and the logits ``[batch, vocabulary]`` after each prompt."""
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), np.int64)
        mask = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        cache = self._empty_cache(len(prompts))
        state = State(cache, mask)
        return state, self._run(state, ids, np.maximum(mask.cumsum(axis=1) - 1, 0), last=1)[:, -1]

    def decode(self, state: State, tokens: NDArray[np.int64]) -> Logits:
        """One step: ``tokens [batch]`` in, logits ``[batch, vocabulary]`` out; advances ``state``."""
        positions = state.mask.sum(axis=1, keepdims=True)
        state.mask = np.concatenate([state.mask, np.ones((len(tokens), 1), np.int64)], axis=1)
        return self._run(state, tokens.reshape(-1, 1).astype(np.int64), positions, last=1)[:, -1]

    def keep(self, state: State, rows: NDArray[np.int64]) -> None:
        """Keeps only ``rows`` of the batch, and drops columns that are padding for all of them."""
        mask = state.mask[rows]
        first = int(mask.any(axis=0).argmax())
        state.mask = np.ascontiguousarray(mask[:, first:])
        state.cache = [
            self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value.numpy()[rows, :, first:]))
            for value in state.cache
        ]

    def join(self, state: State, other: State) -> None:
        """Appends the rows of ``other``; the shorter of both caches gets masked columns on the left."""
        width = max(state.mask.shape[1], other.mask.shape[1])
        state.mask = np.concatenate([_pad_left(one.mask, 1, width) for one in (state, other)])
        state.cache = [
            self._ort.OrtValue.ortvalue_from_numpy(
                np.concatenate([_pad_left(value.numpy(), 2, width) for value in pair])
            )
            for pair in zip(state.cache, other.cache, strict=True)
        ]

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities along each prompt, read in pieces so that ``SCORE_VALUES`` logits exist at a time.

        Prompts are padded on the right, where no token of theirs looks. Raises ServerError for logits that are
        not finite.
        """
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width + 1), np.int64)  # one more column: nothing follows the last token
        mask = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = 1
        state = State(self._empty_cache(len(prompts)), mask[:, :0])
        given = np.full((len(prompts), width + 1), np.nan, np.float32)
        best = np.zeros((len(prompts), width), np.int64)
        best_log_prob = np.zeros((len(prompts), width), np.float32)
        piece = max(1, SCORE_VALUES // (len(prompts) * self.vocab_size))
        for first in range(0, width, piece):
            part = np.s_[first : min(first + piece, width)]
            state.mask = mask[:, : part.stop]
            positions = np.tile(np.arange(part.start, part.stop), (len(prompts), 1))
            logits = self._run(state, np.ascontiguousarray(ids[:, part]), positions, last=part.stop - part.start)
            for row, values in enumerate(logits):  # a row at a time, so that no second copy of them all is made
                total = _log_sum_exp(values)
                after = ids[row, part.start + 1 : part.stop + 1]
                places = np.arange(len(after))
                best[row, part] = values.argmax(axis=-1)
                best_log_prob[row, part] = values[places, best[row, part]] - total
                given[row, part.start + 1 : part.stop + 1] = values[places, after] - total
        scores = [
            Scores(given[row, : len(prompt)], best[row, : len(prompt)], best_log_prob[row, : len(prompt)])
            for row, prompt in enumerate(prompts)
        ]
        if not all(np.isfinite(one.given[1:]).all() and np.isfinite(one.best_log_prob).all() for one in scores):
            raise ServerError("the logits are not finite", "the engine overflows: try another precision or recipe")
        return scores

    def _empty_cache(self, rows: int) -> list[Any]:
        empty = np.zeros((rows, self._heads, 0, self._head_size), np.float32)
        return [self._ort.OrtValue.ortvalue_from_numpy(empty) for _ in self._cache_names]

    def _run(self, state: State, ids: NDArray[np.int64], positions: NDArray[np.int64], last: int) -> Logits:
        """Logits ``[batch, last, vocabulary]`` after the ``last`` tokens of ``ids``; advances the cache."""
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("position_ids", positions)
        binding.bind_cpu_input("attention_mask", state.mask)
        binding.bind_cpu_input("logit_positions", np.arange(ids.shape[1] - last, ids.shape[1]))
        for name, value in zip(self._cache_names, state.cache, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        logits, *state.cache = binding.get_outputs()
        found: Logits = logits.numpy()
        return found


def _pad_left(values: NDArray[Any], axis: int, width: int) -> NDArray[Any]:
    """``values`` with zeros in front along ``axis``, up to ``width``."""
    pads = [(0, 0)] * values.ndim
    pads[axis] = (width - values.shape[axis], 0)
    return np.pad(values, pads)


def _log_sum_exp(logits: Logits) -> NDArray[np.float64]:
    """Over the last axis, summed in float64."""
    highest = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - highest).sum(axis=-1, dtype=np.float64)
    return np.asarray(np.log(total) + highest[..., 0], dtype=np.float64)
