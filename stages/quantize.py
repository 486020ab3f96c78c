"""Calibrates the checkpoint with one recipe: ``python -m stages.quantize RECIPE``.

Writes ``artifacts/quantized/RECIPE/``: the unified Hugging Face export (weights and scales, the single source
that every backend lowers from), ``census.json`` and ``probe.npz``. With ``calib.processes`` above 1 the stage starts
that many of itself with torchrun; under a launcher of your own it takes its place among the ranks. While it runs,
``artifacts/calibration/RECIPE/`` holds what a killed run resumes from.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from pipeline.data.sampling import read_calibration
from pipeline.files import atomic_folder, read_json, write_json
from pipeline.launcher import relaunched
from pipeline.params import Params, load_params
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import Calibration, SearchMemoryError, quantize_model, usual_budget
from pipeline.quantize.census import check_export, refuse_unsound, take_census
from pipeline.quantize.load import check_offload, load_for_calibration
from pipeline.quantize.memory import text_config
from pipeline.quantize.probe import probe_model
from pipeline.quantize.ranks import Ranks, launch
from pipeline.quantize.recipes import Recipe, load_recipe
from pipeline.quantize.resume import Resume
from stages._main import stage

CHECKPOINT = Path("artifacts/checkpoint")
STATE = Path("artifacts/calibration")
OFFLOAD = STATE / "offload"


def main() -> None:
    name = sys.argv[1]
    params, recipe = load_params(), load_recipe(name)
    if relaunched("stages.quantize", name, params=params):
        return
    ranks = Ranks.from_environment(params.calib.wait_s)
    processes = 1 if recipe.algorithm == "awq" else params.calib.process_count(_gpus())
    if ranks.size == 1 and processes > 1:
        launch(processes, ["stages.quantize", name])
        return
    samples = Samples(read_calibration(Path("calib_data/calib.jsonl"))[: recipe.samples])
    # It names the state of a killed run and changes no output; what DVC watches is the checkpoint itself.
    fingerprint = read_json(Path("artifacts/checkpoint.json"))["fingerprints"]["weights"]
    resume = Resume(STATE / name, fingerprint, params.calib.save_every_s)
    model, calibration = _calibrated(params, recipe, samples, resume, ranks)
    if calibration is None:
        return  # not the first rank
    census = take_census(model, recipe, calibration.never_called) | {
        "samples": calibration.samples,
        "tokens": calibration.tokens,
        "device": str(model.device.type),
        "processes": ranks.size,
        "calibration": calibration.facts(),
    }
    counts = f"{census['quantized']} of {census['promised']} promised layers quantised on {census['tokens']} tokens"
    print(f"{name}: {counts}")
    kept = STATE / f"{name}.census.json"  # a run that is refused leaves it, beside its state
    write_json(kept, census)
    refuse_unsound(name, census, kept)

    from modelopt.torch.export import export_hf_checkpoint

    with atomic_folder(Path("artifacts/quantized") / name) as part:
        probe_model(model, [samples[place].tolist() for place in range(len(samples))]).save(part / "probe.npz")
        export_hf_checkpoint(model, export_dir=str(part / "checkpoint"))
        check_export(part / "checkpoint", census)
        write_json(part / "census.json", census)
    resume.clear()
    kept.unlink()
    shutil.rmtree(OFFLOAD, ignore_errors=True)


def _calibrated(
    params: Params, recipe: Recipe, samples: Samples, resume: Resume, ranks: Ranks
) -> tuple[Any, Calibration | None]:
    width = text_config(CHECKPOINT).get("hidden_size") or 4096
    budget = params.calib.batch_tokens or usual_budget(width, samples.tokens, _gpus() > 0)
    while True:
        model = load_for_calibration(
            CHECKPOINT,
            recipe.weights,
            budget,
            device_map=params.calib.device_map,
            local=ranks.local,
            processes_here=ranks.here,
            trust_remote_code=params.model.trust_remote_code,
            offload=OFFLOAD if params.calib.device_map else None,
        )
        try:
            check_offload(model, recipe)
            recipe.check_patterns(name for name, _ in model.named_modules())
            return model, quantize_model(model, recipe, samples, budget, resume=resume, ranks=ranks)
        except SearchMemoryError as error:
            if budget <= max(samples.lengths):
                raise
            budget = max(int(max(samples.lengths)), error.size // 2)
            print(f"{error.message}: starting again with {budget} tokens a batch")
        del model  # before it is loaded again


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count())


if __name__ == "__main__":
    stage(main)
