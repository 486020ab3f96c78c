"""Fingerprints of a checkpoint's parts, so that two arms can prove that they serve the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.files import digest_file, digest_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def fingerprints(folder: Path, tokenizer: Any) -> dict[str, str]:
    """``sha256:`` digests of weights, tokenizer, chat template and generation config.

    Weights: the digest over the names and bytes of all safetensors files. Tokenizer: over its files. Template:
    over the text that the loaded tokenizer really uses, wherever it was stored.
    """
    weights = {path.name: digest_file(path) for path in sorted(folder.glob("*.safetensors"))}
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    settings.pop("transformers_version", None)
    return {
        "weights": digest_json(weights),
        "tokenizer": digest_json({path.name: digest_file(path) for path in present}),
        "template": digest_json(tokenizer.chat_template or ""),
        "generation_config": digest_json(settings),
    }
