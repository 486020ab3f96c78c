"""The stand-in's engine files: a line of JSON, then the bytes of a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.standins.trtllm import fault, settings


def write_engine(
    folder: Path, pretrained: dict[str, Any], built: dict[str, Any], weights: list[bytes], *, form: str
) -> None:
    """``config.json`` and ``rank{r}.engine``, with the faults that are asked for. ``form``: trtllm or hf tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    broken = fault()
    if broken == "build-vocabulary":
        pretrained = pretrained | {"vocab_size": pretrained["vocab_size"] + 4096}
    if broken == "build-unquantised":
        pretrained = pretrained | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    if broken == "build-smaller":
        built = built | {"max_seq_len": built["max_seq_len"] // 2}
    head = json.dumps({"compute": settings()["sm"], "form": form}).encode() + b"\n"
    for rank, content in enumerate(weights):
        if broken == "build-no-rank" and rank == len(weights) - 1:
            continue
        (folder / f"rank{rank}.engine").write_bytes(b"" if broken == "build-empty-rank" else head + content)
    if broken != "build-no-config":
        config = {"version": settings()["version"], "pretrained_config": pretrained, "build_config": built}
        (folder / "config.json").write_text(json.dumps(config, indent=4))


def read_engine(file: Path) -> tuple[dict[str, Any], bytes]:
    """An engine file's first line and its weights."""
    head, _, content = file.read_bytes().partition(b"\n")
    return json.loads(head), content
