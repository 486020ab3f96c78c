"""An executor whose next token depends on the whole row, so that mixed-up rows show; and a byte tokenizer."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

from pipeline.engines.scheduler import Scores

VOCABULARY = 256
EOS = 0


def next_token(ids: list[int]) -> int:
    """The model: any sequence has one continuation; about one token in sixteen is the end token."""
    value = zlib.crc32(bytes(ids))
    return EOS if value % 16 == 0 else value % VOCABULARY


def continuation(prompt: list[int], max_tokens: int, stops: frozenset[int]) -> tuple[list[int], str]:
    """What one request alone must give: its tokens with the stop token, and the finish reason."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
        if ids[-1] in stops:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


class FakeExecutor:
    """Counts its calls; ``fail_at`` makes that decode step raise, ``nan_at`` gives NaN logits."""

    def __init__(self, max_batch: int = 4, max_tokens: int = 128, step_s: float = 0.0) -> None:
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self.vocab_size = VOCABULARY
        self.step_s = step_s
        self.fail_at: int | None = None
        self.nan_at: int | None = None
        self.steps = 0
        self.batches: list[list[int]] = []  # prompt lengths of each batch
        self.widths: list[int] = []  # rows of each decode step

    def prefill(self, prompts: list[list[int]]) -> tuple[list[list[int]], np.ndarray]:
        assert 1 <= len(prompts) <= self.max_batch
        self.batches.append([len(prompt) for prompt in prompts])
        state = [list(prompt) for prompt in prompts]
        return state, self._logits(state)

    def decode(self, state: list[list[int]], tokens: np.ndarray) -> np.ndarray:
        self.steps += 1
        self.widths.append(len(state))
        time.sleep(self.step_s)
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("out of memory")
        for row, token in zip(state, tokens.tolist(), strict=True):
            row.append(token)
        return self._logits(state)

    def keep(self, state: list[list[int]], rows: np.ndarray) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def join(self, state: list[list[int]], other: list[list[int]]) -> None:
        state += other
        assert len(state) <= self.max_batch

    def _logits(self, state: list[list[int]]) -> np.ndarray:
        logits = np.zeros((len(state), VOCABULARY), dtype=np.float32)
        for place, row in enumerate(state):
            logits[place, next_token(row)] = 1
        if self.nan_at is not None and self.steps >= self.nan_at:
            logits[-1] = np.nan
        return logits


class ScoringExecutor(FakeExecutor):
    """Also scores: token ``t`` has log-probability ``-t / 100``, and the likeliest is the model's next token."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        assert 1 <= len(prompts) <= self.max_batch
        self.batches.append([-len(prompt) for prompt in prompts])  # negative: these are scored
        if self.fail_at is not None:
            raise RuntimeError("out of memory")
        return [self._scores(prompt) for prompt in prompts]

    @staticmethod
    def _scores(prompt: list[int]) -> Scores:
        given = np.array([np.nan, *(-token / 100 for token in prompt[1:])], dtype=np.float32)
        best = np.array([next_token(prompt[: place + 1]) for place in range(len(prompt))])
        return Scores(given, best, np.asarray(-best / 100, dtype=np.float32))


class ByteTokenizer:
    """One id a byte: a character of several bytes is spread over several tokens."""

    eos_token_id = EOS

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        del add_special_tokens
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_options: Any) -> str:
        return bytes(token for token in ids if token != EOS).decode(errors="replace")
