"""Probes: a few token sequences with the logits that a reference model gives on them.

A backend's engine must give the same logits, within a stated tolerance, before it counts as built: that
separates "the quantisation costs accuracy" from "the engine is not the model that was calibrated".

A quantised model amplifies rounding: an activation on the edge between two integers falls to the other side, and
so on through the layers. How much differs by recipe (KL 0.003 with SmoothQuant, 1.0 with plain maxima, on the
demo's model), so a probe also holds the reference's own noise: its divergence from itself after its inputs moved
by what two float32 runtimes differ in.
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
NUDGE = 1e-5  # relative; float32 sums in another order differ by 1e-7 to 1e-5
STEPS = 6  # the last positions of each sequence: one from the prompt pass, the others from decode steps


@dataclass(frozen=True)
class Probe:
    """``tokens``: sequences of token ids; ``logits``: ``[sequence, step, vocabulary]`` float32, the reference's
    logits at the last ``step`` positions of each sequence; ``noise``: the reference's own noise, mean KL in nats."""

    tokens: list[list[int]]
    logits: NDArray[np.float32]
    noise: float

    def save(self, path: Path) -> None:
        """Writes an ``.npz`` file, atomically."""
        lengths = np.array([len(row) for row in self.tokens], dtype=np.int64)
        flat = np.array([token for row in self.tokens for token in row], dtype=np.int64)
        with atomic_file(path) as part, part.open("wb") as file:
            np.savez(file, lengths=lengths, tokens=flat, logits=self.logits, noise=self.noise)

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Reads what ``save`` wrote."""
        with np.load(path) as data:
            rows = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
            return cls([row.tolist() for row in rows], data["logits"], float(data["noise"]))


def probe_model(model: Any, samples: Sequence[Sequence[int]]) -> Probe:
    """The probe of a torch model: its logits on the first samples that are long enough."""
    import torch

    chosen = [list(sample) for sample in samples if len(sample) > STEPS][:SEQUENCES]
    draw = torch.Generator().manual_seed(0)

    def nudge(_module: Any, _inputs: Any, embedded: Any) -> Any:
        return embedded * (1 + NUDGE * torch.randn(embedded.shape, generator=draw).to(embedded))

    logits = _last_logits(model, chosen)
    hook = model.get_input_embeddings().register_forward_hook(nudge)
    nudged = _last_logits(model, chosen)
    hook.remove()
    return Probe(chosen, logits, agreement(logits, nudged).mean_kl)


def _last_logits(model: Any, samples: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        rows = [
            model(input_ids=torch.tensor([list(sample)], device=model.device), use_cache=False).logits[0, -STEPS:]
            for sample in samples
        ]
    return np.stack([row.float().cpu().numpy() for row in rows])


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
