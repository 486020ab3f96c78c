"""Intake refuses what would make a bad engine: each fault with the smallest checkpoint that has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.intake import inspect_checkpoint
from pipeline.errors import CheckpointError


def _edit_tensor(folder: Path, name: str, edit: Callable[[Any], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps(content))


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_a_good_checkpoint_is_described(checkpoint: Path) -> None:
    report = inspect_checkpoint(checkpoint, needs_template=True)
    # 85 tokens x 128, two layers of (128x128 + 2 x 64x128 + 128x128 + 3 x 256x128 + 2 x 128), final norm 128.
    assert report["parameters"] == 85 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128) + 128
    assert report["eos_token_ids"] == [2]
    assert report["tied_embeddings"] is True
    assert report["fp16_overflow"] == []
    assert report["layers"] == 2


def test_every_eos_id_is_found(checkpoint: Path) -> None:
    _edit_json(checkpoint / "generation_config.json", eos_token_id=[2, 7])
    assert inspect_checkpoint(checkpoint, needs_template=False)["eos_token_ids"] == [2, 7]
    _edit_json(checkpoint / "generation_config.json", eos_token_id=[2, 700])
    with pytest.raises(CheckpointError, match="700 is outside the vocabulary of 85"):
        inspect_checkpoint(checkpoint, needs_template=False)


def test_only_weights_beyond_fp16_are_flagged(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    _edit_tensor(checkpoint, name, lambda tensor: tensor[0].fill_(65504.0))
    assert inspect_checkpoint(checkpoint, needs_template=False)["fp16_overflow"] == []
    _edit_tensor(checkpoint, name, lambda tensor: tensor[0].fill_(-65505.0))
    assert inspect_checkpoint(checkpoint, needs_template=False)["fp16_overflow"] == [name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(checkpoint: Path, value: float) -> None:
    _edit_tensor(checkpoint, "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor[3, :2].fill_(value))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight: 2 of 32768 values are NaN or infinite"):
        inspect_checkpoint(checkpoint, needs_template=False)


def test_fingerprints_tell_the_parts_apart(checkpoint: Path) -> None:
    before = inspect_checkpoint(checkpoint, needs_template=False)["fingerprints"]
    _edit_tensor(checkpoint, "model.norm.weight", lambda tensor: tensor[0].add_(1))
    after = inspect_checkpoint(checkpoint, needs_template=False)["fingerprints"]
    assert [key for key in before if before[key] != after[key]] == ["weights"]
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    again = inspect_checkpoint(checkpoint, needs_template=False)["fingerprints"]
    assert [key for key in after if after[key] != again[key]] == ["template"]


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _lost_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _large_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["extra"] = 85
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_weights, "no safetensors file, only pytorch_model.bin"),
        (_truncated, "model.safetensors: damaged"),
        (_lost_shard, "the index names model-00002-of-00002.safetensors, which is missing"),
        (_large_tokenizer, "the tokenizer knows 86 tokens, the model 85"),
        (_no_template, "no chat template but prompt.template is `chat`"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: _edit_json(folder / "config.json", vocab_size=90), "vocab_size 90, the embedding has 85 rows"),
        (
            lambda folder: _edit_json(folder / "config.json", quantization_config={"quant_method": "awq"}),
            "already quantised \\(awq\\)",
        ),
        (lambda folder: _edit_json(folder / "config.json", auto_map={"AutoModel": "m.M"}), "asks to run code"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "the tokenizer does not load"),
    ],
)
def test_bad_checkpoints_are_refused(checkpoint: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        inspect_checkpoint(checkpoint, needs_template=True)
    assert caught.value.next_step
