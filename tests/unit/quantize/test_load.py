"""A model spread over host and disk calibrates to the same bits; what would not fit is refused beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import InputError, QuantizationError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.census import check_export, take_census
from pipeline.quantize.load import check_offload, load_for_calibration
from pipeline.quantize.memory import GIB, needed, refuse_if_short, weights
from pipeline.quantize.recipes import load_recipe

SAMPLES = Samples([[5, 6, 7, 8], [9, 10], [11] * 30])
SPREAD: dict[str, Any] = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


def test_a_spread_model_gives_the_same_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Half of the layers on the disk stand for what does not fit the GPUs."""
    from modelopt.torch.export import export_hf_checkpoint

    recipe = load_recipe("fp8_kv")
    whole = load_for_calibration(tiny_checkpoint, "fp8", 64)
    spread = load_for_calibration(tiny_checkpoint, "fp8", 64, device_map=SPREAD, offload=tmp_path / "off")
    check_offload(spread, recipe)
    for model in (whole, spread):
        quantize_model(model, recipe, SAMPLES, 64)
    scales = {name: value for name, value in whole.state_dict().items() if "quantizer" in name}
    found = {name: value for name, value in spread.state_dict().items() if "quantizer" in name}
    assert scales.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in scales.items())
    export_hf_checkpoint(spread, export_dir=str(tmp_path / "export"))
    check_export(tmp_path / "export", take_census(spread, recipe))


def test_what_modelopt_cannot_export_from_a_disk_is_refused_first(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_for_calibration(tiny_checkpoint, "int8", 64, device_map=SPREAD, offload=tmp_path / "off")
    with pytest.raises(QuantizationError, match=r"does not fit the GPUs \(disk takes the rest\).*smoothquant"):
        check_offload(model, load_recipe("int8_sq"))
    check_offload(load_for_calibration(tiny_checkpoint, "int8", 64), load_recipe("int8_sq"))


def test_weights_are_counted_from_the_headers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_for_calibration(tiny_checkpoint, "int8", 64)
    assert weights(tiny_checkpoint) == sum(value.numel() for value in model.parameters())  # tied: stored once
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match=r"model.safetensors: not a safetensors file"):
        weights(tmp_path)


def test_the_prediction_by_hand(tiny_checkpoint: Path) -> None:
    """float32 and one byte for the export, eight tensors of 1000 x 256 float32 alive."""
    numbers = weights(tiny_checkpoint)
    assert needed(tiny_checkpoint, "int8", 4, 1000) == numbers * 5 + 8 * 1000 * 256 * 4


def test_too_little_memory_is_refused_with_the_way_out(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantizationError, match=r"needs about 14.0 GiB \(cuda:0: 12.0 GiB free\)") as caught:
        refuse_if_short(14 * GIB, {"cuda:0": 12 * GIB}, spread=False)
    assert "calib.device_map: auto" in caught.value.next_step
    refuse_if_short(14 * GIB, {"cuda:0": 12 * GIB, "host": 3 * GIB}, spread=True)
    with pytest.raises(QuantizationError, match="cuda:0: 12.0 GiB free, host: 1.0 GiB free"):
        refuse_if_short(14 * GIB, {"cuda:0": 12 * GIB, "host": GIB}, spread=True)
    monkeypatch.setattr("pipeline.quantize.load.free_memory", lambda *_: {"host": 1000})
    with pytest.raises(QuantizationError, match="calibration needs about"):
        load_for_calibration(tiny_checkpoint, "int8", 64)
