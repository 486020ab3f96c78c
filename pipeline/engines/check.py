"""An engine counts as built only when it gives the logits of the model that it was built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import BuildError
from pipeline.quantize.probe import STEPS, Agreement, Probe, agreement

if TYPE_CHECKING:
    from pipeline.engines.scheduler import Executor

# Mean KL in nats by the kind of quantisation and the type of the rest, and how many times the probe's own noise where
# that is more. The noise is that of float32; float16 rounds harder. Measured on SmolLM2-135M in float16 (4 sequences):
# none 3e-5; int8_mixed 0.003, int8_sq 0.014, int8_max 1.7, which is 0.9, 1.7 and 2.1 times the noise.
TOLERANCE = {
    "float32": {"int8": 0.02, "fp8": 0.1, "none": 1e-4},
    "float16": {"int8": 0.02, "fp8": 0.1, "none": 1e-3},
}
NOISES = {"float32": 2, "float16": 4}


def check_engine(executor: Executor, probe: Probe, kind: str, rest: str = "float32") -> Agreement:
    """Compares an engine with its probe: the prompt pass and cached decode steps.

    ``kind`` is the recipe's number format (``none`` without quantisation), ``rest`` the type of what is not quantised.
    Raises BuildError beyond tolerance, and for a probe of which no sequence fits into the engine.
    """
    fits = [row for row, tokens in enumerate(probe.tokens) if len(tokens) <= executor.max_tokens]
    if not fits:
        raise BuildError(
            f"every probed sequence is longer than the engine's {executor.max_tokens} tokens",
            "raise engine.max_tokens, or lower calib.max_tokens",
        )
    found = agreement(probe.logits[fits], forced_logits(executor, [probe.tokens[row] for row in fits]))
    tolerance = max(TOLERANCE[rest][kind], NOISES[rest] * probe.noise)
    if not found.mean_kl <= tolerance:
        raise BuildError(
            f"the engine is not the model it was built from: mean KL {found.mean_kl:.4f} nats on the probe "
            f"(tolerance {tolerance:.4f}), same top token at {found.top1:.0%}",
            "report this with the recipe and the model's architecture: the lowering is wrong for it",
        )
    return found


def forced_logits(executor: Executor, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The engine's logits ``[sequence, step, vocabulary]`` at the last ``STEPS`` places, the tokens forced."""
    size = executor.max_batch
    return np.concatenate([_forced(executor, sequences[at : at + size]) for at in range(0, len(sequences), size)])


def _forced(executor: Executor, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The same of one batch. (Its state is gone at the end, which frees its rows.)"""
    tails = np.array([list(tokens[len(tokens) - STEPS + 1 :]) for tokens in sequences], dtype=np.int64)
    state, logits = executor.prefill([list(tokens[: len(tokens) - STEPS + 1]) for tokens in sequences])
    steps = [logits]
    for place in range(STEPS - 1):
        steps.append(executor.decode(state, tails[:, place]))
    return np.stack(steps, axis=1)
