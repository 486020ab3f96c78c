"""Builds against the stand-ins: what is written, what is told, and every way to fail that users reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.manifest import verify_files
from pipeline.engines.tensorrt_llm import build
from pipeline.errors import BuildError
from pipeline.files import digest_file, read_json
from tests.func.tensorrt_llm.conftest import Project
from tests.standins.trtllm import FAULT

Make = Callable[..., Project]


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is made once for all tests of the step after it (it has tests of its own)."""
    convert, cache = build.convert_checkpoint, tmp_path.parent / "checkpoint-cache"

    def cached(plan: Any, runtime: Any, work: Path) -> dict[str, Any]:
        if not cache.exists():
            done = convert(plan, runtime, work)
            shutil.copytree(work, cache)
            (cache / "done.json").write_text(json.dumps(done))
            return done
        shutil.copytree(cache / "checkpoint", work / "checkpoint")
        plan.log.parent.mkdir(exist_ok=True)
        plan.log.write_text("")
        done = json.loads((cache / "done.json").read_text())
        return dict(done)

    monkeypatch.setattr(build, "convert_checkpoint", cached)


def test_an_fp8_engine(project: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that the engine's own folder does not record is in the manifest."""
    manifest = project().build("fp8")
    verify_files(Path("engines/fp8"))
    assert {"engine/config.json", "engine/rank0.engine", "serving.yaml", "timing.cache"} <= manifest["files"].keys()
    built = manifest["build"]
    assert built["quantization"]["quant_algo"] == "FP8"
    assert built["versions"]["tensorrt_llm"] == built["engine_version"] == "1.2.1"
    assert built["versions"] | {"tensorrt": "10.14.1.48", "modelopt": "0.37.0", "torch": "2.9.1"} == built["versions"]
    assert built["runtime"] | {"gpu": "NVIDIA H100 80GB HBM3", "sm": "90", "driver": "580.95.05"} == built["runtime"]
    assert built["runtime"]["cuda"] == "13.0"
    assert manifest["platform"]["tensorrt"] == "10.14.1.48"
    assert built["timing_cache"] == {"input": None, "output": digest_file(Path("engines/fp8/timing.cache"))}
    assert built["scraped"] == {"build_s": 34, "peak_memory_mb": 10421.96, "children_peak_memory_mb": 6296.07}
    assert built["log"]["digest"] == digest_file(Path("logs/build-fp8.log"))
    asked, got = built["flags"]["requested"], built["flags"]["effective"]
    assert (asked["max_batch_size"], asked["max_seq_len"], asked["max_num_tokens"]) == (4, 64, 256)
    assert (asked["gemm_plugin"], got["gemm_plugin"]) == ("disable", None)
    assert built["flags"]["differences"] == {}
    assert "fast_build" not in built["command"]
    assert built["checkpoint"]["files"].keys() == {"config.json", "rank0.safetensors"}
    # 2 layers x (k and v) x 2 heads x 32 values x 2 bytes
    assert built["memory"]["kv_cache_bytes_per_token"] == 512
    assert built["library"]["not_compared"] == ""
    assert not list(Path("engines").glob(".*")), "no working folder is left"
    assert "the engine has" not in capsys.readouterr().out


@pytest.mark.usefixtures("ready")
def test_flags_that_were_rewritten_are_shown_and_kept(
    project: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issues 9298, 2112, 2447: what is asked for and what is built differ without a word in the log."""
    right = build.requested

    def wrong(*arguments: Any) -> dict[str, int | str]:
        return right(*arguments) | {"use_fp8_context_fmha": "enable"}  # needs an FP8 KV cache

    monkeypatch.setattr(build, "requested", wrong)
    manifest = project().build("fp8")
    told = {"use_fp8_context_fmha": {"requested": "enable", "effective": False}}
    assert manifest["build"]["flags"]["differences"] == told
    assert "fp8: use_fp8_context_fmha: asked for enable, the engine has False" in capsys.readouterr().out


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("fault", "message", "next_step"),
    [
        # 102, 2451: the process is "Killed" when the host's memory runs out.
        ("build-killed", "exit code 137: killed .SIGKILL.. .* out of host memory", "see logs/build-fp8.log"),
        # 1543, 346: defaults for batch and tokens too large. 40 GiB: 42949672960 bytes.
        ("build-gpu-memory", "Requested amount of GPU memory", r"the GPU's memory ran out \(40.0 GiB at once\)"),
        # Exit code 0 is no proof.
        ("build-no-config", "no engine: config.json is missing", ""),
        ("build-no-rank", "no engine: rank0.engine is missing", ""),
        ("build-empty-rank", "no engine: rank0.engine is empty", ""),
        ("build-smaller", "tokens: asked for 64, the engine has 32", ""),
        # tensorrtllm_backend 849, 3615: logits of another vocabulary.
        ("build-vocabulary", "vocabulary: asked for 85, the engine has 4181", ""),
        ("build-unquantised", r"quantisation: asked for \('FP8', None\), the engine has \(None, None\)", ""),
    ],
)
def test_failed_builds(
    fault: str, message: str, next_step: str, project: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = project()
    monkeypatch.setenv(FAULT, fault)
    with pytest.raises(BuildError, match=message) as failed:
        made.build("fp8")
    assert failed.match(next_step)
    assert not Path("engines/fp8").exists()
    assert Path("logs/build-fp8.log").exists(), "the log outlives the folder"
    assert not list(Path("engines").glob(".*"))


@pytest.mark.usefixtures("ready")
def test_a_build_that_hangs_is_ended(project: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = project()
    made.build("fp8")  # fills the cache, at its own pace
    monkeypatch.setenv(FAULT, "build-hangs")
    with pytest.raises(BuildError, match="fp8: engine: not done within 1 s") as failed:
        made.changed(build_timeout_s=1).build("fp8")
    assert "build_timeout_s" in failed.value.next_step
    assert Path("engines/fp8/manifest.json").exists(), "the engine that was there stays"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        # 288: killed during the export, whose peak is a second copy of the weights.
        ("export-killed", "exit code 137: killed"),
        # 622, 1964: half an export, and nothing in the exit code says so.
        ("export-lost", "no rank0.safetensors, but modelopt_model.0.pth: its export failed halfway"),
    ],
)
def test_failed_checkpoints(fault: str, message: str, project: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = project()
    monkeypatch.setenv(FAULT, fault)
    with pytest.raises(BuildError, match=message):
        made.build("fp8")
    assert not Path("engines/fp8").exists()


def test_the_workers_refusal_is_ours(project: Make, exports: Any, tmp_path: Path) -> None:
    """A family without a place ends in our own error, with its next step."""
    checkpoint = tmp_path / "other"
    shutil.copytree(exports.checkpoint, checkpoint)
    config = read_json(checkpoint / "config.json") | {"architectures": ["FalconForCausalLM"]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    made = project()
    object.__setattr__(made, "exports", replace(exports, checkpoint=checkpoint))
    with pytest.raises(BuildError, match="FalconForCausalLM: this backend writes") as refused:
        made.build("fp8")
    assert "llm-api" in refused.value.next_step


@pytest.mark.usefixtures("ready")
def test_a_timing_cache_is_read_and_noted(project: Make, tmp_path: Path) -> None:
    cache = tmp_path / "h100.cache"
    made = project().changed(timing_cache=str(cache))
    with pytest.raises(BuildError, match="h100.cache: no such timing cache"):
        made.build("fp8")
    cache.write_bytes(b"of an earlier build")
    noted = made.build("fp8")["build"]
    assert noted["timing_cache"]["input"] == digest_file(cache)
    assert f"--input_timing_cache {cache}" in noted["command"]
    assert cache.read_bytes() == b"of an earlier build"
    assert not Path("model.cache").exists(), "nothing is written into the working directory"


def test_two_ranks(project: Make) -> None:
    made = project(gpus=2).changed(tp=2)
    manifest = made.build("int8_mixed")
    assert {"engine/rank0.engine", "engine/rank1.engine"} <= manifest["files"].keys()
    assert "--workers 2" in manifest["build"]["command"]
    assert manifest["build"]["devices"] == 2
    with pytest.raises(BuildError, match="tp is 3, but TensorRT-LLM sees 2 GPUs"):
        made.changed(tp=3).build("int8_mixed")


@pytest.mark.usefixtures("ready")
def test_weights_that_do_not_fit_are_refused_before_the_build(project: Make) -> None:
    made = project(free_mib=0)
    with pytest.raises(BuildError, match="of which 0.0 are free") as refused:
        made.build("fp8")
    assert "nvidia-smi" in refused.value.next_step


def test_another_environment_than_the_probed_one_is_refused(project: Make) -> None:
    found = project().platform()
    made = project(versions={"tensorrt": "10.13.3"})
    with pytest.raises(BuildError, match="no longer the one in artifacts/platform.json"):
        made.build("fp8", found)


def test_a_container_instead_of_a_virtual_environment(project: Make) -> None:
    """Words before each command, and programs found on the PATH inside."""
    made = project()
    container = str(Path(made.engine.tensorrt_llm.python).with_name("container"))
    boxed = made.changed(python="nowhere", container=container)
    assert boxed.platform()["tensorrt_llm"]["profile"] == "engine"
    assert "engine/rank0.engine" in boxed.build()["files"]


def test_fp8_by_the_llm_api(project: Make) -> None:
    """From the unified Hugging Face checkpoint; the library converts it."""
    made = project().changed(build="llm-api")
    manifest = made.build("fp8")
    assert manifest["build"]["built_by"] == "llm-api"
    assert manifest["build"]["flags"]["effective"]["max_batch_size"] == 4
    assert manifest["build"]["flags"]["differences"] == {}
    assert "engine/rank0.engine" in manifest["files"]
    with pytest.raises(BuildError, match="FP8 engines from a quantised Hugging Face checkpoint, not W8A8_SQ_PER"):
        made.build("int8_mixed")


def test_a_checkpoint_for_pytorch(project: Make) -> None:
    """The later line: weights as calibrated, read by transformers 4, with a frozen serving configuration."""
    manifest = project(profile="pytorch", versions={"tensorrt_llm": "1.3.0"}).build("fp8")
    built = manifest["build"]
    assert (built["profile"], built["summary"]) == (
        "pytorch",
        "FP8 checkpoint for the PyTorch backend, TensorRT-LLM 1.3.0",
    )
    folder = Path("engines/fp8/checkpoint")
    config = read_json(folder / "config.json")
    assert (config["rope_theta"], config["torch_dtype"]) == (10000.0, "float16")
    assert read_json(folder / "hf_quant_config.json")["quantization"]["quant_algo"] == "FP8"
    assert not (folder / "generation_config.json").exists()
    assert built["serving"]["kv_cache_config"]["enable_block_reuse"] is False
    assert built["serving"]["dtype"] == "float16"
    assert "engine/config.json" not in manifest["files"]
