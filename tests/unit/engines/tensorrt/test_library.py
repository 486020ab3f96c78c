"""Which library is taken, what it can do, and what is refused before anything is calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.tensorrt import preflight
from pipeline.engines.tensorrt.library import load_library, version_numbers
from pipeline.errors import BuildError
from pipeline.params import Engine, TensorRT
from pipeline.quantize.recipes import load_recipe

RTX = [75, 80, 86, 89, 120, 121]


def test_of_both_the_full_one_is_taken_but_for_compiling_ahead(install: Callable[..., Any]) -> None:
    install("10.9.0")
    install("1.7.1.116", sms=RTX)
    assert load_library().label == "tensorrt 10.9.0"
    assert load_library(ahead=True).label == "tensorrt_rtx 1.7.1.116"
    assert load_library("tensorrt_rtx").label == "tensorrt_rtx 1.7.1.116"


@pytest.mark.parametrize(
    ("version", "sms", "typed", "fp8", "opset", "targets"),
    [
        ("8.6.0", (), False, False, 17, []),
        ("10.9.0", (), True, True, 18, []),
        ("1.7.1.116", RTX, True, True, 18, ["75", "80", "86", "89", "120", "121"]),
    ],
)
def test_what_a_version_can_do(  # noqa: PLR0917
    install: Callable[..., Any], version: str, sms: Any, typed: bool, fp8: bool, opset: int, targets: list[str]
) -> None:
    install(version, sms=sms)
    library = load_library()
    assert (library.strongly_typed, library.fp8, library.opset, library.targets) == (typed, fp8, opset, targets)


def test_the_real_library_of_this_environment() -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    library = load_library("tensorrt_rtx")
    assert {"75", "89", "120"} <= set(library.targets)
    assert (library.strongly_typed, library.fp8, library.opset) == (True, True, 18)


@pytest.mark.parametrize(
    ("version", "sms"), [("7.2.3", ()), ("8.5.3", ()), ("9.3.0", ()), ("12.0.1", ()), ("2.0", RTX)]
)
def test_an_unknown_version_is_refused(install: Callable[..., Any], version: str, sms: Any) -> None:
    install(version, sms=sms)
    with pytest.raises(BuildError, match=version.replace(".", r"\.")) as caught:
        load_library()
    assert "install one of these" in caught.value.next_step


def test_no_library(install: Callable[..., Any]) -> None:  # noqa: ARG001  it takes the real ones away
    with pytest.raises(BuildError, match="TensorRT is not here") as caught:
        load_library()
    assert "enginegate[tensorrt]" in caught.value.next_step
    with pytest.raises(BuildError) as caught:
        load_library(ahead=True)
    assert "enginegate[tensorrt-rtx]" in caught.value.next_step


def engine(**options: Any) -> Engine:
    return Engine(backend="tensorrt", tensorrt=TensorRT(**options))


@pytest.mark.parametrize(
    ("version", "sms", "options", "here", "recipe", "named", "way_out"),
    [
        ("10.9.0", (), {}, None, "int8_sq", "no GPU to compile for", "engine.tensorrt.sm"),
        ("10.9.0", (), {}, "70", "int8_sq", "needs SM 75 or newer, not SM 70", "without quantisation"),
        ("10.9.0", (), {}, "86", "fp8_kv", "needs SM 89", "take an int8 recipe"),
        ("10.9.0", (), {}, "86", "fp8", "FP8 .* needs SM 89 or newer, not SM 86", "take an int8 recipe"),
        ("8.6.1", (), {}, "89", "fp8", "tensorrt 8.6.1 has no FP8", "int8"),
        ("8.6.1", (), {}, "100", "int8_sq", "knows no GPU newer than SM 90", "newer TensorRT"),
        ("10.9.0", (), {"sm": (89,)}, None, "int8_sq", r"compiles only for the GPU at hand \(there is none\)", "rtx"),
        ("10.9.0", (), {"sm": (89, 90)}, "90", "int8_sq", r"at hand \(SM 90\), not for SM 89", "rtx"),
        ("1.7.1", RTX, {"sm": (90,)}, None, "int8_sq", r"does not compile for SM 90 \(but for 75, 80", "full TensorRT"),
        ("1.7.1", RTX, {}, "90", "int8_sq", "does not compile for SM 90", "full TensorRT"),
        ("1.7.1", RTX, {"sm": (86, 89)}, None, "fp8", "not SM 86", "int8"),
        ("1.7.1", RTX, {"library": "tensorrt"}, "89", "int8_sq", "TensorRT is not here", "enginegate"),
    ],
)
def test_refused_before_calibration(  # noqa: PLR0917
    install: Callable[..., Any],
    version: str,
    sms: Any,
    options: dict[str, Any],
    here: str | None,
    recipe: str,
    named: str,
    way_out: str,
) -> None:
    install(version, sms=sms)
    with pytest.raises(BuildError, match=named) as caught:
        preflight(load_recipe(recipe), engine(**options), {"device": {"sm": here}})
    assert way_out in caught.value.next_step


def test_a_recipe_for_another_backend_is_refused(install: Callable[..., Any]) -> None:
    install("10.9.0")
    recipe = replace(load_recipe("int8_sq"), backends=("onnxruntime",))
    with pytest.raises(BuildError, match="does not run on tensorrt"):
        preflight(recipe, engine(), {"device": {"sm": "90"}})
    recipe = replace(load_recipe("int8_sq"), max_sm=90)
    preflight(recipe, engine(), {"device": {"sm": "90"}})
    with pytest.raises(BuildError, match="ends with SM 90; this is SM 100"):
        preflight(recipe, engine(), {"device": {"sm": "100"}})


@pytest.mark.parametrize(
    ("version", "sms", "options", "here"),
    [
        ("10.9.0", (), {}, "90"),
        ("8.6.0", (), {}, "90"),
        ("10.9.0", (), {"sm": (90,)}, "90"),
        ("1.7.1", RTX, {"sm": (89, 120)}, None),
        ("1.7.1", RTX, {}, "120"),
    ],
)
def test_what_goes(install: Callable[..., Any], version: str, sms: Any, options: dict[str, Any], here: Any) -> None:
    install(version, sms=sms)
    for recipe in (None, load_recipe("int8_mixed")):
        preflight(recipe, engine(**options), {"device": {"sm": here}})


def test_without_quantisation_an_old_gpu_goes(install: Callable[..., Any]) -> None:
    install("8.6.0")
    preflight(None, engine(), {"device": {"sm": "70"}})


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.sampled_from(["", "b1", ".dev3", ".post1"]))
def test_version_numbers(numbers: list[int], tail: str) -> None:
    assert version_numbers(".".join(map(str, numbers)) + tail) == tuple(numbers)
