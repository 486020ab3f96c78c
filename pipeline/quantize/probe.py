"""Probes: a few token sequences with the logits that a reference model gives on them.

A backend's engine must give the same logits, within a stated tolerance, before it counts as built: that
separates "the quantisation costs accuracy" from "the engine is not the model that was calibrated".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_file

SEQUENCES = 8
STEPS = 6  # the last positions of each sequence: one from the prompt pass, the others from decode steps


@dataclass(frozen=True)
class Probe:
    """``tokens``: sequences of token ids; ``logits``: ``[sequence, step, vocabulary]`` float32, the reference's
    logits at the last ``step`` positions of each sequence."""

    tokens: list[list[int]]
    logits: NDArray[np.float32]

    def save(self, path: Path) -> None:
        """Writes an ``.npz`` file, atomically."""
        lengths = np.array([len(row) for row in self.tokens], dtype=np.int64)
        flat = np.array([token for row in self.tokens for token in row], dtype=np.int64)
        with atomic_file(path) as part, part.open("wb") as file:
            np.savez(file, lengths=lengths, tokens=flat, logits=self.logits)

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Reads what ``save`` wrote."""
        with np.load(path) as data:
            rows = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
            return cls([row.tolist() for row in rows], data["logits"])


def probe_model(model: Any, samples: Sequence[Sequence[int]]) -> Probe:
    """The probe of a torch model: its logits on the first samples that are long enough."""
    import torch

    chosen = [list(sample) for sample in samples if len(sample) > STEPS][:SEQUENCES]
    logits = []
    with torch.inference_mode():
        for sample in chosen:
            ids = torch.tensor([sample], device=model.device)
            logits.append(model(input_ids=ids, use_cache=False).logits[0, -STEPS:].float().cpu().numpy())
    return Probe(chosen, np.stack(logits))


@dataclass(frozen=True)
class Agreement:
    """How close an engine is to the reference: mean and largest KL divergence in nats over all probed
    positions, and the share of positions where the most likely token is the same."""

    mean_kl: float
    max_kl: float
    top1: float


def agreement(reference: NDArray[np.float32], engine: NDArray[np.float32]) -> Agreement:
    """Compares logits of equal shape ``[..., vocabulary]``; KL is of the reference from the engine."""
    p, q = _log_softmax(reference), _log_softmax(engine)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    same = reference.argmax(axis=-1) == engine.argmax(axis=-1)
    return Agreement(float(kl.mean()), float(kl.max()), float(same.mean()))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    from scipy.special import log_softmax

    result: NDArray[np.float64] = log_softmax(logits.astype(np.float64), axis=-1)
    return result
