"""Recipes: what each promises, and the mistakes in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.quantize.recipes import load_recipe, recipe_names


def test_the_built_in_recipes_load() -> None:
    assert recipe_names() == ["fp8", "int8_max", "int8_mixed", "int8_sq"]
    mixed = load_recipe("int8_mixed")
    assert mixed.promises("model.layers.3.mlp.up_proj")
    assert not mixed.promises("model.layers.3.mlp.down_proj")
    assert not mixed.promises("lm_head")
    assert load_recipe("int8_sq").promises("model.layers.3.mlp.down_proj")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("alpha: 1.5", r":5: alpha: must be between 0 and 1"),
        ("activations: fp8", r":3: activations: this key stands twice"),
        ("exlude: [a]", r":5: exlude: unknown key"),
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
    with pytest.raises(
        ConfigError, match=r"int4.yaml: no such recipe \(there are: fp8, int8_max, int8_mixed, int8_sq\)"
    ):
        load_recipe("int4")
