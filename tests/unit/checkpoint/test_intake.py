"""Intake as a whole: a good checkpoint is described, a bad one is refused, whatever the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.intake import inspect_checkpoint
from pipeline.errors import CheckpointError
from pipeline.files import digest_file
from tests.unit.checkpoint.conftest import edit_json, edit_tensors, split

UP = "model.layers.0.mlp.up_proj.weight"


def test_a_good_checkpoint_is_described(checkpoint: Path) -> None:
    report = inspect_checkpoint(checkpoint, needs_template=True)
    # 85 tokens x 128, two layers of (128x128 + 2 x 64x128 + 128x128 + 3 x 256x128 + 2 x 128), final norm 128.
    assert report["parameters"] == 85 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128) + 128
    assert report["dtypes"] == {"F32": report["parameters"]}
    assert report["architecture"] == "LlamaForCausalLM"
    assert (report["layers"], report["vocabulary"]) == (2, 85)
    assert report["eos_token_ids"] == [2]
    assert report["tied_embeddings"] is True
    assert report["fp16_overflow"] == report["warnings"] == []
    assert report["remote_code"] == {}


def test_the_description_does_not_depend_on_the_shards(checkpoint: Path) -> None:
    before = inspect_checkpoint(checkpoint, needs_template=True)
    split(checkpoint)
    assert inspect_checkpoint(checkpoint, needs_template=True) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_beyond_fp16_are_flagged(checkpoint: Path, dtype: str) -> None:
    """faults.md, row "FP16 overflow": weights above 65504 flagged at intake, by name; 65504 itself still fits."""
    import torch

    def fill(value: float) -> None:
        def edit(found: dict[str, Any]) -> None:
            found[UP] = found[UP].to(getattr(torch, dtype))
            found[UP][0] = value

        edit_tensors(checkpoint, edit)

    fill(65280.0)  # the largest bfloat16 below 65504
    assert inspect_checkpoint(checkpoint, needs_template=False)["fp16_overflow"] == []
    fill(-65536.0)
    report = inspect_checkpoint(checkpoint, needs_template=False)
    assert report["fp16_overflow"] == [UP]
    assert f"1 tensors hold values beyond FP16 (65504), up to 65536 in {UP}" in report["warnings"][0]


def test_fingerprints_tell_the_parts_apart(checkpoint: Path) -> None:
    def prints() -> dict[str, str]:
        found: dict[str, str] = inspect_checkpoint(checkpoint, needs_template=False)["fingerprints"]
        return found

    def changed() -> list[str]:
        nonlocal before
        old, before = before, prints()
        return [key for key in old if old[key] != before[key]]

    before = prints()
    edit_tensors(checkpoint, lambda found: found["model.norm.weight"][0].add_(1))
    assert changed() == ["weights"]
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert changed() == ["template"]
    edit_json(checkpoint / "generation_config.json", temperature=0.5)
    assert changed() == ["generation_config"]
    edit_json(checkpoint / "generation_config.json", transformers_version="0")
    assert changed() == []
    edit_json(checkpoint / "tokenizer_config.json", eos_token="a1")
    assert changed() == ["tokenizer"]


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_allowed_code_is_recorded_with_its_digest(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = checkpoint / "modeling_own.py"
    code.write_text(OWN)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit_json(checkpoint / "config.json", auto_map=auto_map, model_type="own")
    with pytest.raises(CheckpointError, match="asks to run code"):
        inspect_checkpoint(checkpoint, needs_template=False)
    report = inspect_checkpoint(checkpoint, needs_template=False, trust_remote_code=True)
    assert report["architecture"] == "OwnModel"
    assert report["trust_remote_code"] is True
    assert report["remote_code"] == {"modeling_own.py": digest_file(code)}


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_broken_settings_are_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text('{"a": ')
    with pytest.raises(CheckpointError, match=f"{name}: not usable JSON") as caught:
        inspect_checkpoint(checkpoint, needs_template=True)
    assert caught.value.next_step
