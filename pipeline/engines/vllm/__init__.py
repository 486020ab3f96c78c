"""vLLM: the quantised checkpoint, served by the same ``vllm`` as the baseline.

FP8 is ModelOpt's export as it is (GPUs from SM 89). INT8 is rewritten as compressed-tensors (``int8``). The engine
without quantisation is the checkpoint itself. An engine folder holds all that is served: ``checkpoint/`` (weights and
config.json) and ``tokenizer/``.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines import BuildInputs, refuse_recipe
from pipeline.errors import BuildError
from pipeline.files import read_json

if TYPE_CHECKING:
    from pipeline.params import Engine, Params
    from pipeline.quantize.recipes import Recipe
    from pipeline.serving.process import ServerCommand

FP8_SM = 89
INT8_SM = range(75, 100)  # vLLM's INT8 kernels: from Turing to Hopper; Blackwell has FP8 and FP4 instead


def preflight(recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:  # noqa: ARG001
    """Refuses what this machine's vLLM has no kernels for; see ``pipeline.engines.Backend``."""
    refuse_recipe(recipe, "vllm")
    found = platform["backends"]["vllm"]
    if not found["available"]:
        raise BuildError(
            f"backend vllm: {found['why_not']}", "run `make setup-vllm`, or set baseline.vllm in params.yaml"
        )
    sm = platform["device"]["sm"]
    if recipe is None:
        return
    if recipe.weights == "fp8" and (sm is None or int(sm) < FP8_SM):
        raise BuildError(
            f"the recipe ({recipe.description}) needs a GPU with FP8, SM {FP8_SM} or later; here is "
            f"{f'SM {sm}' if sm else 'no GPU'}",
            "take an int8 recipe here (int8_mixed), or run on such a GPU",
        )
    if recipe.weights == "int8" and sm is not None and int(sm) not in INT8_SM:
        raise BuildError(
            f"vLLM has INT8 kernels for SM {INT8_SM.start} to {INT8_SM.stop - 10}, here is SM {sm}",
            "take the recipe fp8" if int(sm) >= FP8_SM else "take engine.backend onnxruntime or tensorrt",
        )


def plain_dtype(engine: Engine) -> None:
    """No ONNX graph: vLLM has the model's code."""


def compile_engine(inputs: BuildInputs, target: Path) -> dict[str, Any]:
    """Writes ``checkpoint/`` into ``target``; see ``pipeline.engines.Backend``."""
    from pipeline.engines.vllm.int8 import convert

    served = target / "checkpoint"
    served.mkdir()
    on_cpu = inputs.platform["device"]["gpu"] is None
    if inputs.quantized is None or inputs.recipe is None:
        _copy(inputs.checkpoint, served)
        summary = "the checkpoint as it is"
    elif inputs.recipe.weights == "int8":
        layers = convert(inputs.quantized / "checkpoint", inputs.checkpoint, served, zero_points=on_cpu)
        summary = f"{layers} layers in int8 (compressed-tensors)"
    else:
        _copy(inputs.quantized / "checkpoint", served)
        summary = "ModelOpt's export as it is"
    rest = _dtype(inputs.engine.vllm.dtype, on_cpu, fp8_cache=_fp8_cache(served))
    return {
        "summary": summary,
        "dtype": rest if inputs.recipe is None else f"{inputs.recipe.weights} (rest {rest})",
        "served_dtype": rest,
        "versions": {"vllm": inputs.platform["backends"]["vllm"]["version"] or "unknown"},
    }


def serve_command(folder: Path, params: Params, *, name: str, port: int, gpu: bool) -> ServerCommand:
    """``vllm serve`` on the engine's folder; see ``pipeline.engines.ServerBackend``."""
    from pipeline.engines.manifest import read_manifest
    from pipeline.serving.vllm import vllm_command

    manifest, settings = read_manifest(folder), params.engine.vllm
    limits = manifest["limits"]
    arguments = ["--tokenizer", str((folder / "tokenizer").absolute()), "--max-num-seqs", str(limits["max_batch"])]
    if _fp8_cache(folder / "checkpoint"):
        arguments += ["--kv-cache-dtype", "fp8"]
    served = replace(
        params.baseline,
        dtype=manifest["build"]["served_dtype"],
        tensor_parallel_size=settings.tensor_parallel_size,
        extra_args=(*arguments, *settings.extra_args),
        env=params.baseline.env | settings.env,
    )
    limit = limits["max_tokens"]
    return vllm_command(served, folder / "checkpoint", name=name, model=name, port=port, max_tokens=limit, gpu=gpu)


def _dtype(asked: str, on_cpu: bool, *, fp8_cache: bool) -> str:
    """The dtype of all that is not quantised."""
    if asked != "auto":
        return asked
    if on_cpu:
        return "float32"
    # vLLM 0.25 on Hopper beside an FP8 cache: "For FP8 input, output must have dtype BF16".
    return "bfloat16" if fp8_cache else "float16"


def _fp8_cache(checkpoint: Path) -> bool:
    """Whether the export has scales for an FP8 KV cache."""
    quantization = read_json(checkpoint / "config.json").get("quantization_config", {})
    return bool(quantization.get("kv_cache_scheme"))


def _copy(source: Path, target: Path) -> None:
    """Weights and the JSON files that describe them; the tokenizer travels apart. Copied rather than linked: DVC
    makes the files of its cache read-only, and a link would be the checkpoint's own file."""
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors" or (path.suffix == ".json" and "token" not in path.name):
            shutil.copyfile(path, target / path.name)
