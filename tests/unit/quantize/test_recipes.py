"""Recipes: what each promises, where it runs, and the mistakes in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, QuantizationError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.census import take_census
from pipeline.quantize.recipes import Recipe, load_recipe, recipe_names

BUILT_IN = ["fp8", "fp8_kv", "int8_max", "int8_mixed", "int8_sq", "w4a16_awq"]


def test_the_built_in_recipes_load() -> None:
    assert recipe_names() == BUILT_IN
    mixed = load_recipe("int8_mixed")
    assert mixed.promises("model.layers.3.mlp.up_proj")
    assert mixed.why_left_out("model.layers.3.mlp.down_proj") == "excluded by *mlp.down_proj"
    assert mixed.why_left_out("lm_head") == "ModelOpt leaves *lm_head* alone"
    assert load_recipe("int8_sq").promises("model.layers.3.mlp.down_proj")
    assert load_recipe("fp8_kv").kv_cache == "fp8"


def test_where_the_built_in_recipes_run() -> None:
    """From the support matrices in the facts: FP8 needs SM 89; vLLM takes no ModelOpt INT4 AWQ."""
    for name in BUILT_IN:
        recipe = load_recipe(name)
        assert ("onnxruntime" in recipe.backends) == (recipe.weights == "int8")
        assert (recipe.min_sm or 0) >= (89 if recipe.weights == "fp8" else 0)
    assert "vllm" not in load_recipe("w4a16_awq").backends


def test_include_quantises_nothing_else(tiny_model: Any) -> None:
    recipe = Recipe(
        description="own", weights="fp8", activations="fp8", algorithm="max", include=("*mlp*", "*q_proj"),
        exclude=("*layers.0.*",),
    )  # fmt: skip
    quantize_model(tiny_model, recipe, Samples([[5, 6, 7]]), 64)
    census = take_census(tiny_model, recipe)
    assert [row["layer"] for row in census["layers"]] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert census["unexpected"] == []
    why = {row["layer"]: row["why"] for row in census["skipped"]}
    assert why["model.layers.0.mlp.up_proj"] == "excluded by *layers.0.*"
    assert why["model.layers.1.self_attn.k_proj"] == "not in include"


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_refused(tiny_model: Any, key: str) -> None:
    """faults.md, "recipe matched nothing": *experts* on a dense toy model."""
    recipe: Recipe = replace(load_recipe("fp8"), **{key: ("*experts*",)})  # type: ignore[arg-type]
    names = [name for name, _ in tiny_model.named_modules()]
    with pytest.raises(QuantizationError, match=rf"`{key}: \*experts\*` matches no module"):
        recipe.check_patterns(names)
    replace(load_recipe("fp8"), exclude=("*down_proj",)).check_patterns(names)


def test_words_do_not_change_what_a_recipe_is() -> None:
    recipe = load_recipe("int8_sq")
    assert replace(recipe, description="other", backends=(), min_sm=80).identity() == recipe.identity()
    assert replace(recipe, alpha=0.5).identity() != recipe.identity()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("alpha: 1.5", r":5: alpha: must be between 0 and 1"),
        ("activations: fp8", r":3: activations: this key stands twice"),
        ("exlude: [a]", r":5: exlude: unknown key"),
        ("samples: 0", r":5: samples: must be at least 1"),
        ("backends: [cpu]", r":5: backends"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, line: str, message: str) -> None:
    text = "description: x\nweights: int8\nactivations: int8\nalgorithm: smoothquant\n"
    if line.startswith("activations"):
        text = text.replace("weights: int8\n", "activations: int8\n")
    (tmp_path / "own.yaml").write_text(f"{text}{line}\n")
    with pytest.raises(ConfigError, match=message):
        load_recipe("own", tmp_path)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=rf"int4.yaml: no such recipe \(there are: {', '.join(BUILT_IN)}\)"):
        load_recipe("int4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "int4"}, "activations: int4 weights go with none"),
        ({"weights": "fp8", "activations": "fp8"}, "algorithm: smoothquant goes with int8"),
        ({"algorithm": "awq"}, "algorithm: awq goes with int4"),
        ({"min_sm": 90, "max_sm": 80}, "max_sm: must not be below min_sm"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(load_recipe("int8_sq"), **changes)
