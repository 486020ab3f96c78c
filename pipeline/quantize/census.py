"""The census: which layers a recipe promised, which were quantised, and whether each scale makes sense.

A wildcard that matched nothing, a branch that calibration never reached or a NaN scale gives an engine that is
wrong without an error. The gate reads the census and says INVALID.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.quantize.recipes import Recipe

OUTLIER = 10.0  # times the median of the layers of the same kind
CHANNEL_OUTLIER = 100.0  # the largest channel's range in medians of all channels


def take_census(model: Any, recipe: Recipe, never_called: Sequence[str] = ()) -> dict[str, Any]:
    """Counts of a calibrated model, as JSON.

    ``promised``: layers (linear, and fused experts) that the recipe names. ``quantized``: those whose quantizers are
    on. ``skipped``: the other modules with a matrix of weights, each with ``why``. ``unexpected``: quantised although
    the recipe leaves them out, or the reverse. ``bad``: quantizers whose amax is missing, zero, NaN or infinite, or
    that no sample reached (``never_called``), and a KV cache that was promised scales and has none. ``layers``: for
    each quantised layer the largest weight amax, the input amax, SmoothQuant's or AWQ's largest pre-scale, and the
    largest input channel in medians of all channels. ``kv``: the same for keys and values. ``outliers``: layers far
    from others of their kind; they decide nothing, they say where to look.
    """
    import torch

    matrices = {name: module for name, module in model.named_modules() if _has_matrix(module)}
    layers = {
        name: module
        for name, module in matrices.items()
        if isinstance(module, torch.nn.Linear) or _quantizers(module, "weight")
    }
    layers = {name: module for name, module in layers.items() if not isinstance(module, torch.nn.Embedding)}
    quantized = {name: module for name, module in layers.items() if _is_quantized(module, recipe)}
    promised = [name for name in layers if recipe.promises(name)]
    bad = [f"{name}: never called in calibration" for name in never_called]
    rows = [_row(name, module, bad) for name, module in quantized.items()]
    kv = _kv_rows(model, bad)
    if recipe.kv_cache != "none" and not kv:
        bad.append(f"KV cache: the recipe promises {recipe.kv_cache}, no attention layer has a quantizer for it")
    return {
        "promised": len(promised),
        "quantized": len(quantized),
        "skipped": [
            {"layer": name, "why": _why(name, module, layers, recipe)}
            for name, module in matrices.items()
            if name not in quantized
        ],
        "unexpected": sorted(set(promised) ^ set(quantized)),
        "bad": sorted(set(bad)),
        "never_called": list(never_called),
        "layers": rows,
        "kv": kv,
        "outliers": _outliers(rows),
    }


def refuse_unsound(name: str, census: dict[str, Any], kept: Path) -> None:
    """Raises QuantizationError when the recipe's promise is not kept or a scale is unusable; ``kept`` holds it all."""
    if census["bad"]:
        raise QuantizationError(
            f"recipe {name}: {len(census['bad'])} quantizers have no usable scale, first {census['bad'][0]}",
            f"all are in {kept}; exclude the layer in recipes/{name}.yaml or calibrate on data that reaches it",
        )
    if census["unexpected"] or not census["quantized"]:
        first = (census["unexpected"] or ["no layer at all"])[0]
        raise QuantizationError(
            f"recipe {name}: {census['quantized']} of {census['promised']} promised layers are quantised, first "
            f"difference {first}",
            f"all are in {kept}; say in recipes/{name}.yaml what is to be quantised",
        )


def check_export(folder: Path, census: dict[str, Any]) -> None:
    """Compares the scales in an exported checkpoint with the census.

    Raises QuantizationError when a quantised layer or the KV cache has no scale in the files: a reader would take 1.0.
    """
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            names.update(file.keys())
    wanted = [(row["layer"], "weight_scale") for row in census["layers"]]
    wanted += [(row["layer"], "input_scale") for row in census["layers"] if "input_amax" in row]
    wanted += [(row["layer"], kind) for row in census["kv"] for kind in ("k_scale", "v_scale")]
    missing = [f"{layer} {kind}" for layer, kind in wanted if not _exported(layer, kind, names)]
    if missing:
        raise QuantizationError(
            f"{folder}: {len(missing)} scales are missing from the export, first {missing[0]}",
            "this version of ModelOpt does not export this recipe for this architecture; use another recipe",
        )


def _exported(layer: str, kind: str, names: set[str]) -> bool:
    return any(name.startswith(f"{layer}.") and name.endswith(kind) for name in names)


def _has_matrix(module: Any) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def _quantizers(module: Any, kind: str) -> list[tuple[str, Any]]:
    """The quantizers of a module's weights or inputs, enabled or not; fused experts have several of each."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, TensorQuantizer)
        and name.split(".")[0].endswith((f"{kind}_quantizer", f"{kind}_quantizers"))
    ]


def _is_quantized(module: Any, recipe: Recipe) -> bool:
    kinds = ("weight", "input") if recipe.activations != "none" else ("weight",)
    found = [_quantizers(module, kind) for kind in kinds]
    return all(found) and all(quantizer.is_enabled for kind in found for _, quantizer in kind)


def _why(name: str, module: Any, layers: dict[str, Any], recipe: Recipe) -> str:
    if name not in layers:
        return f"not a linear layer ({type(module).__name__.removeprefix('Quant')})"
    return recipe.why_left_out(name) or "promised, and yet not quantised"


def _row(layer: str, module: Any, bad: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": layer}
    for kind in ("weight", "input"):
        found = []
        for name, quantizer in _quantizers(module, kind):
            if not quantizer.is_enabled:
                continue
            amax = getattr(quantizer, "amax", None)
            problem = _problem(amax)
            if problem or amax is None:
                bad.append(f"{layer}.{name}: {problem}")
            else:
                found.append(float(amax.max()))
        if found:
            row[f"{kind}_amax"] = max(found)
    quantizer = getattr(module, "input_quantizer", None)
    scale = getattr(quantizer, "pre_quant_scale", None)
    if scale is not None:
        row["pre_quant_scale_max"] = float(scale.max())
    channels = getattr(quantizer, "_amax_for_smoothing", None)
    if channels is not None and float(channels.float().median()) > 0:
        row["channel_ratio"] = float(channels.float().max() / channels.float().median())
    return row


def _kv_rows(model: Any, bad: list[str]) -> list[dict[str, Any]]:
    rows = []
    for layer, module in model.named_modules():
        row: dict[str, Any] = {"layer": layer}
        for kind in ("k", "v"):
            quantizer = getattr(module, f"{kind}_bmm_quantizer", None)
            if quantizer is None or not quantizer.is_enabled:
                continue
            problem = _problem(quantizer.amax)
            if problem:
                bad.append(f"{layer}.{kind}_bmm_quantizer: {problem}")
            row[f"{kind}_amax"] = None if problem else float(quantizer.amax.max())
        if len(row) > 1:
            rows.append(row)
    return rows


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


def _outliers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for key, what in (("input_amax", "input range against its kind"), ("weight_amax", "weight range against its kind")):
        kinds: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if key in row:
                kinds[row["layer"].rpartition(".")[2]].append(row[key])
        usual = {kind: statistics.median(values) for kind, values in kinds.items()}
        for row in rows:
            middle = usual.get(row["layer"].rpartition(".")[2], 0.0)
            if middle > 0 and row.get(key, 0.0) > OUTLIER * middle:
                found.append({"layer": row["layer"], "what": what, "times": row[key] / middle})
    for row in rows:
        if row.get("channel_ratio", 0.0) > CHANNEL_OUTLIER:
            what = "largest input channel against the median"
            found.append({"layer": row["layer"], "what": what, "times": row["channel_ratio"]})
    return sorted(found, key=lambda row: -row["times"])
