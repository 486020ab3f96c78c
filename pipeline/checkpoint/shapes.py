"""The shapes of a checkpoint's tensors, without reading a weight: from safetensors headers, or from its config."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.files import read_json

Shapes = dict[str, tuple[int, ...]]  # tensor name -> shape


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``; of a model with several parts (vision and text), the text part. Raises CheckpointError."""
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json", "give the folder of a Hugging Face checkpoint")
    config: dict[str, Any] = read_json(folder / "config.json")
    text: dict[str, Any] = config.get("text_config", {})
    return config | text


def read_shapes(folder: Path) -> Shapes:
    """Every tensor's shape. A folder without weights is built from its config on torch's meta device."""
    files = sorted(folder.glob("*.safetensors"))
    shapes: Shapes = {}
    for path in files:
        shapes |= {name: tuple(entry["shape"]) for name, entry in _header(path).items() if name != "__metadata__"}
    return shapes if files else _on_meta_device(folder)


def _header(path: Path) -> dict[str, Any]:
    """The JSON at the start of a safetensors file: eight bytes of length (little-endian), then so many bytes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
            return header
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}", "download or save it again") from error


def _on_meta_device(folder: Path) -> Shapes:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: no weights, and no model can be made from its config: {error}", "give a folder with weights"
        ) from error
    return {name: tuple(value.shape) for name, value in model.named_parameters()}  # tied weights come once
