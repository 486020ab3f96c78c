"""What the configured TensorRT-LLM can do on this GPU, and what it is refused for before anything costs time.

Two profiles, chosen by what is there and never by a version number. ``engine``: ``trtllm-build`` is on the PATH and
``tensorrt_llm._tensorrt_engine`` can be imported. ``pytorch``: neither; a quantised Hugging Face checkpoint with a
frozen serving configuration is what is promoted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.engines import refuse_recipe
from pipeline.engines.tensorrt_llm.flags import FP8_SM
from pipeline.engines.tensorrt_llm.runtime import open_runtime
from pipeline.errors import BuildError
from pipeline.params import Engine, TensorRTLLM

if TYPE_CHECKING:
    from pipeline.quantize.recipes import Recipe

# Streaming multiprocessors on which trtllm-build stops with "SmoothQuant is not supported on SM>=100." or
# "INT8/INT4 quantization is not supported on SM>=100.": B200, B300. SM 120 passes its check.
NO_INTEGER_SM = range(100, 120)
INTEGER = ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ")
ELSEWHERE = "or another engine.backend (onnxruntime runs INT8 everywhere)"


def describe(engine: Engine) -> dict[str, Any]:
    """The section ``tensorrt_llm`` of ``artifacts/platform.json``. ``why_not`` is empty when the backend can run.

    Without paths, times and free memory: equal on an equal machine.
    """
    runtime = open_runtime(engine.tensorrt_llm)
    if why := runtime.missing():
        return {"profile": None, "why_not": why}
    try:
        found = runtime.probe()
    except BuildError as error:
        return {"profile": None, "why_not": error.message}
    for gpu in found["gpus"]:
        del gpu["memory_free_mib"]
    profile, why = choose_profile(engine.tensorrt_llm, found)
    return found | {"profile": profile, "why_not": why}


def choose_profile(params: TensorRTLLM, found: dict[str, Any]) -> tuple[str | None, str]:
    """The profile, or None and why there is none."""
    if "tensorrt_llm" not in found["versions"]:
        return None, "TensorRT-LLM is not installed there"
    if "trtllm-serve" not in found["programs"]:
        return None, "trtllm-serve is not on the PATH there"
    builds = found["engine_importable"] and "trtllm-build" in found["programs"]
    if params.profile == "engine" and not builds:
        return None, f"TensorRT-LLM {found['versions']['tensorrt_llm']} builds no engines (profile: engine)"
    if not found["gpus"]:
        return None, f"no GPU there: {found['no_gpu']}"
    return ("engine" if builds and params.profile != "pytorch" else "pytorch"), ""


def quantization_of(recipe: Recipe | None) -> tuple[str | None, str | None]:
    """TensorRT-LLM's names for what a recipe makes: of the weights and of the KV cache."""
    if recipe is None:
        return None, None
    algo = {"int8": "W8A8_SQ_PER_CHANNEL", "fp8": "FP8", "int4": "W4A16_AWQ"}[recipe.weights]
    cache = {"none": None, "fp8": "FP8"}[recipe.kv_cache]
    return algo, cache


def refuse(recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:
    """Raises BuildError, naming the alternative, for what cannot be built or run with what ``platform`` says."""
    refuse_recipe(recipe, "tensorrt_llm")
    section = platform.get("tensorrt_llm")
    if section is None:
        raise BuildError("artifacts/platform.json knows no TensorRT-LLM", "run `dvc repro platform`")
    if section["why_not"]:
        raise BuildError(
            f"TensorRT-LLM cannot be used: {section['why_not']}",
            "set engine.tensorrt_llm.python or .container in params.yaml (docs/tensorrt-llm.md); `enginegate doctor`",
        )
    params = engine.tensorrt_llm
    if len(section["gpus"]) < params.tp:
        raise BuildError(
            f"engine.tensorrt_llm.tp is {params.tp}, but TensorRT-LLM sees {len(section['gpus'])} GPUs",
            "lower it, or show the container more GPUs",
        )
    refuse_format(quantization_of(recipe), section["profile"], int(section["gpus"][0]["sm"]), params)
    refuse_unknown_names(recipe, engine, section)


def refuse_format(formats: tuple[str | None, str | None], profile: str, sm: int, params: TensorRTLLM) -> None:
    """Raises BuildError for number formats that a profile or a GPU has no kernels for."""
    algo, cache = formats
    fp8 = "use the recipe fp8" if sm >= FP8_SM else "use a GPU of SM 89 or later with the recipe fp8"
    if profile == "pytorch" and (algo == "W8A8_SQ_PER_CHANNEL" or cache == "INT8"):
        raise BuildError(
            "TensorRT-LLM's PyTorch backend runs no INT8 (SmoothQuant weights or KV cache)",
            f"{fp8}, TensorRT-LLM 1.2.1, the last line that builds INT8 engines, {ELSEWHERE}",
        )
    if profile == "engine" and sm in NO_INTEGER_SM and (algo in INTEGER or cache == "INT8"):
        raise BuildError(f"TensorRT-LLM builds no INT8 or INT4 engines for SM {sm} (100 to 119)", f"{fp8}, {ELSEWHERE}")
    if sm < FP8_SM and "FP8" in formats and not (profile == "pytorch" and algo != "FP8"):
        raise BuildError(f"FP8 needs SM {FP8_SM} or later, this is SM {sm}", f"use the recipe int8_sq, {ELSEWHERE}")
    if cache == "INT8" and params.block_reuse:
        raise BuildError(
            "an INT8 KV cache cannot be reused between requests (TensorRT-LLM has no paged context attention for it)",
            "set engine.tensorrt_llm.block_reuse: false",
        )
    if profile == "engine" and params.build == "llm-api" and algo not in (None, "FP8"):
        raise BuildError(
            f"TensorRT-LLM's LLM API builds FP8 engines from a quantised Hugging Face checkpoint, not {algo}",
            "set engine.tensorrt_llm.build: trtllm-build",
        )


def refuse_unknown_names(recipe: Recipe | None, engine: Engine, section: dict[str, Any]) -> None:
    """Raises BuildError for a flag, option or field that we would use and that the installed version does not have.

    What the probe could not look up (``cannot``) is not held against it.
    """
    from pipeline.engines.tensorrt_llm.usage import names_used

    version = section["versions"]["tensorrt_llm"]
    for thing, used in names_used(recipe, engine, section).items():
        known = section["names"].get(thing)
        unknown = sorted(used - set(known)) if known else []
        if unknown:
            raise BuildError(
                f"{thing} of TensorRT-LLM {version} has no {', '.join(unknown)}",
                "use TensorRT-LLM 1.2.1 (docs/tensorrt-llm.md), or see docs/tensorrt-llm-migration.md",
            )
