"""The census: which layers a recipe promised, which were quantised, and whether each scale makes sense.

A wildcard that matched nothing, a branch that calibration never reached or a NaN scale gives an engine that is
wrong without an error. The gate reads the census and says INVALID.
"""

from __future__ import annotations

from typing import Any

from pipeline.quantize.recipes import Recipe


def take_census(model: Any, recipe: Recipe) -> dict[str, Any]:
    """Counts of a calibrated model, as JSON.

    ``promised``: linear layers that the recipe names. ``quantized``: linear layers whose weight and input
    quantizers are on. ``skipped``: the other linear layers. ``unexpected``: quantised although the recipe
    leaves them out, or the reverse. ``bad``: quantizers whose amax is missing (never called), zero, NaN or
    infinite. ``layers``: for each quantised layer the largest weight amax, the input amax, and SmoothQuant's
    largest pre-scale.
    """
    import torch

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    quantized = {name: module for name, module in linear if _enabled(module)}
    promised = [name for name, _ in linear if recipe.promises(name)]
    bad = []
    layers = []
    for name, module in quantized.items():
        row: dict[str, Any] = {"layer": name}
        for kind in ("weight", "input"):
            quantizer = getattr(module, f"{kind}_quantizer")
            amax = getattr(quantizer, "amax", None)
            problem = _problem(amax)
            if problem or amax is None:
                bad.append(f"{name}.{kind}_quantizer: {problem}")
            else:
                row[f"{kind}_amax"] = float(amax.max())
        scale = getattr(module.input_quantizer, "pre_quant_scale", None)
        if scale is not None:
            row["pre_quant_scale_max"] = float(scale.max())
        layers.append(row)
    return {
        "promised": len(promised),
        "quantized": len(quantized),
        "skipped": [name for name, _ in linear if name not in quantized],
        "unexpected": sorted(set(promised) ^ set(quantized)),
        "bad": bad,
        "layers": layers,
    }


def _enabled(module: Any) -> bool:
    quantizers = [getattr(module, f"{kind}_quantizer", None) for kind in ("weight", "input")]
    return all(quantizer is not None and quantizer.is_enabled for quantizer in quantizers)


def _problem(amax: Any) -> str | None:
    import torch

    if amax is None:
        return "never called in calibration"
    if not bool(torch.isfinite(amax).all()):
        return "NaN or infinite"
    # A channel of zeros is harmless for a weight of many channels; a scale that is zero everywhere is not.
    if float(amax.max()) <= 0:
        return "zero"
    return None
