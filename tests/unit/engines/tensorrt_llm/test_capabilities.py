"""What is refused before any GPU time, and what is offered instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.engines.tensorrt_llm import preflight
from pipeline.engines.tensorrt_llm.capabilities import choose_profile, describe, quantization_of, refuse_format
from pipeline.errors import BuildError, ConfigError
from pipeline.params import Engine, TensorRTLLM, load_params
from pipeline.quantize.recipes import Recipe, load_recipe
from tests.standins.trtllm import ROOT

INT8, FP8, INT4 = "W8A8_SQ_PER_CHANNEL", "FP8", "W4A16_AWQ"
FOUND: dict[str, Any] = {
    "versions": {"tensorrt_llm": "1.2.1"},
    "programs": ["trtllm-build", "trtllm-serve"],
    "gpus": [{"gpu": "NVIDIA H100", "sm": "90"}],
    "no_gpu": "",
    "engine_importable": True,
    "names": {},
    "cannot": {},
}


def section(**changes: Any) -> dict[str, Any]:
    return {"tensorrt_llm": FOUND | {"profile": "engine", "why_not": ""} | changes}


def recipe(name: str) -> Recipe:
    return load_recipe(name, ROOT / "recipes")


@pytest.mark.parametrize(
    ("changes", "wish", "profile", "why"),
    [
        ({}, "auto", "engine", ""),
        ({}, "pytorch", "pytorch", ""),
        # By what is there, not by a version: the facts say so of each.
        ({"programs": ["trtllm-serve"]}, "auto", "pytorch", ""),
        ({"engine_importable": False}, "auto", "pytorch", ""),
        ({"engine_importable": False}, "engine", None, "builds no engines"),
        ({"versions": {}}, "auto", None, "not installed there"),
        ({"programs": []}, "auto", None, "trtllm-serve is not on the PATH"),
        ({"gpus": [], "no_gpu": "no driver"}, "auto", None, "no GPU there: no driver"),
    ],
)
def test_the_profile_is_what_is_there(changes: dict[str, Any], wish: Any, profile: str | None, why: str) -> None:
    found, reason = choose_profile(TensorRTLLM(profile=wish), FOUND | changes)
    assert found == profile
    assert why in reason


@pytest.mark.parametrize(
    ("formats", "profile", "sm", "message", "instead"),
    [
        ((INT8, None), "pytorch", 90, "PyTorch backend runs no INT8", "recipe fp8"),
        ((INT8, None), "pytorch", 80, "PyTorch backend runs no INT8", "1.2.1"),
        ((None, "INT8"), "pytorch", 90, "PyTorch backend runs no INT8", "recipe fp8"),
        ((INT8, None), "engine", 100, "no INT8 or INT4 engines for SM 100", "recipe fp8"),
        ((INT8, None), "engine", 119, "no INT8 or INT4 engines for SM 119", "onnxruntime"),
        ((INT4, None), "engine", 103, "no INT8 or INT4 engines for SM 103", "recipe fp8"),
        ((None, "INT8"), "engine", 100, "no INT8 or INT4 engines for SM 100", "recipe fp8"),
        ((FP8, None), "engine", 80, "FP8 needs SM 89 or later, this is SM 80", "int8_sq"),
        ((FP8, None), "pytorch", 86, "FP8 needs SM 89 or later, this is SM 86", "int8_sq"),
        ((INT8, "FP8"), "engine", 86, "FP8 needs SM 89 or later, this is SM 86", "int8_sq"),
    ],
)
def test_formats_without_kernels(
    formats: tuple[str | None, str | None], profile: str, sm: int, message: str, instead: str
) -> None:
    with pytest.raises(BuildError, match=message) as refused:
        refuse_format(formats, profile, sm, TensorRTLLM())
    assert instead in refused.value.next_step


@pytest.mark.parametrize(
    ("formats", "profile", "sm"),
    [
        ((INT8, None), "engine", 80),
        ((INT8, None), "engine", 90),
        ((INT8, None), "engine", 120),  # passes the check of trtllm-build
        ((FP8, FP8), "engine", 89),
        ((FP8, None), "pytorch", 100),
        ((INT4, None), "pytorch", 80),
        ((None, "FP8"), "pytorch", 80),  # Ampere has an FP8 KV cache there
        ((None, None), "engine", 75),
    ],
)
def test_formats_that_run(formats: tuple[str | None, str | None], profile: str, sm: int) -> None:
    refuse_format(formats, profile, sm, TensorRTLLM())


def test_int8_cache_and_block_reuse() -> None:
    """Issue 2166: bypassing the library's assertion crashed after about 3000 requests."""
    refuse_format((INT8, "INT8"), "engine", 90, TensorRTLLM())
    with pytest.raises(BuildError, match="INT8 KV cache cannot be reused") as refused:
        refuse_format((INT8, "INT8"), "engine", 90, TensorRTLLM(block_reuse=True))
    assert "block_reuse: false" in refused.value.next_step


def test_recipes_and_their_formats() -> None:
    assert quantization_of(None) == (None, None)
    assert quantization_of(recipe("int8_sq")) == quantization_of(recipe("int8_mixed")) == (INT8, None)
    assert quantization_of(recipe("fp8")) == (FP8, None)
    assert quantization_of(recipe("fp8_kv")) == (FP8, FP8)
    assert quantization_of(recipe("w4a16_awq")) == (INT4, None)


def test_preflight_on_an_h100_takes_the_recipes() -> None:
    engine = Engine(backend="tensorrt_llm")
    for name in (None, "int8_sq", "int8_mixed", "fp8", "fp8_kv", "w4a16_awq"):
        preflight(None if name is None else recipe(name), engine, section())


@pytest.mark.parametrize(
    ("name", "own", "platform", "message"),
    [
        ("int8_max", {}, section(), "does not run on tensorrt_llm"),
        (None, {}, {}, "platform.json knows no TensorRT-LLM"),
        (None, {}, section(why_not="no GPU there: hidden"), "cannot be used: no GPU there: hidden"),
        (None, {"tp": 2}, section(), "tp is 2, but TensorRT-LLM sees 1 GPUs"),
        ("int8_sq", {}, section(profile="pytorch"), "PyTorch backend runs no INT8"),
        ("int8_sq", {"build": "llm-api"}, section(), "builds FP8 engines from a quantised Hugging Face checkpoint"),
        (
            None,
            {},
            section(names={"trtllm-build": ["--checkpoint_dir"]}),
            "trtllm-build of TensorRT-LLM 1.2.1 has no --context_fmha, --gemm_plugin",
        ),
        (None, {}, section(names={"CompletionRequest": ["model"]}), "CompletionRequest of .* has no detokenize"),
    ],
)
def test_preflight_refuses(name: str | None, own: dict[str, Any], platform: dict[str, Any], message: str) -> None:
    engine = replace(Engine(backend="tensorrt_llm"), tensorrt_llm=TensorRTLLM(**own))
    with pytest.raises(BuildError, match=message) as refused:
        preflight(None if name is None else recipe(name), engine, platform)
    assert refused.value.next_step


def test_an_environment_that_is_not_there(tmp_path: Any) -> None:
    engine = Engine(backend="tensorrt_llm", tensorrt_llm=TensorRTLLM(python=str(tmp_path / "none/bin/python")))
    assert describe(engine) == {"profile": None, "why_not": f"{tmp_path}/none/bin/python is not there"}
    boxed = replace(engine, tensorrt_llm=TensorRTLLM(container="nodocker run image"))
    assert describe(boxed) == {"profile": None, "why_not": "nodocker is not on the PATH"}


def test_scoring_is_refused_where_params_are_read(tmp_path: Any) -> None:
    (tmp_path / "params.yaml").write_text("engine: {backend: tensorrt_llm}\n")
    with pytest.raises(ConfigError, match="eval.scored: must be 0 with engine.backend tensorrt_llm"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("engine: {backend: tensorrt_llm}\neval: {scored: 0}\n")
    assert load_params(tmp_path / "params.yaml").engine.tensorrt_llm.profile == "auto"
