"""The names of TensorRT-LLM that a run would use, taken from the commands and files themselves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines.tensorrt_llm.capabilities import quantization_of
from pipeline.engines.tensorrt_llm.flags import build_arguments, requested
from pipeline.engines.tensorrt_llm.serving import serve_arguments, serving_config
from pipeline.params import Engine
from pipeline.serving.completion import CompletionRequest

if TYPE_CHECKING:
    from pipeline.quantize.recipes import Recipe


def names_used(recipe: Recipe | None, engine: Engine, section: dict[str, Any]) -> dict[str, set[str]]:
    """Names by the thing that must know them, in the words of the probe (``worker/probe.py``)."""
    config = serving_config(engine, section["profile"])
    found = {
        "trtllm-serve": options(serve_arguments(Path("engine"), section["profile"], engine, 1)),
        "CompletionRequest": set(CompletionRequest("", (1,), 1, dialect="trtllm-serve").body("")),
        "LLM": set(config),
        "KvCacheConfig": set(config["kv_cache_config"]),
    }
    if section["profile"] == "engine":
        asked = requested(engine, *quantization_of(recipe), int(section["gpus"][0]["sm"]))
        arguments = build_arguments(asked, checkpoint="", output="", timing_out="", timing_in="", workers=1)
        found["trtllm-build"] = options(arguments)
    return found


def options(arguments: Iterable[str]) -> set[str]:
    """The long options among arguments."""
    return {word for word in arguments if word.startswith("--")}
