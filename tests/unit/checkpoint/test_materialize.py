"""A checkpoint arrives whole in one folder, whatever it was given as."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint.intake import inspect_checkpoint
from pipeline.checkpoint.materialize import materialize
from pipeline.errors import CheckpointError
from pipeline.files import digest_tree
from pipeline.params import Model
from tests.unit.checkpoint.conftest import split


def test_a_folder_is_taken_as_it_is_but_never_its_pickles(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    (source / "optimizer.pt").write_bytes(b"pickle")
    (source / "training_args.bin").write_bytes(b"pickle")
    assert materialize(Model(checkpoint=str(source)), {"kind": "folder"}, tmp_path / "target") == {}
    assert digest_tree(tmp_path / "target") == digest_tree(tiny_checkpoint)


def test_shards_come_with_their_index_and_without_a_vendors_copy(checkpoint: Path, tmp_path: Path) -> None:
    names = split(checkpoint)
    (checkpoint / "consolidated.safetensors").write_bytes(b"a copy")
    materialize(Model(checkpoint=str(checkpoint)), {"kind": "folder"}, tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").glob("*.safetensors")) == names
    assert inspect_checkpoint(tmp_path / "target", needs_template=True)["layers"] == 2


def test_a_folder_of_pickles_is_refused_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no safetensors file, only pytorch_model.bin"):
        materialize(Model(checkpoint=str(checkpoint)), {"kind": "folder"}, tmp_path / "target")
    assert not (tmp_path / "target").exists()
