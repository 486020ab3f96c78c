"""Exports the checkpoint to the plain ONNX graph that every engine is lowered from, with its probe."""

from pathlib import Path

from pipeline.data.sampling import read_calibration
from pipeline.engines.onnx_export import export_plain
from pipeline.files import atomic_folder, write_json
from pipeline.params import load_params
from pipeline.quantize.probe import probe_model
from stages._main import stage


def main() -> None:
    params = load_params()
    import torch
    from transformers import AutoModelForCausalLM

    # Eager attention is plain MatMul and Softmax: every runtime can take it. Float32: each backend casts for itself.
    model = AutoModelForCausalLM.from_pretrained(
        "artifacts/checkpoint",
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=params.model.trust_remote_code,
    ).eval()
    print("exporting to ONNX", flush=True)
    with atomic_folder(Path("artifacts/onnx")) as part:
        probe_model(model, read_calibration(Path("calib_data/calib.jsonl"))).save(part / "probe.npz")
        write_json(part / "cache.json", export_plain(model, part))


if __name__ == "__main__":
    stage(main)
