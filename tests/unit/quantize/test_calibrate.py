"""Calibration with the real ModelOpt on a tiny model: what enters the statistics, and what runs out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import SearchMemoryError, quantize_model, usual_budget
from pipeline.quantize.census import take_census
from pipeline.quantize.recipes import Recipe, load_recipe

INT8 = Recipe(description="max", weights="int8", activations="int8", algorithm="max")
PAD = 2


def _load(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def _amax(model: Any) -> dict[str, float]:
    return {row["layer"]: row["input_amax"] for row in take_census(model, INT8)["layers"]}


def _samples(*lengths: int) -> Samples:
    draw = torch.Generator().manual_seed(5)
    sizes = lengths or (8, 40, 8, 17, 40, 3)
    return Samples([torch.randint(5, 85, (size,), generator=draw).tolist() for size in sizes])


@pytest.mark.parametrize("packed", [True, False])
def test_amax_of_a_batch_is_that_of_its_items_alone(
    tiny_checkpoint: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md, "padding enters amax": lengths 8 and 512, with a pad embedding of 1000 times the size."""
    if not packed:
        monkeypatch.setattr("pipeline.quantize.calibrate.check_packing", lambda *_: "forbidden in this test")
    found = []
    for budget in (1, 4096):
        model = _load(tiny_checkpoint)
        with torch.no_grad():
            model.get_input_embeddings().weight[PAD] *= 1000
        outcome = quantize_model(model, INT8, _samples(8, 512, 512), budget)
        assert outcome is not None
        assert outcome.batching == ("packed" if packed else "equal lengths")
        assert outcome.batches == (3 if budget == 1 else 1 if packed else 2)
        found.append(_amax(model))
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 14
    for layer, amax in found[0].items():
        assert amax == pytest.approx(found[1][layer], rel=1e-5)


@pytest.mark.parametrize("name", ["int8_max", "int8_sq", "int8_mixed", "fp8", "fp8_kv"])
def test_every_scale_is_that_of_modelopts_own_loop(tiny_checkpoint: Path, name: str) -> None:
    """ModelOpt alone, one sample at a time, is the reference: equal to the last bit for the same batches."""
    import modelopt.torch.quantization as mtq

    recipe, samples = load_recipe(name), _samples()

    def one_by_one(model: Any) -> None:
        for place in range(len(samples)):
            model.base_model(torch.from_numpy(samples[place].astype("int64"))[None], use_cache=False)

    theirs, ours, packed = (_load(tiny_checkpoint) for _ in range(3))
    mtq.quantize(theirs, recipe.modelopt_config(), one_by_one)
    quantize_model(ours, recipe, samples, budget=1)
    quantize_model(packed, recipe, samples, budget=4096)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == packed.state_dict().keys() == expected.keys()
    assert any(name.endswith("_amax") for name in expected)
    for key, value in expected.items():
        assert torch.equal(ours.state_dict()[key], value), key
        torch.testing.assert_close(packed.state_dict()[key], value, rtol=1e-5, atol=1e-7)


def test_amax_is_the_largest_input_seen(tiny_model: Any) -> None:
    """Against an independent reading: plain forward hooks on the original model."""
    name = "model.layers.0.self_attn.q_proj"
    largest = 0.0

    def watch(_: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal largest
        largest = max(largest, float(inputs[0].abs().max()))

    handle = tiny_model.get_submodule(name).register_forward_pre_hook(watch)
    samples = _samples()
    with torch.inference_mode():
        for place in range(len(samples)):
            tiny_model(torch.from_numpy(samples[place].astype("int64"))[None])
    handle.remove()
    quantize_model(tiny_model, INT8, samples, 64)
    assert _amax(tiny_model)[name] == pytest.approx(largest, rel=1e-6)


def test_an_outlier_at_the_end_of_the_last_sample_is_seen(tiny_checkpoint: Path) -> None:
    """faults.md, "long samples cut": the outlier is the last token of the last sample, after position 512."""
    found = []
    for last in (5, 84):
        model = _load(tiny_checkpoint)
        with torch.no_grad():
            model.get_input_embeddings().weight[84] = 0.0
            model.get_input_embeddings().weight[84, 0] = 500.0
        outcome = quantize_model(model, INT8, Samples([[5, 6, 7]] * 20 + [[5] * 599 + [last]]), 64)
        assert outcome is not None
        assert (outcome.samples, outcome.tokens) == (21, 660)
        found.append(_amax(model)["model.layers.0.self_attn.q_proj"])
    # After RMSNorm a one-hot vector of 128 has the size sqrt(128) = 11.3; the others stay near 3 or 4.
    assert found[0] < 6
    assert found[1] == pytest.approx(128**0.5, rel=1e-3)


def test_every_sample_reaches_the_model_once(tiny_model: Any) -> None:
    seen: list[int] = []
    samples = Samples([[5 + place, 6, 7] + [8] * place for place in range(40)])

    def watch(_: Any, inputs: tuple[Any, ...]) -> None:
        seen.extend(int(token) for token in inputs[0].flatten() if token not in (6, 7, 8))

    handles = []

    def after_check(*_: Any) -> None:  # the packing check runs samples of its own
        handles.append(tiny_model.get_input_embeddings().register_forward_pre_hook(watch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.quantize.calibrate.check_packing", after_check)
        quantize_model(tiny_model, INT8, samples, 64)
    # The first tokens are 5 to 44; those three that the watch leaves out are no first token of another sample.
    assert sorted(seen) == sorted({*range(5, 45)} - {6, 7, 8})


def test_the_logits_head_is_skipped(tiny_model: Any) -> None:
    called = []
    tiny_model.lm_head.register_forward_pre_hook(lambda *_: called.append(1))
    quantize_model(tiny_model, INT8, _samples(), 64)
    assert not called


def test_a_recipe_that_matches_nothing_is_refused(tiny_model: Any) -> None:
    with pytest.raises(QuantizationError, match="matches no layer of LlamaForCausalLM"):
        quantize_model(tiny_model, replace(INT8, exclude=("*",)), _samples(), 64)


def test_nan_activations_are_named(tiny_model: Any) -> None:
    with torch.no_grad():
        tiny_model.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.raises(QuantizationError, match=r"NaN or infinite in \d+ places, first .*layers.1.self_attn"):
        quantize_model(tiny_model, INT8, _samples(), 64)


def _fails_above(model: Any, tokens: int) -> list[int]:
    """Makes the model raise what CUDA raises above so many tokens; returns the sizes that passed."""
    passed: list[int] = []

    def check(_: Any, inputs: tuple[Any, ...]) -> None:
        if inputs[0].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        passed.append(inputs[0].numel())

    model.get_input_embeddings().register_forward_pre_hook(check)
    return passed


def test_out_of_memory_halves_the_budget_and_goes_on(tiny_checkpoint: Path) -> None:
    samples = _samples(*[20] * 30)
    fits, short = _load(tiny_checkpoint), _load(tiny_checkpoint)
    quantize_model(fits, INT8, samples, 100)
    passed = _fails_above(short, 100)
    outcome = quantize_model(short, INT8, samples, 400)
    assert outcome is not None
    # 400 -> 200 -> 100 in the first batch; the second is cut before it is tried.
    assert outcome.out_of_memory == [
        {"batch": 0, "tokens": 400, "budget": 200},
        {"batch": 0, "tokens": 200, "budget": 100},
    ]
    assert passed[-6:] == [100] * 6  # each of the 30 samples once; before them came the check of two samples
    assert _amax(short) == _amax(fits)


def test_a_single_sample_that_does_not_fit_is_an_error(tiny_model: Any) -> None:
    samples = _samples(8, 90)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(QuantizationError) as caught:
        patch.setattr("pipeline.quantize.calibrate.check_packing", lambda *_: _fails_above(tiny_model, 50) and None)
        quantize_model(tiny_model, INT8, samples, 4096)
    assert "a single sample of 90 tokens does not fit the memory (CUDA out of memory" in str(caught.value)
    assert "calib.device_map: auto" in str(caught.value)


def test_awq_in_two_passes_and_its_want_of_memory(tiny_checkpoint: Path) -> None:
    recipe = load_recipe("w4a16_awq")
    model = _load(tiny_checkpoint)
    outcome = quantize_model(model, recipe, _samples(), 128)
    assert outcome is not None
    census = take_census(model, recipe, outcome.never_called)
    assert (census["quantized"], census["bad"]) == (14, [])
    assert all(row["pre_quant_scale_max"] > 0 for row in census["layers"])
    short = _load(tiny_checkpoint)
    _fails_above(short, 60)
    with pytest.raises(SearchMemoryError) as caught:
        quantize_model(short, recipe, _samples(), 128)
    assert caught.value.size == 120  # three rows of 40: what the stage halves


def test_the_usual_budget() -> None:
    assert usual_budget(4096, 10**8, cuda=True) == 32768
    assert usual_budget(576, 10**8, cuda=True) == 131072
    assert usual_budget(576, 80_000, cuda=True) == 10_000
    assert usual_budget(576, 10**8, cuda=False) == 4096
