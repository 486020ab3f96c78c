"""A checkpoint to spoil, and ways to spoil it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint: one ``model.safetensors``, tied embeddings, 85 tokens, two layers."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], Any], file: str = "model.safetensors") -> None:
    """Rewrites a shard after ``edit`` changed its dictionary of tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def edit_json(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def split(folder: Path, parts: int = 3) -> list[str]:
    """Spreads ``model.safetensors`` over shards with an index; returns their names."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{place + 1:05d}-of-{parts:05d}.safetensors" for place in range(parts)]
    index = {name: names[place % parts] for place, name in enumerate(sorted(tensors))}
    for shard in names:
        held = {name: tensors[name] for name, place in index.items() if place == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return names
