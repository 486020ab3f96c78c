"""An export needs little memory beside the model: the old one took five times its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")
CODE = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from pipeline.engines.lowering.export import export_plain

sizes = dict(vocab_size=64, hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_hidden_layers=4)

def make(**changes):
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes), attn_implementation="eager")).eval()

first = Path(sys.argv[1]) / "first"
first.mkdir()
export_plain(make(hidden_size=64, intermediate_size=64), first)  # what the exporter itself takes
model = make()
weights = sum(parameter.numel() * 4 for parameter in model.parameters())
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
export_plain(model, Path(sys.argv[1]))
print(json.dumps({"weights": weights, "added": peak() - before}))
"""


def test_the_export_adds_little_to_the_model(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 400_000_000
    assert found["added"] < 0.4 * found["weights"]
    assert (tmp_path / "model.onnx.data").stat().st_size >= found["weights"]
