"""TensorRT-LLM: engines of the 1.2 line, or checkpoints frozen for its PyTorch backend on later ones.

TensorRT-LLM lives in an environment of its own (``runtime.py``), is asked what it can do (``capabilities.py``), and
is spoken to in documented names only (``documented.py``). Nothing here has run against the real library yet:
docs/tensorrt-llm.md says what was tested, and how the first real run goes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines import BuildInputs
from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.params import Engine, Params
    from pipeline.quantize.recipes import Recipe
    from pipeline.serving.process import ServerCommand

LOGS = Path("logs")


def preflight(recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:
    """Refuses what this TensorRT-LLM or this GPU cannot do; see ``pipeline.engines.Backend``."""
    from pipeline.engines.tensorrt_llm.capabilities import refuse

    refuse(recipe, engine, platform)


def plain_dtype(engine: Engine) -> None:
    """It starts from the checkpoint and needs no ONNX graph."""


def compile_engine(inputs: BuildInputs, target: Path) -> dict[str, Any]:
    """Writes ``engine/`` (or, for PyTorch, ``checkpoint/``), ``tokenizer/`` and ``serving.yaml`` into ``target``.

    Raises BuildError when the runtime is no longer the one of ``artifacts/platform.json``, or the build fails.
    """
    from pipeline.engines.tensorrt_llm.build import Plan, build_engine
    from pipeline.engines.tensorrt_llm.older import write_checkpoint, write_tokenizer
    from pipeline.engines.tensorrt_llm.runtime import open_runtime
    from pipeline.engines.tensorrt_llm.serving import CONFIG, MODEL, serving_config
    from pipeline.files import digest_json, digest_tree, read_json, write_json

    params, section = inputs.engine.tensorrt_llm, inputs.platform["tensorrt_llm"]
    profile: str = section["profile"]
    runtime = open_runtime(params)
    found = runtime.look()
    _refuse_changed(section, found)
    write_tokenizer(inputs.checkpoint, target / "tokenizer")
    weights = inputs.checkpoint if inputs.quantized is None else inputs.quantized / "checkpoint"
    quantization = {} if inputs.quantized is None else read_json(weights / "hf_quant_config.json")["quantization"]
    label = _label(target)
    if profile == "engine":
        log = inputs.log or LOGS / f"build-{label}.log"
        plan = Plan(
            weights, inputs.checkpoint, target / "tokenizer", quantization, inputs.engine, found, log=log, label=label
        )
        built = build_engine(plan, runtime, target)
    else:
        write_checkpoint(weights, target / "tokenizer", target / MODEL[profile], params.dtype)
        built = {"checkpoint": {"files": digest_tree(target / MODEL[profile])}}
    config = serving_config(inputs.engine, profile)
    write_json(target / CONFIG, config)  # JSON is YAML
    algo = quantization.get("quant_algo")
    gpu = found["gpus"][0]
    return built | {
        "summary": _summary(profile, found, algo),
        "dtype": params.dtype if inputs.recipe is None else f"{inputs.recipe.weights} (rest {params.dtype})",
        "profile": profile,
        "devices": params.tp,
        "quantization": quantization,
        "versions": found["versions"],
        "runtime": {
            **{name: gpu[name] for name in ("gpu", "sm", "driver", "memory_mib")},
            "cuda": found["cuda"],
            "gpus": len(found["gpus"]),
            "python": found["python"],
        },
        "probed": {"names": digest_json(section["names"]), "cannot": section["cannot"]},
        "serving": config,
    }


def serve_command(folder: Path, params: Params, *, name: str, port: int, gpu: bool) -> ServerCommand:  # noqa: ARG001
    """``trtllm-serve`` for an engine folder; see ``pipeline.engines.ServerBackend``."""
    from pipeline.engines.manifest import read_manifest
    from pipeline.engines.tensorrt_llm import serving

    return serving.serve_command(folder, params, read_manifest(folder), name=name, port=port)


def _refuse_changed(section: dict[str, Any], found: dict[str, Any]) -> None:
    """What was probed has to be what builds."""
    if (
        section["versions"] != found["versions"]
        or not found["gpus"]
        or section["gpus"][0]["sm"] != found["gpus"][0]["sm"]
    ):
        raise BuildError(
            "TensorRT-LLM's environment is no longer the one in artifacts/platform.json", "run `dvc repro` again"
        )


def _summary(profile: str, found: dict[str, Any], algo: str | None) -> str:
    version, sm = found["versions"]["tensorrt_llm"], found["gpus"][0]["sm"]
    what = f"engine for SM {sm}" if profile == "engine" else "checkpoint for the PyTorch backend"
    return f"{algo or 'unquantised'} {what}, TensorRT-LLM {version}"


def _label(target: Path) -> str:
    """The engine's name: ``target`` is the temporary folder beside it (``files.atomic_folder``)."""
    match = re.fullmatch(r"\.(.+)\.[^.]+\.part", target.name)
    return match.group(1) if match else target.name
