"""Engines compiled ahead of time, without a GPU: the real stages, ModelOpt and TensorRT for RTX, on the tiny model.

A graph that TensorRT refuses fails here. What such an engine computes is not seen without a GPU: its graph was compared
with torch and ModelOpt elsewhere (``tests/unit/engines/lowering``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import main as cli
from pipeline.engines import load_executor
from pipeline.engines.manifest import verify_files
from pipeline.engines.tensorrt.plan import PLAN, read_description
from pipeline.errors import BuildError
from stages import platform
from tests.func.workspace import make_workspace, run_stages

pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT for RTX: pip install 'enginegate[tensorrt-rtx]'")

PARAMS = """\
recipes: [int8_sq, fp8_kv]
calib: {batch_tokens: 64, max_tokens: 64}
eval: {max_new_tokens: 16}
engine:
  backend: tensorrt
  max_batch: 4
  max_tokens: 64
  tensorrt: {sm: [89], decode_batches: [1]}
"""


@pytest.fixture(scope="module")
def workspace(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything up to the engines ``runtime``, ``int8_sq`` and ``fp8_kv`` for SM 89."""
    root = tmp_path_factory.mktemp("ahead")
    make_workspace(root, tiny_checkpoint, PARAMS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(root)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        platform.main()
        run_stages(monkeypatch, ("int8_sq", "fp8_kv"))
        yield root


@pytest.mark.parametrize(
    ("name", "dtype", "quantized"), [("runtime", "float16", 0), ("int8_sq", "int8", 14), ("fp8_kv", "fp8", 14)]
)
def test_an_engine(workspace: Path, name: str, dtype: str, quantized: int) -> None:
    folder = workspace / "engines" / name
    manifest = verify_files(folder)
    assert manifest["dtype"].startswith(dtype)
    assert manifest["platform"]["sm"] == "89"
    assert manifest["platform"]["gpu"] is None
    assert manifest["build"]["quantized_matmuls"] == quantized
    assert manifest["build"]["unchecked"] == "compiled ahead of time for SM 89"
    assert "probe" not in manifest["build"]
    assert set(manifest["files"]) >= {PLAN, "engine.json"}
    description = read_description(folder)
    assert (description.library, description.sm) == ("tensorrt_rtx", ["89"])
    assert [profile["name"] for profile in description.profiles] == ["prefill", "decode_1", "decode_4"]
    assert manifest["build"]["build_s"] > 0
    assert manifest["build"]["timing_cache"] is None  # this library has none
    assert "Engine generation completed" in (workspace / f"logs/build-{name}.log").read_text()


def test_eight_bit_layers_stay_in_eight_bit(workspace: Path) -> None:
    """Counted by TensorRT's own parser: a dequantised weight and a pair for each shared input."""
    int8 = read_description(workspace / "engines/int8_sq").layers
    assert int8["quantize int8"] == 2 * 4  # inputs of qkv, o, gate and up, down
    assert int8["dequantize float16"] == 2 * 4 + 14
    fp8 = read_description(workspace / "engines/fp8_kv").layers
    assert fp8["quantize float8_e4m3fn"] == 2 * 4 + 2 * 2  # and new keys and values of both layers
    assert read_description(workspace / "engines/runtime").layers.get("quantize int8") is None


def test_show_says_that_nobody_has_seen_it_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["show", str(workspace / "engines/int8_sq")]) == 0
    text = capsys.readouterr().out
    assert "none: compiled ahead of time for SM 89, so not compared with its model" in text
    assert "tensorrt_rtx 1." in text
    assert "dequantize float16" in text


def test_without_a_gpu_and_without_a_target_the_first_stage_refuses(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workspace / "recipes", tmp_path / "recipes")
    (tmp_path / "params.yaml").write_text(PARAMS.replace("sm: [89], ", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BuildError, match="there is no GPU to compile for") as caught:
        platform.main()
    assert "engine.tensorrt.sm" in caught.value.next_step


def test_it_does_not_run_here(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BuildError, match="no NVIDIA GPU"):
        load_executor(workspace / "engines/int8_sq")
    assert cli(["serve", str(workspace / "engines/int8_sq"), "--port", "0"]) == 70
    assert "no NVIDIA GPU" in capsys.readouterr().err
