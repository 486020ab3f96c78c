"""An engine counts as built only when it gives the logits of the model that it was built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import BuildError
from pipeline.quantize.probe import STEPS, Agreement, Probe, agreement

if TYPE_CHECKING:
    from pipeline.engines.scheduler import Executor

# Mean KL in nats, or twice the reference's own noise where that is more.
TOLERANCE = {"int8": 0.02, "fp8": 0.1, "none": 1e-4}


def check_engine(executor: Executor, probe: Probe, kind: str) -> Agreement:
    """Compares an engine with its probe: the prompt pass and cached decode steps, in one batch.

    ``kind`` is the recipe's number format (``none`` without quantisation). Raises BuildError beyond tolerance.
    """
    found = agreement(probe.logits, forced_logits(executor, probe))
    tolerance = max(TOLERANCE[kind], 2 * probe.noise)
    if not found.mean_kl <= tolerance:
        raise BuildError(
            f"the engine is not the model it was built from: mean KL {found.mean_kl:.4f} nats on the probe "
            f"(tolerance {tolerance:.4f}), same top token at {found.top1:.0%}",
            "report this with the recipe and the model's architecture: the lowering is wrong for it",
        )
    return found


def forced_logits(executor: Executor, probe: Probe) -> NDArray[np.float32]:
    """The engine's logits ``[sequence, step, vocabulary]`` at the probe's positions, its tokens forced."""
    prompts = [tokens[: len(tokens) - STEPS + 1] for tokens in probe.tokens]
    tails = np.array([tokens[len(tokens) - STEPS + 1 :] for tokens in probe.tokens], dtype=np.int64)
    state, logits = executor.prefill(prompts)
    steps = [logits]
    for place in range(STEPS - 1):
        steps.append(executor.decode(state, tails[:, place]))
    return np.stack(steps, axis=1)
