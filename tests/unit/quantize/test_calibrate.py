"""Calibration with the real ModelOpt on a tiny model: what enters the statistics, and what the census sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.errors import QuantizationError
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.census import take_census
from pipeline.quantize.recipes import Recipe, load_recipe

INT8 = Recipe(description="max", weights="int8", activations="int8", algorithm="max")
PAD = 2


def _amax(model: Any) -> dict[str, float]:
    return {row["layer"]: row["input_amax"] for row in take_census(model, INT8)["layers"]}


def _samples() -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(5)
    return [torch.randint(5, 85, (length,), generator=draw).tolist() for length in (8, 40, 8, 17, 40, 3)]


def test_amax_does_not_depend_on_the_batch_and_no_padding_enters(tiny_checkpoint: Any) -> None:
    """One batch against single samples; a pad embedding of 1000 times the size would show at once."""
    import torch
    from transformers import AutoModelForCausalLM

    found = []
    for budget in (1, 4096):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
        with torch.no_grad():
            model.get_input_embeddings().weight[PAD] *= 1000
        quantize_model(model, INT8, _samples(), budget)
        found.append(_amax(model))
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 14
    for layer, amax in found[0].items():
        assert amax == pytest.approx(found[1][layer], rel=1e-5)


def test_amax_is_the_largest_input_seen(tiny_model: Any) -> None:
    """Against an independent reading: plain forward hooks on the original model."""
    import torch

    name = "model.layers.0.self_attn.q_proj"
    largest = 0.0

    def watch(_: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal largest
        largest = max(largest, float(inputs[0].abs().max()))

    handle = tiny_model.get_submodule(name).register_forward_pre_hook(watch)
    with torch.inference_mode():
        for sample in _samples():
            tiny_model(torch.tensor([sample]))
    handle.remove()
    quantize_model(tiny_model, INT8, _samples(), 64)
    assert _amax(tiny_model)[name] == pytest.approx(largest, rel=1e-6)


def test_an_outlier_at_the_end_of_the_last_sample_is_seen(tiny_checkpoint: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    found = []
    for last in (5, 84):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
        with torch.no_grad():
            model.get_input_embeddings().weight[84] = 0.0
            model.get_input_embeddings().weight[84, 0] = 500.0
        quantize_model(model, INT8, [[5, 6, 7]] * 20 + [[5] * 99 + [last]], 64)
        found.append(_amax(model)["model.layers.0.self_attn.q_proj"])
    # After RMSNorm a one-hot vector of 128 has the size sqrt(128) = 11.3; the others stay near 3 or 4.
    assert found[0] < 6
    assert found[1] == pytest.approx(128**0.5, rel=1e-3)


@pytest.mark.parametrize(("recipe", "quantized"), [("int8_sq", 14), ("int8_mixed", 12), ("fp8", 14)])
def test_the_census_of_the_built_in_recipes(tiny_model: Any, recipe: str, quantized: int) -> None:
    quantize_model(tiny_model, load_recipe(recipe), _samples(), 64)
    census = take_census(tiny_model, load_recipe(recipe))
    assert (census["promised"], census["quantized"]) == (quantized, quantized)
    assert census["bad"] == census["unexpected"] == []
    assert "lm_head" in census["skipped"]


def test_a_recipe_that_matches_nothing_is_refused(tiny_model: Any) -> None:
    with pytest.raises(QuantizationError, match="matches no layer of LlamaForCausalLM"):
        quantize_model(tiny_model, replace(INT8, exclude=("*",)), _samples(), 64)


def test_a_model_that_lacks_what_the_recipe_promised_shows(tiny_model: Any) -> None:
    quantize_model(tiny_model, replace(INT8, exclude=("*mlp*",)), _samples(), 64)
    census = take_census(tiny_model, INT8)
    assert (census["promised"], census["quantized"]) == (14, 8)
    assert census["unexpected"] == sorted(
        f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("down", "gate", "up")
    )


def test_never_called_and_nan_scales_are_bad(tiny_model: Any) -> None:
    import torch

    quantize_model(tiny_model, INT8, _samples(), 64)
    layers = tiny_model.model.layers
    layers[0].mlp.up_proj.input_quantizer.reset_amax()
    layers[1].mlp.up_proj.input_quantizer.amax = torch.tensor(float("nan"))
    layers[1].mlp.gate_proj.input_quantizer.amax = torch.tensor(0.0)
    assert take_census(tiny_model, INT8)["bad"] == [
        "model.layers.0.mlp.up_proj.input_quantizer: never called in calibration",
        "model.layers.1.mlp.gate_proj.input_quantizer: zero",
        "model.layers.1.mlp.up_proj.input_quantizer: NaN or infinite",
    ]
