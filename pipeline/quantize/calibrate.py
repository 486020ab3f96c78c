"""Post-training quantisation with NVIDIA ModelOpt over our own forward loop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.quantize.batches import equal_length_batches
from pipeline.quantize.recipes import Recipe


def quantize_model(model: Any, recipe: Recipe, samples: Sequence[Sequence[int]], batch_tokens: int) -> int:
    """Calibrates ``model`` in place on ``samples`` (token ids) and returns the number of tokens seen.

    Raises QuantizationError when the recipe matches no layer.

    The logits head is skipped where the recipe leaves it alone (all built-in ones do): it would be a third
    of the time and most of the memory of a small model.
    """
    import modelopt.torch.quantization as mtq
    import torch
    from tqdm import tqdm

    tokens = sum(map(len, samples))
    device = next(model.parameters()).device
    passes = 0

    def forward_loop(quantized: Any) -> None:
        nonlocal passes
        passes += 1
        body = quantized.base_model
        with (
            torch.inference_mode(),
            tqdm(total=tokens, unit="tok", desc=f"calibrating (pass {passes})", mininterval=2) as bar,
        ):
            for batch in equal_length_batches(samples, batch_tokens):
                ids = torch.tensor([list(sample) for sample in batch], device=device)
                body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
                bar.update(ids.numel())

    model.eval()
    # One warning for each layer that the recipe leaves out; the census lists them.
    warnings.filterwarnings("ignore", message=".*is not calibrated, skip smoothing")
    try:
        mtq.quantize(model, recipe.modelopt_config(), forward_loop)
    except RuntimeError as error:
        if "nothing would be quantized" not in str(error):
            raise
        raise QuantizationError(
            f"the recipe ({recipe.description}) matches no layer of {type(model).__name__}",
            "correct its `exclude`; `enginegate recipes` shows each recipe",
        ) from error
    return tokens
