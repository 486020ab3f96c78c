"""What the census sees, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.census import check_export, refuse_unsound, take_census
from pipeline.quantize.recipes import Recipe, load_recipe

INT8 = Recipe(description="max", weights="int8", activations="int8", algorithm="max")
SAMPLES = Samples([[5, 6, 7, 8], [9, 10], [11] * 30])
KEPT = Path("artifacts/calibration/own.census.json")


@pytest.mark.parametrize(
    ("name", "quantized"),
    [("int8_max", 14), ("int8_sq", 14), ("int8_mixed", 12), ("fp8", 14), ("fp8_kv", 14), ("w4a16_awq", 14)],
)
def test_the_built_in_recipes_export_every_scale_they_promise(
    tiny_model: Any, tmp_path: Path, name: str, quantized: int
) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    recipe = load_recipe(name)
    outcome = quantize_model(tiny_model, recipe, SAMPLES, 64)
    assert outcome is not None
    census = take_census(tiny_model, recipe, outcome.never_called)
    assert (census["promised"], census["quantized"]) == (quantized, quantized)
    assert census["bad"] == census["unexpected"] == census["never_called"] == []
    assert {"layer": "lm_head", "why": "ModelOpt leaves *lm_head* alone"} in census["skipped"]
    assert {"layer": "model.embed_tokens", "why": "not a linear layer (Embedding)"} in census["skipped"]
    assert len(census["kv"]) == (2 if name == "fp8_kv" else 0)
    refuse_unsound(name, census, KEPT)
    export_hf_checkpoint(tiny_model, export_dir=str(tmp_path))
    check_export(tmp_path, census)


def test_a_model_that_lacks_what_the_recipe_promised_shows(tiny_model: Any) -> None:
    quantize_model(tiny_model, replace(INT8, exclude=("*mlp*",)), SAMPLES, 64)
    census = take_census(tiny_model, INT8)
    assert (census["promised"], census["quantized"]) == (14, 8)
    assert census["unexpected"] == sorted(
        f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("down", "gate", "up")
    )
    assert {"layer": "model.layers.0.mlp.up_proj", "why": "promised, and yet not quantised"} in census["skipped"]
    with pytest.raises(QuantizationError, match=r"8 of 14 promised layers .* first difference model.layers.0.mlp.down"):
        refuse_unsound("own", census, KEPT)


def test_never_called_zero_and_nan_scales_are_bad(tiny_model: Any) -> None:
    quantize_model(tiny_model, INT8, SAMPLES, 64)
    layers = tiny_model.model.layers
    layers[0].mlp.up_proj.input_quantizer.reset_amax()
    layers[1].mlp.up_proj.input_quantizer.amax = torch.tensor(float("nan"))
    layers[1].mlp.gate_proj.input_quantizer.amax = torch.tensor(0.0)
    assert take_census(tiny_model, INT8)["bad"] == [
        "model.layers.0.mlp.up_proj.input_quantizer: never called in calibration",
        "model.layers.1.mlp.gate_proj.input_quantizer: zero",
        "model.layers.1.mlp.up_proj.input_quantizer: NaN or infinite",
    ]


def test_an_expert_that_no_sample_reached_is_listed_and_refused() -> None:
    """faults.md, "never-called module": one token reaches two of eight experts in each layer."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=85, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    outcome = quantize_model(model, INT8, Samples([[5]]), 64)
    assert outcome is not None
    missing = [name for name in outcome.never_called if ".down_proj_weight_quantizers." in name]
    assert len(missing) == 2 * 6
    census = take_census(model, INT8, outcome.never_called)
    assert census["never_called"] == outcome.never_called
    assert {row["layer"] for row in census["layers"]} >= {f"model.layers.{layer}.mlp.experts" for layer in (0, 1)}
    with pytest.raises(
        QuantizationError, match=r"no usable scale, first model.layers.0.mlp.experts.*never called"
    ) as it:
        refuse_unsound("own", census, KEPT)
    assert str(KEPT) in it.value.next_step


def test_a_module_that_is_never_called_is_listed(tiny_model: Any) -> None:
    """faults.md, "never-called module", as a linear layer with scales of its own."""
    tiny_model.model.layers[0].spare_proj = torch.nn.Linear(128, 128)
    outcome = quantize_model(tiny_model, INT8, SAMPLES, 64)
    assert outcome is not None
    census = take_census(tiny_model, INT8, outcome.never_called)
    assert census["bad"] == [
        f"model.layers.0.spare_proj.{kind}_quantizer: never called in calibration" for kind in ("input", "weight")
    ]


def test_a_kv_cache_without_scales_is_bad(tiny_model: Any) -> None:
    """faults.md, "KV cache without scales"."""
    recipe = load_recipe("fp8_kv")
    quantize_model(tiny_model, recipe, SAMPLES, 64)
    attention = tiny_model.model.layers[1].self_attn
    attention.k_bmm_quantizer.reset_amax()
    census = take_census(tiny_model, recipe)
    assert census["bad"] == ["model.layers.1.self_attn.k_bmm_quantizer: never called in calibration"]
    assert census["kv"][1]["k_amax"] is None
    for layer in tiny_model.model.layers:
        layer.self_attn.k_bmm_quantizer.disable()
        layer.self_attn.v_bmm_quantizer.disable()
    assert take_census(tiny_model, recipe)["bad"] == [
        "KV cache: the recipe promises fp8, no attention layer has a quantizer for it"
    ]


@pytest.mark.parametrize("lost", ["k_scale", "weight_scale", "input_scale"])
def test_an_export_without_a_scale_is_refused(tmp_path: Path, lost: str) -> None:
    """faults.md, "KV cache without scales", in the files: a reader would take 1.0."""
    from safetensors.numpy import save_file

    census = {
        "layers": [{"layer": "a.q_proj", "weight_amax": 1.0, "input_amax": 1.0}],
        "kv": [{"layer": "a", "k_amax": 1.0, "v_amax": 1.0}],
    }
    names = ["a.q_proj.weight_scale", "a.q_proj.input_scale", "a.k_proj.k_scale", "a.v_proj.v_scale"]
    one = np.ones(1, np.float32)
    save_file(dict.fromkeys(names, one), tmp_path / "model.safetensors")
    check_export(tmp_path, census)
    save_file({name: one for name in names if not name.endswith(lost)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"1 scales are missing from the export, first a"):
        check_export(tmp_path, census)


def test_outliers_stand_out_from_their_kind(tiny_model: Any) -> None:
    with torch.no_grad():
        tiny_model.model.layers[1].input_layernorm.weight[3] = 400.0
    recipe = load_recipe("int8_sq")
    quantize_model(tiny_model, recipe, SAMPLES, 64)
    found = take_census(tiny_model, recipe)["outliers"]
    channel = [row for row in found if row["what"].startswith("largest input channel")]
    assert [row["layer"] for row in channel] == [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert channel[0]["times"] > 100
