"""Brings the checkpoint of ``params.yaml`` into one local folder, whatever it was given as."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.checkpoint.adapter import adapter_record, merge_adapter
from pipeline.checkpoint.layout import Layout, read_layout
from pipeline.checkpoint.tensors import read_headers
from pipeline.files import atomic_folder
from pipeline.params import Model

# The tokenizer, the template and the configuration; weights are those that the layout names, never pickles.
_SETTINGS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_WANTED = ("*.safetensors", "*.py", *_SETTINGS)


def materialize(model: Model, source: dict[str, Any], target: Path) -> dict[str, Any]:
    """Writes the checkpoint folder ``target`` (whole or not at all); returns what was merged, for the record.

    ``source`` is what ``pipeline.sources`` resolved. A local folder is hard-linked where the file system
    allows it, so that a large checkpoint costs no disk. Raises CheckpointError.
    """
    with atomic_folder(target) as part:
        if source["kind"] == "demo":
            from pipeline.checkpoint.demo import write_demo_checkpoint
            from pipeline.sources import DEMO_ADAPTER

            write_demo_checkpoint(DEMO_ADAPTER, part)
            return {"adapter": adapter_record(DEMO_ADAPTER)}
        folder = Path(model.checkpoint) if source["kind"] == "folder" else _download(source)
        layout = read_layout(folder, trust_remote_code=model.trust_remote_code)
        if model.adapter is None:
            _take(layout, part)
            return {}
        read_headers(layout)  # damaged or quantised shards are refused before anything loads them
        adapter = Path(model.adapter)
        merge_adapter(folder, adapter, part, base_id=model.checkpoint, trust_remote_code=model.trust_remote_code)
        return {"adapter": adapter_record(adapter)}


def _take(layout: Layout, target: Path) -> None:
    for pattern in _SETTINGS:
        for path in layout.folder.glob(pattern):
            _link_or_copy(path.resolve(), target / path.name)
    for path in (*layout.shards, *layout.code):
        _link_or_copy(path.resolve(), target / path.name)


def _download(source: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source["id"], revision=source["commit"], allow_patterns=list(_WANTED)))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
