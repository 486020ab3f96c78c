"""The scripts of ``benchmarks/gpu``, in small: their graphs are right, and they fit together over a fake TensorRT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import decode, engines, graphs, greedy
from pipeline.engines.tensorrt import device
from tests.unit.engines.tensorrt.fake_tensorrt import make_tensorrt


def call(module: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT 8.6.0, without a GPU."""
    trt = make_tensorrt("8.6.0")
    for name, module in (("tensorrt", trt), ("tensorrt_rtx", None), ("tensorrt_rtx_bindings", None)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(device, "Device", lambda: trt.device)
    monkeypatch.setattr(engines, "Device", lambda: trt.device)


@pytest.mark.parametrize(
    "words",
    [
        ("fp16",),
        ("int8",),
        ("int8", "--join", "--cut", "o_proj:2", "down_proj:4"),
        ("int8", "--join", "--convolve"),
        ("fp16", "--join", "--convolve"),
    ],
)
def test_a_made_up_model_is_whole_and_each_layer_has_weights_of_its_own(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx
    import onnxruntime as ort

    sizes = {"vocab_size": 160, "hidden_size": 1024, "intermediate_size": 1280, "num_attention_heads": 8}
    monkeypatch.setattr(graphs, "LLAMA_7B", {**sizes, "max_position_embeddings": 32})
    monkeypatch.setattr(graphs, "RANDOM_VALUES", 2**23)
    target = tmp_path / "graph"
    call(graphs, monkeypatch, target, "--layers", 2, "--capacity", 16, "--precision", *words)
    model = onnx.load(str(target / "model.onnx"), load_external_data=False)
    large = [tensor for tensor in model.graph.initializer if len(tensor.dims) > 1 and "embed" not in tensor.name]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in large]
    mine = [place for place in places if "random" in place["location"]]
    assert len(mine) == (8 if "--join" in words else 14)
    if "--join" not in words:
        assert len({place["offset"] for place in mine}) == 14
    names = [node.name for node in model.graph.node if node.op_type in ("MatMul", "Conv") and "_proj" in node.name]
    assert ("model.layers.1.mlp.gate_proj+up_proj" in names) == ("--join" in words)
    shape = json.loads((target / "cache.json").read_text())
    past = np.zeros((1, shape["kv_heads"], 4, shape["head_size"]), np.float32)
    feeds = {"input_ids": [[5, 6]], "past_lengths": [0], "logit_rows": [1]}
    inputs: dict[str, Any] = {name: np.array(value, np.int32) for name, value in feeds.items()}
    inputs |= {f"past_{part}.{layer}": past for layer in range(2) for part in ("keys", "values")}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # its INT8 kernels take no cut weight
    (logits,) = ort.InferenceSession(str(target / "model.onnx"), options).run(["logits"], inputs)
    assert logits.shape == (1, 160)
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_from_a_checkpoint_to_times_and_tokens(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[5, 6, 7], [8, 9, 10, 11], [12]]))
    graph, engine, tokens = tmp_path / "graph", tmp_path / "engine", tmp_path / "tokens.json"
    call(graphs, monkeypatch, graph, "--model", tiny_checkpoint, "--precision", "fp16", "--capacity", 32)
    call(engines, monkeypatch, "build", graph, engine, "--batches", 1, 4)
    call(engines, monkeypatch, "seal", engine, "--tokenizer", tiny_checkpoint)
    call(greedy, monkeypatch, tiny_checkpoint, prompts, tokens, "--dtype", "float32", "--count", 8)
    call(decode, monkeypatch, engine, "--batches", 1, 3, "--prompt", 6, "--answer", 20, "--tokens", tokens)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["step_ms"]) == {"1", "3"}
    assert json.loads((engine / "manifest.json").read_text())["limits"] == {
        "max_batch": 4,
        "max_tokens": 32,
        "threads": 1,
    }
    assert (engine / "tokenizer" / "tokenizer.json").exists()
    assert all(times["median"] > 0 for times in found["step_ms"].values())
    # A fake float16 engine on a model whose weights are random: near-ties are where it may leave torch's path.
    for way in ("alone", "together"):
        assert found["tokens"][way]["of"] == 3 * 8
        assert all(place["gap"] < 0.01 for place in found["tokens"][way]["first"])


def test_an_engine_for_steps_alone_reads_its_prompts_token_by_token(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch)
    graph, engine = tmp_path / "graph", tmp_path / "engine"
    call(graphs, monkeypatch, graph, "--model", tiny_checkpoint, "--precision", "fp16", "--capacity", 32)
    call(engines, monkeypatch, "build", graph, engine, "--batches", 1, 4, "--steps-only", "--cublas")
    call(engines, monkeypatch, "seal", engine)
    profiles = json.loads((engine / "engine.json").read_text())["profiles"]
    assert [profile["name"] for profile in profiles] == ["decode_1", "decode_4"]
    call(decode, monkeypatch, engine, "--batches", 1, 4, "--prompt", 6, "--answer", 20)
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["step_ms"]) == {"1", "4"}
