"""Exports the checkpoint to the plain ONNX graph that engines are lowered from, with its probe.

A backend that starts from something else gets the probe only.
"""

from pathlib import Path

from pipeline.data.sampling import read_calibration
from pipeline.engines import GraphBackend, get_backend
from pipeline.engines.lowering.export import export_plain
from pipeline.files import atomic_folder, write_json
from pipeline.params import load_params
from pipeline.quantize.probe import probe_model
from stages._main import stage


def main() -> None:
    params = load_params()
    backend = get_backend(params.engine.backend)
    dtype = backend.plain_dtype(params.engine)
    import torch
    from transformers import AutoModelForCausalLM

    # Eager attention is plain MatMul and Softmax: every runtime can take it. The probe is in float32 always.
    model = AutoModelForCausalLM.from_pretrained(
        "artifacts/checkpoint",
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=params.model.trust_remote_code,
    ).eval()
    with atomic_folder(Path("artifacts/onnx")) as part:
        probe_model(model, read_calibration(Path("calib_data/calib.jsonl"))).save(part / "probe.npz")
        if dtype is not None:
            print(f"exporting to ONNX in {dtype}", flush=True)
            model = model.to(getattr(torch, dtype))
            if isinstance(backend, GraphBackend):
                cache = backend.export_graph(model, params.engine, part)
            else:
                cache = export_plain(model, part)
            write_json(part / "cache.json", cache)


if __name__ == "__main__":
    stage(main)
