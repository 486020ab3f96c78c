"""A checkpoint arrives whole in one folder, whatever it was given as."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint.materialize import materialize
from pipeline.errors import CheckpointError
from pipeline.files import digest_tree
from pipeline.params import Model


def test_a_folder_is_taken_as_it_is_but_never_its_pickles(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    (source / "optimizer.pt").write_bytes(b"pickle")
    materialize(Model(checkpoint=str(source)), {"kind": "folder"}, tmp_path / "target")
    assert digest_tree(tmp_path / "target") == digest_tree(tiny_checkpoint)


def test_a_folder_of_pickles_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="no safetensors file, only pytorch_model.bin"):
        materialize(Model(checkpoint=str(source)), {"kind": "folder"}, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_adapter_is_merged(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    expected = lora.eval()(ids).logits
    materialize(
        Model(checkpoint=str(tiny_checkpoint), adapter=str(tmp_path / "adapter")),
        {"kind": "folder"},
        tmp_path / "target",
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_missing_adapter_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter_model.safetensors"):
        materialize(Model(checkpoint=str(tiny_checkpoint), adapter=str(tmp_path)), {"kind": "folder"}, tmp_path / "t")
