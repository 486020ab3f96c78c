"""The backend's own decisions: what it refuses, what an engine folder holds, how it is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import BuildInputs, ServerBackend, get_backend
from pipeline.engines.manifest import write_manifest
from pipeline.engines.vllm import compile_engine, preflight, serve_command
from pipeline.errors import BuildError
from pipeline.params import Baseline, Engine, Eval, Params, Vllm
from pipeline.quantize.recipes import Recipe
from tests.emulation import read_tensors
from tests.unit.engines.vllm.models import SMOOTH, quantized

INT8 = replace(SMOOTH, backends=("vllm",))
FP8 = Recipe(description="fp8", weights="fp8", activations="fp8", algorithm="max", backends=("vllm",))


def platform(sm: str | None, available: bool = True) -> dict[str, Any]:
    device = {"gpu": "a GPU" if sm else None, "sm": sm, "cpu": "x86_64 avx2"}
    vllm = {"version": "0.25.0", "available": available, "why_not": "" if available else "it is not there"}
    return {"device": device, "backends": {"vllm": vllm}}


def test_it_serves_by_a_program_of_its_own() -> None:
    backend = get_backend("vllm")
    assert isinstance(backend, ServerBackend)
    assert backend.plain_dtype(Engine(backend="vllm")) is None


@pytest.mark.parametrize(
    ("recipe", "sm", "problem", "way_out"),
    [
        (FP8, None, "needs a GPU with FP8, SM 89 or later; here is no GPU", "int8"),
        (FP8, "86", "here is SM 86", "int8"),
        (INT8, "100", "INT8 kernels for SM 75 to 90, here is SM 100", "fp8"),
        (INT8, "70", "here is SM 70", "onnxruntime"),
        (replace(INT8, backends=("onnxruntime",)), None, "does not run on vllm", "engine.backend"),
    ],
)
def test_what_cannot_run_is_refused_with_an_alternative(
    recipe: Recipe, sm: str | None, problem: str, way_out: str
) -> None:
    with pytest.raises(BuildError, match=problem) as raised:
        preflight(recipe, Engine(backend="vllm"), platform(sm))
    assert way_out in raised.value.next_step


@pytest.mark.parametrize(
    ("recipe", "sm"), [(FP8, "89"), (FP8, "120"), (INT8, "75"), (INT8, "90"), (INT8, None), (None, None), (None, "70")]
)
def test_what_can_run(recipe: Recipe | None, sm: str | None) -> None:
    preflight(recipe, Engine(backend="vllm"), platform(sm))


def test_vllm_that_is_not_there() -> None:
    with pytest.raises(BuildError, match="it is not there"):
        preflight(None, Engine(backend="vllm"), platform(None, available=False))


def inputs(folder: Path, recipe: Recipe | None, sm: str | None, dtype: Any = "auto") -> BuildInputs:
    engine = Engine(backend="vllm", max_batch=8, max_tokens=64, vllm=Vllm(dtype=dtype))
    source = None if recipe is None else folder / "quantized"
    return BuildInputs(folder / "checkpoint", folder / "onnx", source, recipe, engine, platform(sm))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint, and what a recipe left of it, as the stages name them."""
    for path in (tmp_path / "checkpoint", tmp_path / "quantized/checkpoint", tmp_path / "engine"):
        path.mkdir(parents=True)
        if path.name == "checkpoint":
            (path / "config.json").write_text('{"model_type": "llama"}')
            (path / "model.safetensors").write_bytes(path.parent.name.encode())
            for extra in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                (path / extra).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("sm", "dtype"), [(None, "float32"), ("90", "float16")])
def test_the_engine_without_quantisation_is_the_checkpoint(folder: Path, sm: str | None, dtype: str) -> None:
    build = compile_engine(inputs(folder, None, sm), folder / "engine")
    assert (build["dtype"], build["versions"]) == (dtype, {"vllm": "0.25.0"})
    served = folder / "engine/checkpoint"
    assert sorted(path.name for path in served.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert (served / "model.safetensors").read_bytes() == (folder / "checkpoint/model.safetensors").read_bytes()
    assert not (served / "model.safetensors").samefile(folder / "checkpoint/model.safetensors")


def test_fp8_is_the_export_as_it_is(folder: Path) -> None:
    build = compile_engine(inputs(folder, FP8, "90"), folder / "engine")
    assert build["dtype"] == "fp8 (rest float16)"
    exported = folder / "quantized/checkpoint/model.safetensors"
    assert (folder / "engine/checkpoint/model.safetensors").read_bytes() == exported.read_bytes()


def test_an_fp8_cache_is_asked_for_and_computes_in_bfloat16(folder: Path) -> None:
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    (folder / "quantized/checkpoint/config.json").write_text(json.dumps(config))
    assert compile_engine(inputs(folder, FP8, "90"), folder / "engine")["dtype"] == "fp8 (rest bfloat16)"
    argv = " ".join(served(folder, FP8, "90").argv)
    assert "--kv-cache-dtype fp8" in argv
    assert "--dtype bfloat16" in argv


def test_the_command_line(folder: Path) -> None:
    found = served(folder, None, "90", dtype="bfloat16")
    argv = " ".join(found.argv)
    engine = folder / "engine-served"
    assert f"vllm serve {engine}/checkpoint --host 127.0.0.1 --port 8123 --served-model-name toy" in argv
    assert f"--tokenizer {engine}/tokenizer" in argv
    assert "--dtype bfloat16 --max-model-len 64" in argv
    assert "--max-num-seqs 8" in argv
    assert "--tensor-parallel-size 2" in argv
    assert argv.endswith("--seed 1")
    assert "--max-num-seqs 99" not in argv  # the baseline's own arguments are the baseline's
    assert found.gpus == 2
    assert (found.env["OF_BASELINE"], found.env["BOTH"]) == ("1", "engine")


def served(folder: Path, recipe: Recipe | None, sm: str, dtype: Any = "auto") -> Any:
    """The command line for an engine that was built with these inputs."""
    target = folder / "engine-served"
    target.mkdir()
    given = inputs(folder, recipe, sm, dtype)
    build = compile_engine(given, target)
    limits = {"max_batch": given.engine.max_batch, "max_tokens": given.engine.max_tokens}
    description = {"name": "toy", "recipe": None, "backend": "vllm", "dtype": build.pop("dtype"), "limits": limits}
    write_manifest(target, description | {"sources": {}, "platform": given.platform["device"], "build": build})
    (folder / "vllm").touch(mode=0o755)
    baseline = Baseline(
        vllm=str(folder / "vllm"), extra_args=("--max-num-seqs", "99"), env={"OF_BASELINE": "1", "BOTH": "baseline"}
    )
    settings = Vllm(tensor_parallel_size=2, extra_args=("--seed", "1"), env={"BOTH": "engine"})
    params = Params(engine=replace(given.engine, vllm=settings), baseline=baseline, eval=Eval(max_new_tokens=16))
    return serve_command(target, params, name="toy", port=8123, gpu=True)


@pytest.mark.parametrize(("sm", "symmetric"), [(None, False), ("90", True)])
def test_int8_has_zero_points_on_a_cpu_only(tmp_path: Path, sm: str | None, symmetric: bool) -> None:
    found = quantized(tmp_path, INT8)
    (tmp_path / "quantized").mkdir()
    found.export.rename(tmp_path / "quantized/checkpoint")
    (tmp_path / "engine").mkdir()
    build = compile_engine(inputs(tmp_path, INT8, sm), tmp_path / "engine")
    assert build["summary"] == "14 layers in int8 (compressed-tensors)"
    served = tmp_path / "engine/checkpoint"
    config = json.loads((served / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["symmetric"] is symmetric
    zeros = {name: value for name, value in read_tensors(served).items() if name.endswith("zero_point")}
    assert len(zeros) == (0 if symmetric else 14)
    assert all(value.tolist() == [0] for value in zeros.values())
