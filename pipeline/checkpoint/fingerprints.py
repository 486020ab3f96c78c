"""Fingerprints of a checkpoint's parts, so that two arms can prove that they serve the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import read_settings
from pipeline.files import digest_file, digest_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_PROBE = "Hello, world! 123 \N{LATIN SMALL LETTER N WITH TILDE}\N{CJK UNIFIED IDEOGRAPH-4E2D}"


def fingerprints(folder: Path, tokenizer: Any, weights: str) -> dict[str, str]:
    """``sha256:`` digests of weights, tokenizer, chat template and generation config.

    Weights: as ``tensors.weights_fingerprint`` found them, whatever the shards. Tokenizer: its files, its special
    ids and the ids of one text, since settings outside those files (``add_bos_token``) change what it does.
    Template: the text that the loaded tokenizer really uses, wherever it was stored.
    """
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    settings = read_settings(folder / "generation_config.json")
    settings.pop("transformers_version", None)
    return {
        "weights": weights,
        "tokenizer": digest_json(
            {
                "files": {path.name: digest_file(path) for path in present},
                "special": sorted(tokenizer.all_special_ids),
                "probe": tokenizer(_PROBE)["input_ids"],
            }
        ),
        "template": digest_json(tokenizer.chat_template or ""),
        "generation_config": digest_json(settings),
    }
