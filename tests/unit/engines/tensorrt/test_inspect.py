"""What ``enginegate show`` says about a TensorRT engine: from engine.json, and from a (fake) GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.engines.manifest import write_manifest
from pipeline.engines.tensorrt import device
from pipeline.engines.tensorrt.builder import Settings, build_plan
from pipeline.engines.tensorrt.graph import export_decoder
from pipeline.engines.tensorrt.inspect import LayerRow, rows_of
from pipeline.engines.tensorrt.library import load_library
from pipeline.files import read_json
from tests.families import make_model
from tests.unit.engines.tensorrt.test_plan import MANIFEST


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("graph")
    return folder / "model.onnx", export_decoder(make_model("llama").half(), folder, capacity=64)


@pytest.fixture
def engine(graph: tuple[Path, dict[str, int]], tmp_path: Path, install: Callable[..., Any]) -> Path:
    """An engine of the fake TensorRT 10.9.0 for SM 90."""
    trt = install("10.9.0")
    settings = Settings(max_batch=4, max_tokens=64, sm=("90",), buckets=(1,), workspace_gib=1.5, progress=False)
    build_plan(load_library(), graph[0], tmp_path, graph[1], settings).description.write(tmp_path)
    write_manifest(tmp_path, MANIFEST | {"limits": {"max_batch": 4, "max_tokens": 64, "threads": 0}})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(device, "Device", lambda: trt.device)
        trt.device.close = lambda: None
        yield tmp_path


def test_without_a_gpu(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(engine)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tensorrt 10.9.0, for SM 90" in text
    assert "prefill batch 1, 1, 4 new 1, 64, 64 kept 1, 1, 64 capacity 1, 1, 64" in text
    assert "decode_4 batch 2, 4, 4 new 1, 1, 1 kept 2, 4, 4 capacity 1, 32, 64" in text
    assert "input_ids in int32 batchxnew" in text
    assert "past_keys.0-1 in float16 batchx2xcapacityx16" in text
    assert "logits out float16 keptx96" in text
    assert "matrix_multiply float16" in text


def test_as_json(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(engine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensorrt"] == read_json(engine / "engine.json")
    assert found["digest"] == read_json(engine / "manifest.json")["digest"]


def test_trtexec(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(engine), "--trtexec"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:4] == ["trtexec", "--onnx=model.onnx", "--saveEngine=model.plan", "--skipInference"]
    assert {"--stronglyTyped", "--builderOptimizationLevel=3", "--memPoolSize=workspace:1536"} <= set(words)
    last = words[words.index("--profile=2") :]
    assert last[1].startswith("--minShapes=input_ids:2x1,")
    assert ",past_lengths:2," in last[1]
    assert last[3].endswith(",past_values.1:4x2x64x16")


@pytest.mark.parametrize(
    ("version", "sms", "sm", "expected"),
    [
        ("8.6.0", (), "90", ["trtexec", "--fp16", "--precisionConstraints=prefer"]),
        ("1.7.1", (89, 120), "89", ["tensorrt_rtx", "--computeCapabilities=89"]),
    ],
)
def test_trtexec_of_other_libraries(  # noqa: PLR0917
    graph: tuple[Path, dict[str, int]],
    tmp_path: Path,
    install: Callable[..., Any],
    version: str,
    sms: Any,
    sm: str,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(version, sms=sms)
    settings = Settings(max_batch=1, max_tokens=64, sm=(sm,), progress=False)
    build_plan(load_library(), graph[0], tmp_path, graph[1], settings).description.write(tmp_path)
    write_manifest(tmp_path, MANIFEST)
    assert main(["show", str(tmp_path), "--trtexec"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == expected[0]
    assert set(expected) <= set(words)
    assert "--stronglyTyped" not in words


def test_layers_on_the_gpu(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(engine), "--layers"]) == 0
    text = capsys.readouterr().out
    assert "2 layers, 0.750 ms" in text
    slowest = [line.split() for line in text.splitlines() if line.startswith("    softmax")]
    assert slowest == [["softmax", "SoftMax", "Half", "0.5000"]]
    assert "up_proj + gate_proj  gemm     Int8       sm90_xmma_gemm_i8f16_i8i32  0.2500" in text
    assert text.index("softmax") < text.index("up_proj + gate_proj")
    assert main(["show", str(engine), "--layers", "decode_4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine_layers"][0]["tactic"] == "sm90_xmma_gemm_i8f16_i8i32"


def test_what_it_cannot_show(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(engine), "--layers", "decode_3"]) == 64
    assert "no profile 'decode_3'" in (said := capsys.readouterr().err)
    assert "name one of: prefill, decode_1, decode_4" in said
    other = tmp_path / "other"
    other.mkdir()
    write_manifest(other, MANIFEST | {"backend": "onnxruntime"})
    assert main(["show", str(other), "--layers"]) == 64
    assert "no engine of TensorRT" in capsys.readouterr().err
    (engine / "model.plan").write_bytes(b"exchanged")
    assert main(["show", str(engine), "--layers"]) == 65
    assert "the manifest says" in capsys.readouterr().err


def test_the_inspectors_words() -> None:
    """TensorRT 8.6 and 10 say types in different words; an engine without details has only names."""
    layers = [
        {"Name": "a", "LayerType": "CaskGemm", "Outputs": [{"Format/Datatype": "Row major linear FP16 format"}]},
        {"Name": "b", "ParameterType": "Myelin", "Inputs": [{"Format/Datatype": "Row major Int8 format"}]},
        {"Name": "c", "LayerType": "kgen", "Outputs": [{"Format/Datatype": "FP8"}], "TacticValue": "0x1f"},
        "named only",
    ]
    assert rows_of(layers, {"b": 1.5, "named only": 2.0}) == [
        LayerRow("a", "CaskGemm", "FP16", "", 0.0),
        LayerRow("b", "Myelin", "Int8", "", 1.5),
        LayerRow("c", "kgen", "FP8", "0x1f", 0.0),
        LayerRow("named only", "", "", "", 2.0),
    ]
