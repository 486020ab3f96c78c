"""Calibrates the checkpoint with one recipe: ``python -m stages.quantize RECIPE``.

Writes ``artifacts/quantized/RECIPE/``: the unified Hugging Face export (weights and scales, the single source
that every backend lowers from), ``census.json`` and ``probe.npz``.
"""

import sys
from pathlib import Path

from pipeline.data.sampling import read_calibration
from pipeline.errors import QuantizationError
from pipeline.files import atomic_folder, write_json
from pipeline.params import load_params
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.census import take_census
from pipeline.quantize.probe import probe_model
from pipeline.quantize.recipes import load_recipe
from stages._main import stage

CHECKPOINT = Path("artifacts/checkpoint")


def main() -> None:
    name = sys.argv[1]
    params, recipe = load_params(), load_recipe(name)
    samples = read_calibration(Path("calib_data/calib.jsonl"))

    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT,
        dtype="auto" if device == "cuda" else torch.float32,
        trust_remote_code=params.model.trust_remote_code,
    ).to(device)
    tokens = quantize_model(model, recipe, samples, params.calib.batch_tokens)
    census = take_census(model, recipe)
    print(f"{name}: {census['quantized']} of {census['promised']} promised layers quantised on {tokens} tokens")
    if census["bad"]:
        raise QuantizationError(
            f"recipe {name}: {len(census['bad'])} quantizers have no usable scale, first {census['bad'][0]}",
            f"exclude the layer in recipes/{name}.yaml or calibrate on data that reaches it",
        )
    with atomic_folder(Path("artifacts/quantized") / name) as part:
        probe_model(model, samples).save(part / "probe.npz")
        export_hf_checkpoint(model, export_dir=str(part / "checkpoint"))
        write_json(part / "census.json", census | {"samples": len(samples), "tokens": tokens, "device": device})


if __name__ == "__main__":
    stage(main)
