"""``trtllm-serve`` over what ``compile_engine`` wrote, with a serving configuration that is frozen beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt_llm.flags import sizes
from pipeline.engines.tensorrt_llm.runtime import open_runtime
from pipeline.errors import IntegrityError, ServerError
from pipeline.params import Engine, Params
from pipeline.serving.process import HOST, ServerCommand

MODEL = {"engine": "engine", "pytorch": "checkpoint"}  # the part of an engine folder that is served, by profile
CONFIG = "serving.yaml"


def serving_config(engine: Engine, profile: str) -> dict[str, Any]:
    """What ``serving.yaml`` holds: arguments of the LLM API that are no options of ``trtllm-serve``.

    It replaces the whole ``kv_cache_config`` that the options make, so the memory fraction is here too. An engine
    has its dtype; a checkpoint gets it here.
    """
    params = engine.tensorrt_llm
    return {
        **({"dtype": params.dtype} if profile == "pytorch" else {}),
        "kv_cache_config": {
            "enable_block_reuse": params.block_reuse,
            "enable_partial_reuse": params.block_reuse,
            "free_gpu_memory_fraction": params.memory_fraction,
        },
    }


def serve_arguments(folder: Path, profile: str, engine: Engine, port: int) -> list[str]:
    """The arguments of ``trtllm-serve``. Without ``--backend trt`` it would give an engine to PyTorch."""
    size = sizes(engine)
    options = {
        "--tokenizer": folder / "tokenizer",
        "--host": HOST,
        "--port": port,
        "--max_batch_size": size["max_batch_size"],
        "--max_num_tokens": size["max_num_tokens"],
        "--max_seq_len": size["max_seq_len"],
        "--tp_size": engine.tensorrt_llm.tp,
        "--extra_llm_api_options": folder / CONFIG,
        **({"--backend": "trt"} if profile == "engine" else {}),
    }
    return [str(folder / MODEL[profile]), *(str(word) for pair in options.items() for word in pair)]


def serve_command(folder: Path, params: Params, manifest: dict[str, Any], *, name: str, port: int) -> ServerCommand:
    """The command line that serves an engine folder.

    Raises ServerError when TensorRT-LLM is not there, and IntegrityError for an engine of another GPU or version.
    """
    runtime = open_runtime(params.engine.tensorrt_llm)
    if why := runtime.missing():
        raise ServerError(f"{name}: {why}", "set engine.tensorrt_llm.python or .container (docs/tensorrt-llm.md)")
    refuse_elsewhere(folder, manifest, runtime.look())
    profile = manifest["build"]["profile"]
    argv = runtime.command("trtllm-serve", *serve_arguments(folder.absolute(), profile, params.engine, port))
    return ServerCommand(name, argv, port, gpus=params.engine.tensorrt_llm.tp, dialect="trtllm-serve")


def refuse_elsewhere(folder: Path, manifest: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises IntegrityError for an engine that was built for another GPU, TensorRT or TensorRT-LLM than there is.

    TensorRT would refuse it too, later and without naming the way out ("expecting compute 9.0 got compute 8.9",
    "Version tag does not match"). A checkpoint for PyTorch is bound to neither GPU nor TensorRT.
    """
    build = manifest["build"]
    if not found["gpus"]:
        raise IntegrityError(f"{folder}: no GPU to serve it on: {found['no_gpu']}", "run `enginegate doctor`")
    sides = {"TensorRT-LLM": (build["versions"].get("tensorrt_llm"), found["versions"].get("tensorrt_llm"))}
    if build["profile"] == "engine":
        sides["SM"] = (build["runtime"]["sm"], found["gpus"][0]["sm"])
        sides["TensorRT"] = (build["versions"].get("tensorrt"), found["versions"].get("tensorrt"))
    for what, (then, now) in sides.items():
        if then != now:
            raise IntegrityError(
                f"{folder}: built for {what} {then}, here is {what} {now}", "build it here: `dvc repro` does"
            )
