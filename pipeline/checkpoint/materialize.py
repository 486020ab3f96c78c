"""Brings the checkpoint of ``params.yaml`` into one local folder, whatever it was given as."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.checkpoint.intake import require_safetensors
from pipeline.errors import CheckpointError
from pipeline.files import atomic_folder
from pipeline.params import Model

# Weights as safetensors, the tokenizer and the configuration; never pickles.
_WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")


def materialize(model: Model, source: dict[str, Any], target: Path) -> None:
    """Writes the checkpoint folder ``target`` (whole or not at all).

    ``source`` is what ``pipeline.sources`` resolved. A local folder is hard-linked where the file system
    allows it, so that a large checkpoint costs no disk. Raises CheckpointError.
    """
    with atomic_folder(target) as part:
        if source["kind"] == "demo":
            from pipeline.checkpoint.demo import write_demo_checkpoint
            from pipeline.sources import DEMO_ADAPTER

            write_demo_checkpoint(DEMO_ADAPTER, part)
            return
        folder = Path(model.checkpoint) if source["kind"] == "folder" else _download(source)
        require_safetensors(folder)
        if model.adapter is not None:
            _merge(folder, Path(model.adapter), part, model.trust_remote_code)
            return
        for pattern in _WANTED:
            for path in folder.glob(pattern):
                _link_or_copy(path.resolve(), part / path.name)


def _download(source: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source["id"], revision=source["commit"], allow_patterns=list(_WANTED)))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _merge(folder: Path, adapter: Path, target: Path, trust_remote_code: bool) -> None:
    if not (adapter / "adapter_model.safetensors").exists():
        raise CheckpointError(
            f"{adapter}: no adapter_model.safetensors", "save the adapter with peft's save_pretrained"
        )
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code).save_pretrained(target)
